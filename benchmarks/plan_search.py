"""The time and the remaining gap of a whole search: GPT-3 175B on 1024 A100, a trillion parameters on 3072.

    python benchmarks/plan_search.py [--json FILE]

Times are CPU seconds on one core, from reading the catalogue to the ranking.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import process_time

from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.search.search import search
from stretto.planner.search.task import Task, job_to_plan
from stretto.spec.presets import preset

CASES = (
    ("llama3-8b", 64, 256, 4096),
    ("gpt3-175b", 1024, 1536, 2048),
    ("megatron-1008.0b", 3072, 3072, 2048),
)


def main() -> None:
    """Search each case and print a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    rows = list[dict[str, object]]()
    for model, devices, batch, sequence in CASES:
        started = process_time()
        task = Task(
            job=job_to_plan(shape=preset(model), global_batch=batch, sequence=sequence),
            cluster=find_cluster("dgx-a100-80gb", devices),
        )
        plan = search(task)
        seconds = process_time() - started
        first = plan.ranking[0] if plan.ranking else None
        row = {
            "model": model,
            "devices": devices,
            "seconds": round(seconds, 2),
            "candidates": plan.candidates,
            "replayed": plan.replayed,
            "gap": round(plan.gap, 4),
            "rows": len(plan.ranking),
            "step_s": None if first is None else round(first.estimate.seconds, 3),
            "layout": None if first is None else first.words,
        }
        rows.append(row)
        print(json.dumps(row))
    if wanted.json:
        wanted.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
