"""Published models and the questions that people ask, planned within the default limit: how much work the
first row and the proof take, and how far the first row is from that of a long search.

    python benchmarks/plan_search.py [--seconds WORK] [--long WORK] [--only gpt3,deepseek] [--json FILE]

`cpu s` is the processor time of a search, without the start of Python, `rows s` that to its first rows, and
`layouts` the number of different layouts among the rows; `gap` is by how much what was left unexamined could
be faster than the fastest that fits; `distance` compares the first row with that of a search of `--long`
seconds of work. Plans, which `--json` writes, do not depend on how busy the machine is; times do.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from time import process_time

from stretto.job.presets import find_shape
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.search.ranking import Plan
from stretto.planner.search.search import search_rounds
from stretto.planner.search.task import SearchTask, job_to_plan
from stretto.view.plan_record import plan_record

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
    "llama70-64": ("llama3-70b", "dgx-h100", 64, 512, 8192),
    "llama8-16": ("llama3-8b", "dgx-h100", 16, 128, 8192),
    "qwen32-24": ("qwen3-32b", "dgx-h100", 24, 192, 8192),
    "llama13-12": ("llama2-13b", "dgx-a100-80gb", 12, 96, 4096),
    "qwen4-4090": ("qwen3-4b", "workstation-4090", 8, 64, 4096),
    "qwen14-ascend": ("qwen3-14b", "atlas-910b", 64, 256, 4096),
    "deepseek-512": ("deepseek-v3", "hgx-h800", 512, 3840, 4096),
    "t5": ("t5-11b", "dgx-a100-80gb", 64, 2048, 512),
    "gemma27": ("gemma3-27b", "dgx-h100", 32, 256, 8192),
    "gpt13-v100": ("mpt-13b", "dgx-1-v100-32gb", 64, 512, 2048),
    "mixtral": ("mixtral-8x7b", "dgx-h100", 64, 512, 4096),
    "qwen235": ("qwen3-235b-a22b", "dgx-h100", 256, 1024, 4096),
}


def planned(name: str, seconds: float) -> tuple[Plan, float]:
    """The plan of one case, and the processor time to its first rows."""
    model, cluster, devices, batch, sequence = CASES[name]
    job = job_to_plan(shape=find_shape(model), global_batch=batch, sequence=sequence)
    task = SearchTask(job=job, cluster=find_cluster(cluster, devices), seconds=seconds)
    started, first, plans = process_time(), 0.0, list[Plan]()
    for plan in search_rounds(task):
        first = first or (process_time() - started if plan.ranking else 0.0)
        plans.append(plan)
    return plans[-1], first


def main() -> None:
    """Search each case and print a row of a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--long", type=float, help="seconds of the search to compare with")
    parser.add_argument("--only", help="cases, separated by commas")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    rows = list[dict[str, object]]()
    for name in wanted.only.split(",") if wanted.only else CASES:
        started = process_time()
        plan, first_rows = planned(name, wanted.seconds)
        cpu = process_time() - started
        first = plan.ranking[0] if plan.ranking else None
        distance = None
        if wanted.long and first is not None:
            best = planned(name, wanted.long)[0].ranking[0]
            distance = f"{100 * (first.estimate.seconds / best.estimate.seconds - 1):.1f}%"
        row: dict[str, object] = {
            "case": name,
            "devices": CASES[name][2],
            "rows s": round(first_rows, 2),
            "cpu s": round(cpu, 1),
            "rows": len(plan.ranking),
            "layouts": len({row.estimate.job.layout for row in plan.ranking}),
            "replayed": plan.replayed,
            "gap": f"{100 * plan.gap:.1f}%" if plan.gap < 10 else "none",
            "step s": None if first is None else round(first.estimate.seconds, 3),
            "safe": None if plan.safe is None else round(plan.safe.estimate.seconds, 3),
            "first": None if first is None else first.layout,
            "distance": distance,
        }
        if not rows:
            print("| " + " | ".join(row) + " |")
            print("|---" * len(row) + "|")
        rows.append({**row, "plan": plan_record(replace(plan, seconds=0.0))})
        print(
            "| " + " | ".join("" if value is None else str(value) for value in row.values()) + " |",
            flush=True,
        )
    if wanted.json:
        wanted.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
