"""A whole table for `stretto predict`: columns added to its rows, and how far off they are."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli.face import report, write_text

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.planner.table.predicting import Predicted, Summary
    from stretto.planner.table.scores import Scores

_ROWS = 30  # of a table that is shown row by row
_WORST = 5


def predict_table(
    table: Path, out: Path | None, cluster: str | None, model: str | None, memory: bool, as_json: bool
) -> None:
    """Predict every row, write the file, and report the scores.

    Raises:
        StrettoError: a file that is no table, a model or cluster that is not known, or a file that cannot be
            written.
    """
    from stretto.cli.predict_one import model_named
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.planner.table.file import read_table
    from stretto.planner.table.predicting import predict_rows, summary

    cells = read_table(table)
    shape = None if model is None else model_named(model)
    machine = None if cluster is None else find_cluster(cluster)
    rows = list(_watched(predict_rows(cells, machine, shape, memory), len(cells)))
    if out is not None:
        write_text(out, written(rows))
    found = summary(rows)
    facts = {"rows": [row_facts(one) for one in rows], **found.facts()} if as_json else {}
    report(facts, as_json, lambda to: show(to, rows, found, out))


def _watched(rows: Iterable[Predicted], count: int) -> Iterator[Predicted]:
    """With a bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield from rows
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(rows, "predicting", count, console=Console(stderr=True), transient=True)


def written(rows: Sequence[Predicted]) -> str:
    """The table as CSV: its own columns, then those that are added."""
    from stretto.planner.table.predicting import ADDED, columns

    names = list(dict.fromkeys(name for one in rows for name in one.cells))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*names, *ADDED], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for one in rows:
        added = {name: _short(value) for name, value in columns(one).items()}
        writer.writerow({**one.cells, **added})
    return text.getvalue()


def _short(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def row_facts(one: Predicted) -> dict[str, Any]:
    """A row as JSON has it: what is predicted, what was measured, and the row's own cells."""
    from stretto.cli.predict_one import facts
    from stretto.planner.table.predicting import columns

    added = columns(one)
    base: dict[str, Any] = {"row": one.number, "refused": one.refused or None}
    if one.row is not None and one.estimate is not None:
        base |= facts(one.estimate, one.row.defaults)
        base |= {
            "measured_step_time_s": added["measured_step_time_s"],
            "measured_by": added["measured_by"],
            "error": None if added["error_pct"] is None else added["error_pct"] / 100,
            "memory_error": None if added["memory_error_pct"] is None else added["memory_error_pct"] / 100,
            "out_of_memory": one.row.measured.out_of_memory,
        }
    return {**base, "cells": dict(one.cells)}


# ------------------------------------------------------------------ text


def show(to: Console, rows: Sequence[Predicted], found: Summary, out: Path | None) -> None:
    """Rows of a short table, the scores, memory, and what was not predicted."""
    if len(rows) <= _ROWS:
        _show_rows(to, rows)
    predicted = sum(one.estimate is not None for one in rows)
    to.print(f"{len(rows)} rows, {predicted} predicted{f', written to {out}' if out else ''}")
    if found.model is not None and found.baseline is not None:
        _show_scores(to, found.model, found.baseline, found.efficiency or 0.0)
        if len(rows) > _ROWS:
            _show_worst(to, rows)
    _show_memory(to, found)
    _show_undeclared(to, rows)
    _show_refused(to, rows)


def _show_rows(to: Console, rows: Sequence[Predicted]) -> None:
    from stretto.cli.predict_one import plain_table
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
            f"{one.estimate.tflops_per_gpu:.1f}",
            "" if memory is None else f"{memory:.1f}",
            added["verdict"] or "",
            one.estimate.dominant,
        )
    to.print(table, soft_wrap=True)


def _show_scores(to: Console, model: Scores, plain: Scores, efficiency: float) -> None:
    from stretto.cli.predict_one import plain_table
    from stretto.planner.table.scores import NOISE

    table = plain_table(f"{model.rows} measured rows", "predicted", "two lines", "measured twice")
    for name, key, noise in (
        ("mean error (MAPE)", "mape", ""),
        ("median error", "median", _percent(NOISE)),
        ("bias", "bias", ""),
        ("worst", "worst", ""),
        ("inside the interval", "coverage", ""),
        (f"regret of the pick, {model.groups} groups", "regret", ""),
        ("regret, worst group", "regret_worst", ""),
        ("pairs in order", "concordance", ""),
    ):
        signed = key in ("bias", "worst")
        values = [_percent(getattr(scores, key), signed) for scores in (model, plain)]
        if any(values):
            table.add_row(name, *values, noise)
    to.print(table, soft_wrap=True)
    to.print(
        f"two lines: FLOPs at {100 * efficiency:.1f}% of the peak, fitted to these very rows, "
        "x (1 + (p-1)/(m v))",
        soft_wrap=True,
    )


def _percent(value: float | None, signed: bool = False) -> str:
    return "" if value is None else f"{100 * value:{'+' if signed else ''}.1f}%"


def _show_worst(to: Console, rows: Sequence[Predicted]) -> None:
    from stretto.planner.table.predicting import columns

    timed = [(columns(one)["error_pct"], one) for one in rows]
    known = sorted(((e, one) for e, one in timed if e is not None), key=lambda pair: -abs(pair[0]))
    to.print(
        "worst: " + "; ".join(f"{one.name} {error:+.0f}%" for error, one in known[:_WORST]), soft_wrap=True
    )


def _show_memory(to: Console, found: Summary) -> None:
    held = found.memory
    if held.rows:
        to.print(
            f"memory: {held.rows} rows recorded, mean error {_percent(held.mape)}, bias "
            f"{_percent(held.bias, True)}, worst {_percent(held.worst, True)}",
            soft_wrap=True,
        )
    failed = sum(held.out_of_memory.values())
    if failed:
        said = ", ".join(f"{count} {verdict}" for verdict, count in held.out_of_memory.items())
        to.print(f"out of memory: {failed} rows, predicted: {said}", soft_wrap=True)
    if held.ran_does_not_fit:
        to.print(f"{held.ran_does_not_fit} of {held.ran} rows that ran were said not to fit", soft_wrap=True)


def _show_undeclared(to: Console, rows: Sequence[Predicted]) -> None:
    """Rows whose TFLOP/s may count what they recompute: up to a third of the measured time hangs on it."""
    undeclared = [
        one.number
        for one in rows
        if one.row and "flops_count" in one.row.defaults and one.row.job.recompute.mode != "none"
    ]
    if undeclared:
        to.print(
            f"{_rows_of(undeclared)}: tflops_per_gpu is taken for model FLOPs; where it counts recomputation "
            "too, the measured step was longer: say which in flops_count",
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
