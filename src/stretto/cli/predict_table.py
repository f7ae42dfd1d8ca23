"""A table of runs in the terminal and as CSV: rows, scores, defaults, and what was refused."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.cli.output import plain_table, tflops_text

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.planner.run_scores import PredictedRow, Scores, TableScores

_ROWS, _WORST = 30, 5  # of a table that is shown row by row, and rows in a list
_DEFAULTS = 12  # kinds of defaults that are shown, these columns first
_WEIGHTY = ("software", "attention", "recompute", "zero", "flops_counted", "network", "framework")


def show_table(to: Console, rows: Sequence[PredictedRow], scores: TableScores, out: Path | None) -> None:
    """Print the rows of a short table, the scores, memory, and the rows that could not be predicted."""
    if len(rows) <= _ROWS:
        _show_rows(to, rows)
    predicted = sum(row.estimate is not None for row in rows)
    to.print(f"{len(rows)} rows, {predicted} predicted{f', written to {out}' if out else ''}")
    if scores.model is not None and scores.baseline is not None:
        _show_scores(to, scores.model, scores.baseline, scores.efficiency or 0.0)
        if len(rows) > _ROWS:
            _show_worst(to, rows)
    _show_memory(to, scores)
    _show_undeclared(to, rows)
    _show_defaults(to, rows)
    _show_refused(to, rows)


def table_csv(rows: Sequence[PredictedRow]) -> str:
    """Return the table as CSV: the original columns, then the added ones."""
    from stretto.planner.run_scores import ADDED, added_columns

    names = list(dict.fromkeys(name for row in rows for name in row.cells))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*names, *ADDED], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        added = {
            name: "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
            for name, value in added_columns(row).items()
        }
        writer.writerow({**row.cells, **added})
    return text.getvalue()


def show_cells(to: Console, row: PredictedRow) -> None:
    """Print a row cell by cell, with the defaults of empty cells."""
    table = plain_table("column", "cell", "default" if row.run is not None else "", left=2)
    defaults = dict(row.run.defaults) if row.run is not None else {}
    for name, cell in row.cells.items():
        if cell.strip():
            table.add_row(name, cell, defaults.pop(name, ""))
    for name, value in defaults.items():
        table.add_row(name, "", value)
    to.print(table, soft_wrap=True)


def _show_defaults(to: Console, rows: Sequence[PredictedRow]) -> None:
    """List the defaults of empty cells, the weightiest first."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        for default in row.run.defaults.items() if row.run is not None else ():
            counts[default] = counts.get(default, 0) + 1
    if not counts:
        return
    to.print("defaults of empty cells:")
    chosen = sorted(counts.items(), key=lambda entry: (entry[0][0] not in _WEIGHTY, -entry[1]))
    for (name, value), count in chosen[:_DEFAULTS]:
        text = f"  {name}={value}: {count} row{'s' if count > 1 else ''}"
        to.print(text, soft_wrap=True, markup=False)
    if len(chosen) > _DEFAULTS:
        to.print(f"  and {len(chosen) - _DEFAULTS} more: --out FILE.csv lists them by row, --row N one row")


def _show_rows(to: Console, rows: Sequence[PredictedRow]) -> None:
    from stretto.planner.run_scores import added_columns

    table = plain_table(
        "row",
        "pred. s",
        "meas. s",
        "error",
        "TFLOP/s",
        "alloc GiB",
        "verdict",
        "dominant",
        left=2,
    )
    for row in rows:
        if row.estimate is None:
            table.add_row(row.name, *[""] * 5, "refused", "")
            continue
        added = added_columns(row)
        error = added["error_pct"]
        memory = added["predicted_memory_allocated_gib"]
        table.add_row(
            row.name,
            f"{row.estimate.seconds:.3g}",
            "" if added["measured_step_time_s"] is None else f"{added['measured_step_time_s']:.3g}",
            "" if error is None else f"{error:+.1f}%",
            tflops_text(row.estimate.tflops_per_gpu),
            "" if memory is None else f"{memory:.1f}",
            added["verdict"] or "",
            row.estimate.dominant,
        )
    to.print(table, soft_wrap=True)


def _show_scores(to: Console, model: Scores, plain: Scores, efficiency: float) -> None:
    from stretto.planner.estimate import NOISE

    table = plain_table(f"{model.rows} measured rows", "predicted", "two lines", "measured twice")
    for name, key, noise in (
        ("mean error (MAPE)", "mape", ""),
        ("median error", "median", percent_text(NOISE)),
        ("bias", "bias", ""),
        ("worst", "worst", ""),
        ("inside the interval", "coverage", ""),
        (f"regret of the pick, {model.groups} groups", "regret", ""),
        ("regret, worst group", "regret_worst", ""),
        ("pairs in order", "concordance", ""),
    ):
        signed = key in ("bias", "worst")
        values = [percent_text(getattr(scores, key), signed) for scores in (model, plain)]
        if any(values):
            table.add_row(name, *values, noise)
    to.print(table, soft_wrap=True)
    to.print(
        f"two lines: FLOPs at {100 * efficiency:.1f}% of the peak, fitted to these rows, x (1 + (p-1)/(m v))",
        soft_wrap=True,
    )


def percent_text(value: float | None, signed: bool = False) -> str:
    return "" if value is None else f"{100 * value:{'+' if signed else ''}.1f}%"


def _show_worst(to: Console, rows: Sequence[PredictedRow]) -> None:
    from stretto.planner.run_scores import time_error

    timed = [(100 * error, row.name) for row in rows if (error := time_error(row)) is not None]
    timed.sort(key=lambda pair: -abs(pair[0]))
    worst = "; ".join(f"{name} {error:+.0f}%" for error, name in timed[:_WORST])
    to.print(f"worst: {worst}", soft_wrap=True)


def _show_memory(to: Console, scores: TableScores) -> None:
    memory = scores.memory
    if memory.rows:
        to.print(
            f"memory: {memory.rows} rows recorded, mean error {percent_text(memory.mape)}, bias "
            f"{percent_text(memory.bias, True)}, worst {percent_text(memory.worst, True)}",
            soft_wrap=True,
        )
    failed = sum(memory.out_of_memory.values())
    if failed:
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in memory.out_of_memory.items())
        to.print(f"out of memory: {failed} rows, predicted: {verdicts}", soft_wrap=True)
    if memory.ran_does_not_fit:
        to.print(
            f"{memory.ran_does_not_fit} of {memory.ran} rows that ran were predicted not to fit",
            soft_wrap=True,
        )


def _show_undeclared(to: Console, rows: Sequence[PredictedRow]) -> None:
    """List rows whose TFLOP/s may count recomputation: up to a third of the measured time depends on it."""
    undeclared = [
        row.number
        for row in rows
        if row.run and "flops_counted" in row.run.defaults and row.run.job.recompute.mode != "none"
    ]
    if undeclared:
        to.print(
            f"{_rows_of(undeclared)}: tflops_per_gpu is taken as model FLOPs; if it counts "
            "recomputation too, the measured step was longer: set flops_counted",
            soft_wrap=True,
        )


def _show_refused(to: Console, rows: Sequence[PredictedRow]) -> None:
    reasons: dict[str, list[int]] = {}
    for row in rows:
        if row.refused:
            reasons.setdefault(row.refused, []).append(row.number)
    for why, numbers in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        to.print(f"not predicted: {len(numbers)} x {why} ({_rows_of(numbers)})", soft_wrap=True)


def _rows_of(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_WORST]))
    more = f" and {len(numbers) - _WORST} more" if len(numbers) > _WORST else ""
    return f"row{'s' if len(numbers) > 1 else ''} {shown}{more}"
