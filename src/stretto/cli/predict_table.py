"""A table of runs in the terminal: rows, scores, what cells were taken for, and what was refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.cli.output import plain_table, tflops_text

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.planner.table.predicting import Predicted, Summary
    from stretto.planner.table.scores import Scores

_ROWS, _WORST = 30, 5  # of a table that is shown row by row, and rows in a list
_READINGS = 12  # kinds of readings that are shown, these columns first
_WEIGHTY = ("software", "attention", "recompute", "zero", "flops_counted", "network", "layers")


def show_table(to: Console, rows: Sequence[Predicted], scores: Summary, out: Path | None) -> None:
    """Print the rows of a short table, the scores, memory, and the rows that could not be predicted."""
    if len(rows) <= _ROWS:
        _show_rows(to, rows)
    predicted = sum(one.estimate is not None for one in rows)
    to.print(f"{len(rows)} rows, {predicted} predicted{f', written to {out}' if out else ''}")
    if scores.model is not None and scores.baseline is not None:
        _show_scores(to, scores.model, scores.baseline, scores.efficiency or 0.0)
        if len(rows) > _ROWS:
            _show_worst(to, rows)
    _show_memory(to, scores)
    _show_undeclared(to, rows)
    _show_readings(to, rows)
    _show_refused(to, rows)


def show_cells(to: Console, one: Predicted) -> None:
    """Print a row cell by cell, with what each is taken for."""
    from stretto.planner.table.columns import column

    assumed = dict(one.row.defaults) if one.row is not None else {}
    table = plain_table("column", "cell", "taken for" if one.row is not None else "", left=2)
    for name, cell in one.cells.items():
        known = name if name.startswith("x_") else column(name).name
        if cell.strip():
            table.add_row(known, cell, assumed.pop(known, "as it stands" if one.row is not None else ""))
    for name, value in assumed.items():
        table.add_row(name, "", value)
    to.print(table, soft_wrap=True)


def _show_readings(to: Console, rows: Sequence[Predicted]) -> None:
    """List what cells were taken for, and what was assumed where they say nothing, the weightiest first."""
    counts: dict[tuple[str, str], int] = {}
    for one in rows:
        for reading in one.row.defaults.items() if one.row is not None else ():
            counts[reading] = counts.get(reading, 0) + 1
    for title, read in (("cells that were read", True), ("assumed where cells say nothing", False)):
        chosen = [(name, value, n) for (name, value), n in counts.items() if ("read from" in value) is read]
        chosen.sort(key=lambda entry: (entry[0] not in _WEIGHTY, -entry[2]))
        if chosen:
            to.print(f"{title}:")
        for name, value, n in chosen[:_READINGS]:
            to.print(f"  {name}={value}: {n} row{'s' if n > 1 else ''}", soft_wrap=True, markup=False)
        if len(chosen) > _READINGS:
            to.print(
                f"  and {len(chosen) - _READINGS} more: --out FILE.csv lists them by row, --row N one row"
            )


def _show_rows(to: Console, rows: Sequence[Predicted]) -> None:
    from stretto.planner.table.predicting import columns

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
    for one in rows:
        if one.estimate is None:
            table.add_row(one.name, *[""] * 5, "refused", "")
            continue
        added = columns(one)
        error = added["error_pct"]
        memory = added["predicted_memory_allocated_gib"]
        table.add_row(
            one.name,
            f"{one.estimate.seconds:.3g}",
            "" if added["measured_step_time_s"] is None else f"{added['measured_step_time_s']:.3g}",
            "" if error is None else f"{error:+.1f}%",
            tflops_text(one.estimate.tflops_per_gpu),
            "" if memory is None else f"{memory:.1f}",
            added["verdict"] or "",
            one.estimate.dominant,
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


def _show_worst(to: Console, rows: Sequence[Predicted]) -> None:
    from stretto.planner.table.predicting import columns

    timed = [(columns(one)["error_pct"], one) for one in rows]
    known = sorted(((e, one) for e, one in timed if e is not None), key=lambda pair: -abs(pair[0]))
    to.print(
        "worst: " + "; ".join(f"{one.name} {error:+.0f}%" for error, one in known[:_WORST]), soft_wrap=True
    )


def _show_memory(to: Console, scores: Summary) -> None:
    held = scores.memory
    if held.rows:
        to.print(
            f"memory: {held.rows} rows recorded, mean error {percent_text(held.mape)}, bias "
            f"{percent_text(held.bias, True)}, worst {percent_text(held.worst, True)}",
            soft_wrap=True,
        )
    failed = sum(held.out_of_memory.values())
    if failed:
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in held.out_of_memory.items())
        to.print(f"out of memory: {failed} rows, predicted: {verdicts}", soft_wrap=True)
    if held.ran_does_not_fit:
        to.print(
            f"{held.ran_does_not_fit} of {held.ran} rows that ran were predicted not to fit", soft_wrap=True
        )


def _show_undeclared(to: Console, rows: Sequence[Predicted]) -> None:
    """List rows whose TFLOP/s may count recomputation: up to a third of the measured time depends on it."""
    undeclared = [
        one.number
        for one in rows
        if one.row and "flops_counted" in one.row.defaults and one.row.job.recompute.mode != "none"
    ]
    if undeclared:
        to.print(
            f"{_rows_of(undeclared)}: tflops_per_gpu is taken as model FLOPs; if it counts "
            "recomputation too, the measured step was longer: set flops_counted",
            soft_wrap=True,
        )


def _show_refused(to: Console, rows: Sequence[Predicted]) -> None:
    reasons: dict[str, list[int]] = {}
    for one in rows:
        if one.refused:
            reasons.setdefault(one.refused, []).append(one.number)
    for why, numbers in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        to.print(f"not predicted: {len(numbers)} x {why} ({_rows_of(numbers)})", soft_wrap=True)


def _rows_of(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_WORST]))
    more = f" and {len(numbers) - _WORST} more" if len(numbers) > _WORST else ""
    return f"row{'s' if len(numbers) > 1 else ''} {shown}{more}"
