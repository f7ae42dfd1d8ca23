"""The largest published models, planned within the default time limit, and how far the result is from a long
search.

    python benchmarks/plan_search.py [--long SECONDS] [--only gpt3,deepseek] [--json FILE]

`wall s` is the time of `search` on one core, without the start of Python; `distance` compares the first row
with that of a search of `--long` seconds. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter

from stretto.job.presets import find_shape
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.search.ranking import Plan
from stretto.planner.search.search import search
from stretto.planner.search.task import SearchTask, job_to_plan

# model, cluster, devices, samples of a step, tokens of a sample
CASES = {
    "gpt3": ("gpt3-175b", "dgx-a100-80gb", 1024, 1536, 2048),
    "mt-nlg": ("korthikanti-530b", "dgx-a100-80gb", 2240, 1920, 2048),
    "llama405-8192": ("llama3.1-405b", "dgx-h100", 8192, 2048, 8192),
    "llama405-16384": ("llama3.1-405b", "dgx-h100", 16384, 2048, 8192),
    "nemotron": ("nemotron4-340b", "dgx-h100", 6144, 2304, 4096),
    "deepseek": ("deepseek-v3", "hgx-h800", 2048, 15360, 4096),
    "llama70": ("llama3-70b", "dgx-h100", 16, 16, 8192),
    "trillion": ("megatron-1008.0b", "dgx-a100-80gb", 3072, 3072, 2048),
}


def planned(name: str, seconds: float) -> Plan:
    """The plan of one case."""
    model, cluster, devices, batch, sequence = CASES[name]
    job = job_to_plan(shape=find_shape(model), global_batch=batch, sequence=sequence)
    return search(SearchTask(job=job, cluster=find_cluster(cluster, devices), seconds=seconds))


def main() -> None:
    """Search each case and print a row of a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--long", type=float, help="seconds of the search to compare with")
    parser.add_argument("--only", help="cases, separated by commas")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    print("| case | devices | wall s | rows | replayed | bound on what is left | step s | first | distance |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = list[dict[str, object]]()
    for name in wanted.only.split(",") if wanted.only else CASES:
        started = perf_counter()
        plan = planned(name, wanted.seconds)
        wall = perf_counter() - started
        fastest = min((one.estimate.seconds for one in plan.ranking), default=None)
        distance = None
        if wanted.long and fastest is not None:
            best = min(one.estimate.seconds for one in planned(name, wanted.long).ranking)
            distance = fastest / min(best, fastest) - 1
        row: dict[str, object] = {
            "case": name,
            "devices": CASES[name][2],
            "wall s": round(wall, 1),
            "rows": len(plan.ranking),
            "replayed": plan.replayed,
            "bound on what is left": f"{100 * plan.gap:.1f}%" if plan.gap < 10 else "none",
            "step s": None if fastest is None else round(fastest, 3),
            "first": None if fastest is None else plan.ranking[0].layout,
            "distance": None if distance is None else f"{100 * distance:.1f}%",
        }
        rows.append(row)
        print(
            "| " + " | ".join("" if value is None else str(value) for value in row.values()) + " |",
            flush=True,
        )
    if wanted.json:
        wanted.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
