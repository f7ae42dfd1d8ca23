"""Errors of predicted samples per second of recommenders, row by row.

    python benchmarks/planning_dlrm.py --tables ../shared/tables [--seed]

`--seed`: only the rows of the 113B-parameter model. Rows used for fitting are marked
(`benchmarks/fit_tables.py` lists them); no constant was fitted on the others, but some of their errors
were known while the model of a step was written. Assumptions where a row is silent: popularity 1 /
rank^1.45 for Criteo, as in NVIDIA's synthetic data; placements are the planner's own, of whole tables and
columns, for TorchRec also of rows.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from math import exp, log
from pathlib import Path
from statistics import mean, median

from dlrm_rows import read_runs
from fit_tables import FITTED

HERE = Path(__file__).parent
TABLES = HERE.parent.parent / "shared" / "tables"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--seed", action="store_true")
    args = parser.parse_args()
    runs, refused = read_runs(args.tables / "dlrm.csv")
    if args.seed:
        runs = [run for run in runs if run.job.tables[0].rows > 2e8 and "synthetic" not in run.description]
    print("| row | what | measured/s | predicted/s | error | fitted on |\n|---|---|---|---|---|---|")
    errors = dict[bool, dict[str, list[float]]]()
    for fitted in (True, False):
        errors[fitted] = defaultdict(list)
    for run in runs:
        predicted = run.predicted()
        fitted = run.number in FITTED
        errors[fitted][run.program].append(log(predicted / run.measured))
        error = f"{predicted / run.measured - 1:+.1%}"
        print(
            f"| {run.number} | {run.description} | {run.measured:,.0f} | {predicted:,.0f} | {error} "
            f"| {'yes' * fitted} |"
        )
    for fitted in (True, False):
        print(f"\n{'Fitted on' if fitted else 'Never fitted on'}:\n")
        print("| program | n | MAPE | median | bias | worst |\n|---|---|---|---|---|---|")
        groups = dict(errors[fitted])
        groups["all"] = [error for group in groups.values() for error in group]
        for name, group in groups.items():
            if group:
                print(f"| {name} | {_scores(group)} |")
    reasons = defaultdict[str, int](int)
    for _, why in refused:
        reasons[why] += 1
    print(f"\nnot scored: {dict(reasons)}")


def _scores(errors: list[float]) -> str:
    off = [abs(exp(error) - 1) for error in errors]
    bias = mean(exp(error) - 1 for error in errors)
    return f"{len(errors)} | {mean(off):.1%} | {median(off):.1%} | {bias:+.1%} | {max(off):.1%}"


if __name__ == "__main__":
    main()
