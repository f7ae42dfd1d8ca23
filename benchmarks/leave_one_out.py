"""Claim: predictions hold on a table that none of their fitted constants has seen.

For each table of measured runs, refits the few constants that runs determine (fit_steps.py) on the other
tables, predicts all rows of the table, and scores them: errors, regret and concordance of groups of
alternative layouts, and the share of rows inside intervals whose width is calibrated on the other tables
too. Beside it the two-line model (stretto.planner.run_scores), whose constant is fitted to the very rows.

    python benchmarks/leave_one_out.py --tables ../shared/tables [--only TABLE] [--csv rows.csv] [--write]

The output is Markdown, as in docs/evidence/prediction-errors.md. `--write` stores the width of intervals,
calibrated on all tables, in planner/data/intervals.yaml.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from math import log
from pathlib import Path
from time import perf_counter

import numpy as np
from fit_steps import (
    CONSTANTS,
    TimedRow,
    Values,
    chosen_rows,
    linearised,
    minimised,
    point_of,
    shipped,
    timed_rows,
    values_at,
    with_constants,
)
from fitting import TABLES
from planning import HEAD, line, percent
from published import ADAPTERS

from stretto.planner.assumptions import SoftwareAssumptions
from stretto.planner.estimate import Estimate, estimate, interval
from stretto.planner.run_scores import PredictedRow, summary

# share of runs of the other tables that intervals hold, so that they hold the promised nine of ten of a
# table that is left out, whose devices, software or networks the others lack
INSIDE = 0.95


def predicted(rows: Sequence[TimedRow], values: Values) -> list[PredictedRow]:
    """All rows with predictions by software with these constants."""
    estimates = dict[object, Estimate]()  # rows that repeat a job share its prediction
    predictions = list[PredictedRow]()
    for number, (cells, run) in enumerate(rows, 1):
        run = with_constants(run, values)
        key = (run.group, run.repeat)
        if key not in estimates:
            estimates[key] = estimate(run.job, run.cluster, run.assumptions, memory=False)
        predictions.append(PredictedRow(number=number, cells=cells, run=run, estimate=estimates[key]))
    return predictions


def needed_scales(rows: Sequence[PredictedRow]) -> list[float]:
    """The scale of all widths with which each measured run would be at the edge of its interval."""
    scales = list[float]()
    for row in rows:
        assert row.run is not None
        assert row.estimate is not None
        assert row.run.measured.seconds is not None
        off = abs(log(row.estimate.seconds / row.run.measured.seconds))
        estimate = row.estimate
        software = row.run.assumptions.software
        unit = interval(
            estimate.job, estimate.cluster, estimate.precision, estimate.parts, software, scale=1.0
        )
        scales.append(off / log(unit.high))
    return scales


def calibrated_scale(tables: Sequence[Sequence[float]]) -> float:
    """The scale that holds `INSIDE` of the runs, of each table equally."""
    scales = np.concatenate([np.asarray(table) for table in tables])
    weights = np.concatenate([np.full(len(table), 1 / len(table)) for table in tables])
    order = np.argsort(scales)
    passed = np.cumsum(weights[order]) / weights.sum()
    return float(scales[order][np.searchsorted(passed, INSIDE - 1e-9)])


def scaled(row: PredictedRow, scale: float) -> PredictedRow:
    """A prediction with its interval at that scale."""
    estimate = row.estimate
    assert estimate is not None
    software = row.run.assumptions.software if row.run else SoftwareAssumptions()
    around = interval(
        estimate.job, estimate.cluster, estimate.precision, estimate.parts, software, scale=scale
    )
    seconds = estimate.seconds
    low, high = around.low * seconds, around.high * seconds
    return replace(row, estimate=replace(estimate, low=low, high=high, widths=around.widths))


def constants_line(name: str, values: Values, scale: float) -> str:
    shown = (f"{values[constant]:.3g}" for constant in CONSTANTS)
    return f"| {name} | {' | '.join(shown)} | {scale:.2f} |"


def write_rows(path: Path, tables: Mapping[str, Sequence[PredictedRow]]) -> None:
    """One line a row: layout, measured, predicted, error, parts."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["table", "name", "measured", "predicted", "error_pct", "low", "high", "parts"])
        for table, rows in tables.items():
            for row in rows:
                estimate, run = row.estimate, row.run
                if estimate is None or run is None or run.measured.seconds is None:
                    continue
                error = 100 * (estimate.seconds / run.measured.seconds - 1)
                parts = " ".join(f"{k}={v / estimate.seconds:.3f}" for k, v in estimate.parts.items() if v)
                times = (
                    f"{x:.4g}"
                    for x in (run.measured.seconds, estimate.seconds, error, estimate.low, estimate.high)
                )
                writer.writerow([table, row.name.partition(": ")[2], *times, parts])


def write_scale(scale: float) -> None:
    path = Path(str(files("stretto.planner").joinpath("data/intervals.yaml")))
    text = re.sub(r"(?m)^scale: .*$", f"scale: {scale:.3g}", path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of the measured tables")
    parser.add_argument("--only", default="", help="print this table alone; all are needed all the same")
    parser.add_argument("--csv", type=Path, help="write a line a row")
    parser.add_argument("--write", action="store_true", help="the width of intervals, into intervals.yaml")
    options = parser.parse_args()
    start = perf_counter()
    rows = {name: timed_rows(options.tables, name) for name in ADAPTERS}
    point = point_of(shipped())
    linear = {name: linearised(chosen_rows(of_table), point) for name, of_table in rows.items()}
    print(f"linearised in {perf_counter() - start:.0f} s", file=sys.stderr)
    values = {
        name: values_at(minimised([table for other, table in linear.items() if other != name], point))
        for name in rows
    }
    predictions = {name: predicted(of_table, values[name]) for name, of_table in rows.items()}
    scales = {name: needed_scales(of_table) for name, of_table in predictions.items()}
    scale = {name: calibrated_scale([s for other, s in scales.items() if other != name]) for name in rows}
    predictions = {
        name: [scaled(row, scale[name]) for row in of_table] for name, of_table in predictions.items()
    }
    print(f"{HEAD}")
    for name, of_table in predictions.items():
        if options.only in name:
            print(line(name, of_table))
    every = [row for of_table in predictions.values() for row in of_table]
    print(line("all", every))
    totals = [summary(of_table).model for of_table in predictions.values()]
    means = [t.mape for t in totals if t is not None]
    inside = [t.coverage for t in totals if t is not None and t.coverage is not None]
    print(
        f"\nMean over tables: MAPE {percent(float(np.mean(means)))}, "
        f"inside {percent(float(np.mean(inside)))}."
    )
    print(f"\n| left out | {' | '.join(CONSTANTS)} | width |\n|---|{'---|' * (len(CONSTANTS) + 1)}")
    for name in rows:
        print(constants_line(name, values[name], scale[name]))
    scale_of_all = calibrated_scale(list(scales.values()))
    print(constants_line("none", shipped(), scale_of_all))
    if options.csv:
        write_rows(options.csv, predictions)
    if options.write:
        write_scale(scale_of_all)
    print(f"{perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
