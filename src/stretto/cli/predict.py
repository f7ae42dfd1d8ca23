"""`stretto predict`: time and memory of one layout, or of every row of a table beside its measurements."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import interop
from stretto.cli.options import ClusterName, Json, ModelName, Software, as_typed, grouped, software_named
from stretto.cli.output import check_writable, command_app, say_no, tflops_text, write_file
from stretto.cli.report import Cell, CommandReport, number, text
from stretto.errors import StrettoError, counted

if TYPE_CHECKING:
    from stretto.planner.estimate import Estimate
    from stretto.planner.memory.fits import Bytes
    from stretto.planner.run_scores import PredictedRow, TableScores
    from stretto.planner.runs import RunRecord


app = command_app()

GIB = 2**30
_BAR = 40  # characters of a whole step, at most
_OTHER_COLUMNS = 50  # characters of the columns left of the bars
_ROWS, _WORST = 30, 5  # of a table that is shown row by row, and rows in a list
_DEFAULTS = 12  # kinds of defaults that are shown, these columns first
_WEIGHTY = ("software", "attention", "recompute", "zero", "flops_counted", "network", "framework")
# columns that KEY=VALUE arguments may set; model and cluster are options
_FIELDS = ("layout", "batch", "memory", "software")
_MORE_FIELDS = ("dropout", "gpus", "node_size", "network", "network_gbs")


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of `stretto predict`."""

    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [key=value ...]",
            help="A config with overrides, or fields of a layout named as a table's columns: tp, cp, "
            "ep, pp, dp, micro, batch, seq, schedule, chunks, group, recompute, zero, sp, precision, "
            "attention, software, offload, ...",
        ),
    ] = None
    model: ModelName = None
    cluster: ClusterName = None
    table: Annotated[
        Path | None,
        typer.Option(help="A CSV file with one run per row; --table-columns documents its columns."),
    ] = None
    table_columns: Annotated[
        bool, typer.Option(help="Print the reference of a table's columns (Markdown).")
    ] = False
    out: Annotated[
        Path | None, typer.Option(help="Write the table with added columns of predictions here.")
    ] = None
    row: Annotated[
        int | None, typer.Option(help="Predict this row of the table alone, and show its cells and defaults.")
    ] = None
    software: Software = None
    memory: Annotated[bool, typer.Option(help="Predict memory too.")] = True
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FRAMEWORK",
            help="Read the job from a file of that framework, or from - (standard input), and show what "
            "would be faster.",
        ),
    ] = None
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="With --from: time limit of the search; default: 8.")
    ] = None
    as_json: Json = False


@app.command(
    epilog="Example: stretto predict --model llama3-70b --cluster dgx-h100:512 tp=8 pp=4 micro=1 batch=512 "
    "schedule=interleaved chunks=5 recompute=selective zero=1"
)
@grouped(PredictOptions)
def predict(options: PredictOptions) -> None:
    """Predict a step's time, with an interval, and the memory of the fullest rank.

    With --table, predict every row; if rows have measurements, report the errors, beside those of a
    two-line model and the noise of measuring twice. Fields that are left out take defaults, which are listed,
    as are the reasons why rows are refused; --row shows one row cell by cell.
    With --from, price what a file of another framework runs (a script that starts Megatron-LM, ...), and
    search for layouts of it that do the same work in less time.

    Exit code 1: the layout does not fit the device.
    """
    if options.seconds is not None and options.source is None:
        raise StrettoError("--seconds is for --from", hint="without it nothing is searched")
    if options.table_columns and options.source is None:
        from stretto.planner.columns import column_reference

        page = column_reference()
        report = CommandReport({"columns": page})
        report.verbatim(page)
        report.print(options.as_json)
        return
    other = "--from" if options.source is not None else "--table"
    if options.software is not None and (options.source or options.table) is not None:
        raise StrettoError(f"--software conflicts with {other}, which names it", hint="leave it out")
    table_options = {"--table": options.table, "--out": options.out, "--row": options.row}
    used = [name for name, value in table_options.items() if value is not None]
    if options.source is not None:
        if used:
            raise StrettoError(f"--from reads the job, so {used[0]} conflicts", hint="leave one of them out")
        report, estimate = _priced(options, options.source)
    elif options.table is not None:
        if options.arguments:
            raise StrettoError(
                f"--table takes its layouts from its rows, not from {options.arguments[0]!r}",
                hint="leave one of them out",
            )
        _table_report(options, options.table).print(options.as_json)
        return
    elif used:
        raise StrettoError(f"{used[0]} needs --table", hint="add --table FILE.csv, or print with --json")
    else:
        estimate, defaults = _estimate(options)
        report = CommandReport({"rows": [estimate_record(estimate, defaults)], "error": None})
        add_estimate(report, estimate, defaults)
    report.print(options.as_json)
    if estimate.memory is not None and estimate.memory.verdict == "does not fit":
        raise say_no()


def _priced(options: PredictOptions, framework: str) -> tuple[CommandReport, Estimate]:
    """The job of another framework's file, as it is and with faster layouts."""
    priced = interop.emit.priced(
        framework,
        options.arguments or [],
        model=options.model,
        cluster=options.cluster,
        seconds=options.seconds or 8.0,
        memory=options.memory,
    )
    record = {"rows": [estimate_record(priced.today, {})], **interop.emit.priced_facts(priced), "error": None}
    report = CommandReport(record)
    add_estimate(report, priced.today, {})
    report.draw(lambda to: interop.emit.show_priced(to, priced))
    return report, priced.today


def _estimate(options: PredictOptions) -> tuple[Estimate, Mapping[str, str]]:
    """The estimate of one layout, and the defaults used."""
    from stretto.cli.jobs import load_language
    from stretto.job.rules import problems
    from stretto.planner.assumptions import Assumptions
    from stretto.planner.estimate import estimate
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.run.config.job import job_of
    from stretto.run.train.prediction import machine_of

    arguments = options.arguments or []
    model, cluster = options.model, options.cluster
    if cluster is None:
        raise StrettoError("--cluster is missing", hint="add --cluster dgx-a100-80gb:64, or another")
    # without --model, the first argument must be a config
    if arguments and "=" not in arguments[0]:
        config, *overrides = arguments
        if model is None or config.endswith((".yaml", ".yml")) or os.path.isfile(config):
            if model is not None:
                raise StrettoError(
                    f"the model comes from {config}, so --model {model} conflicts",
                    hint="leave out --model, or the config",
                )
            loaded = load_language(config, overrides)
            job = job_of(loaded)
            if wrong := problems(job):
                raise wrong[0]
            defaults = dict[str, str]()
            if cluster == "here":  # as the config's training uses this machine
                machine = machine_of(job, loaded.train.device, loaded.train.threads)
            else:
                requested = find_cluster(cluster)
                machine = requested.sized(job.layout.world)
                if ":" in cluster and requested.devices != job.layout.world:
                    devices = f"{job.layout.world} of {requested.devices}, as many as the config's layout has"
                    defaults["devices"] = devices
            assumptions = Assumptions()
            if options.software is not None:
                assumptions = Assumptions(software=software_named(options.software))
            return estimate(job, machine, assumptions, memory=options.memory), defaults
    if model is None:
        raise StrettoError("--model is missing", hint="add --model llama3-8b, a config, or --table FILE.csv")
    if options.software is not None:
        arguments = [*arguments, f"software={options.software}"]
    run = run_from_arguments(arguments, model, cluster)
    return estimate(run.job, run.cluster, run.assumptions, memory=options.memory), run.defaults


def run_from_arguments(arguments: Sequence[str], model: str, cluster: str) -> RunRecord:
    """Return the layout described by arguments such as `tp=8 pp=4 batch=512`.

    Raises:
        StrettoError: an argument that is not KEY=VALUE, a job that is not legal, or degrees that do not fit
            the cluster.
    """
    from stretto.job.presets import find_shape
    from stretto.planner.columns import SECTIONS, column_name
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.planner.runs import read_run

    fields = {*_MORE_FIELDS, *(name for section in _FIELDS for name in SECTIONS[section])}
    cells, synonyms = dict[str, str](), dict[str, str]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not value:
            raise StrettoError(
                f"{argument!r} is not of the form key=value", hint="as in tp=8 pp=4 micro=1 batch=512"
            )
        name = column_name(key)
        if name not in fields:
            raise StrettoError(f"{key} is not a field of a layout", hint="--model and --cluster are options")
        if name in cells:
            raise StrettoError(f"{key} is given twice", hint="give every field at most once")
        cells[name] = value
        synonyms |= {name: key} if name != key else {}
    try:
        return read_run({**cells, "model": model}, find_cluster(cluster), find_shape(model))
    except StrettoError as error:
        error.message = as_typed(error.message, synonyms)
        raise


# ------------------------------------------------------------------ JSON


def estimate_record(estimate: Estimate, defaults: Mapping[str, str]) -> dict[str, Any]:
    """Return an estimate as the command's JSON."""
    from stretto.view.plan_record import measures_record

    job = estimate.job
    return {
        "layout": str(job.layout),
        "gpus": job.layout.world,
        "schedule": job.schedule_name,
        "options": dict(job.options),
        "micro_batch": job.micro_batch,
        "global_batch": job.global_batch,
        "sequence": job.sequence,
        "recompute": job.recompute.mode,
        "zero": job.dp.mode,
        "tokens_per_s_per_gpu": estimate.tokens_per_s / job.layout.world,
        "hfu": estimate.hfu,
        **measures_record(estimate),
        "known_errors": list(estimate.known_errors),
        "defaults": dict(defaults),
    }


# ------------------------------------------------------------------ text


def add_estimate(report: CommandReport, estimate: Estimate, defaults: Mapping[str, str]) -> None:
    """Add time, rates, memory, and a breakdown of the time."""
    from stretto.view.plan_texts import mfu_text, uncertainty_text

    job, memory = estimate.job, estimate.memory
    machine = f"{job.layout.world} x {estimate.cluster.device.name} ({estimate.cluster.name})"
    options = ", ".join(f"{name}={value}" for name, value in job.options.items() if value is not None)
    schedule = f"{job.schedule_name} ({options})" if options else job.schedule_name
    batch = f"{job.microbatches} microbatches of {job.micro_batch} x {job.sequence} tokens"
    report.line(f"{job.layout} on {machine}, {schedule}, {batch}")
    rows: list[tuple[Cell, Cell, Cell]] = [
        (
            "step time",
            seconds_text(estimate.seconds),
            f"{seconds_text(estimate.low)} to {seconds_text(estimate.high)}",
        ),
        ("", "uncertain by", uncertainty_text(estimate.widths)),
        (
            "tokens/s",
            f"{estimate.tokens_per_s:,.0f}",
            f"{estimate.tokens_per_s / job.layout.world:,.0f} a device",
        ),
        ("TFLOP/s a device", tflops_text(estimate.tflops_per_gpu), "model FLOPs, attention in full"),
        ("MFU", mfu_text(estimate.mfu), f"HFU {mfu_text(estimate.hfu)}"),
        ("bubble", f"{estimate.bubble:.1%}", None),
    ]
    if memory is not None:
        for name in ("allocated", "reserved", "device"):
            used: Bytes = getattr(memory, name)
            interval = f"{used.low / GIB:.1f} to {used.high / GIB:.1f}"
            rows.append((f"memory, {name}", f"{used.mid / GIB:.1f} GiB", interval))
        capacity = None if memory.capacity == inf else f"of {memory.capacity / GIB:.1f} GiB"
        if memory.host:
            size = "" if memory.host_capacity == inf else f"of {memory.host_capacity / GIB:.1f} GiB"
            rows.append(("memory, a node's host", f"{memory.host / GIB:.1f} GiB", size or "not stated"))
        rows.append(("", memory.verdict, capacity))
    report.table([text(""), number("predicted"), number("")], rows, min_width=9)
    report.line()
    parts = [
        (name, seconds, share)
        for name, seconds in sorted(estimate.parts.items(), key=lambda part: -part[1])
        if (share := seconds / estimate.seconds) >= 0.0005
    ]
    report.table(
        [text("where the time goes"), number("s", ".3g"), number("", ".1%"), text("")],
        lambda width: [
            (name, seconds, share, "█" * max(1, round(share * max(10, min(_BAR, width - _OTHER_COLUMNS)))))
            for name, seconds, share in parts
        ],
        min_width=9,
    )
    for error in estimate.known_errors:
        report.line(f"known error: {error}")
    if defaults:
        report.line("defaults: " + "; ".join(f"{name}={value}" for name, value in defaults.items()))


def seconds_text(seconds: float) -> str:
    """Return a time such as 1.23 s."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


# ------------------------------------------------------------------ tables


def _table_report(options: PredictOptions, table: Path) -> CommandReport:
    """Predict every row, or that of `--row`, and write the file of `--out`.

    Raises:
        StrettoError: a file that is not a table or cannot be written, a row that it does not have, or an
            unknown model or cluster.
    """
    from stretto.job.presets import find_shape
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.planner.run_scores import predict_rows, read_table, summary
    from stretto.planner.runs import read_run

    cells = read_table(table)
    shape = None if options.model is None else find_shape(options.model)
    cluster = None if options.cluster is None else find_cluster(options.cluster)
    row, out = options.row, options.out
    if row is not None and not 1 <= row <= len(cells):
        raise StrettoError(f"{table} has no row {row}", hint=f"rows are numbered from 1 to {len(cells)}")
    check_writable(out)
    chosen = cells if row is None else cells[row - 1 : row]
    read = partial(read_run, cluster=cluster, shape=shape)
    predicted = predict_rows(chosen, read, options.memory, start=row or 1)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        to_stderr = Console(stderr=True)
        predicted = track(predicted, "predicting", len(chosen), console=to_stderr, transient=True)
    rows = list(predicted)
    if out is not None:
        write_file(out, table_csv(rows))
    scores = summary(rows)
    report = CommandReport(lambda: {"rows": [_row_record(each) for each in rows], **scores.as_dict()})
    if row is not None:
        _add_row(report, rows[0])
        return report
    if len(rows) <= _ROWS:
        _add_rows(report, rows)
    count = sum(each.estimate is not None for each in rows)
    report.line(f"{counted(len(rows), 'row')}, {count} predicted{f', written to {out}' if out else ''}")
    _add_scores(report, scores, rows)
    _add_notes(report, rows)
    return report


def _row_record(row: PredictedRow) -> dict[str, Any]:
    """Predictions, measurements, and the original cells."""
    from stretto.planner.run_scores import memory_error, time_error

    record: dict[str, Any] = {"row": row.number, "refused": row.refused or None}
    if row.run is not None and row.estimate is not None:
        record |= estimate_record(row.estimate, row.run.defaults)
        record |= {
            "measured_step_time_s": row.run.measured.seconds,
            "measured_by": row.run.measured.by or None,
            "error": time_error(row),
            "memory_error": memory_error(row),
            "out_of_memory": row.run.measured.out_of_memory,
        }
    return {**record, "cells": dict(row.cells)}


def table_csv(rows: Sequence[PredictedRow]) -> str:
    """Return the table as CSV: the original columns, then the added ones."""
    from stretto.planner.run_scores import ADDED, added_columns

    names = list(dict.fromkeys(name for row in rows for name in row.cells))
    lines = io.StringIO()
    writer = csv.DictWriter(lines, [*names, *ADDED], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        added = {
            name: "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
            for name, value in added_columns(row).items()
        }
        writer.writerow({**row.cells, **added})
    return lines.getvalue()


def _add_row(report: CommandReport, row: PredictedRow) -> None:
    """Add a row cell by cell with the defaults of empty cells, then its prediction or why there is none."""
    from stretto.planner.run_scores import time_error

    defaults = dict(row.run.defaults) if row.run is not None else {}
    filled = [(name, cell, defaults.pop(name, "")) for name, cell in row.cells.items() if cell.strip()]
    columns = [text("column"), text("cell"), text("default" if row.run is not None else "")]
    report.table(columns, [*filled, *((name, "", value) for name, value in defaults.items())])
    if row.estimate is None or row.run is None:
        report.line(f"not predicted: {row.refused}")
        return
    add_estimate(report, row.estimate, {})
    measured = row.run.measured
    if measured.seconds is not None:
        error = _percent(time_error(row), signed=True)
        report.line(f"measured: {seconds_text(measured.seconds)} by {measured.by}, error {error}")


def _add_rows(report: CommandReport, rows: Sequence[PredictedRow]) -> None:
    from stretto.planner.run_scores import time_error

    columns = [text("row"), number("pred. s", ".3g"), number("meas. s", ".3g"), number("error", "+.1%")]
    columns += [number("TFLOP/s", tflops_text), number("alloc GiB", ".1f"), text("verdict"), text("dominant")]
    report.table(
        columns,
        [
            (row.name, None, None, None, None, None, "refused", None)
            if row.estimate is None or row.run is None
            else (
                row.name,
                row.estimate.seconds,
                row.run.measured.seconds,
                time_error(row),
                row.estimate.tflops_per_gpu,
                None if (memory := row.estimate.memory) is None else memory.allocated.mid / GIB,
                None if memory is None else memory.verdict,
                row.estimate.dominant,
            )
            for row in rows
        ],
    )


def _add_scores(report: CommandReport, scores: TableScores, rows: Sequence[PredictedRow]) -> None:
    """Add the errors of times, beside those of a two-line model, and of memory."""
    from stretto.planner.estimate import NOISE
    from stretto.planner.run_scores import time_error

    model, baseline = scores.model, scores.baseline
    memory = scores.memory
    if model is not None and baseline is not None:
        cells = [
            (title, *(_percent(getattr(each, name), signed=signed) for each in (model, baseline)), noise)
            for title, name, signed, noise in (
                ("mean error (MAPE)", "mape", False, ""),
                ("median error", "median", False, _percent(NOISE)),
                ("bias", "bias", True, ""),
                ("worst", "worst", True, ""),
                ("inside the interval", "coverage", False, ""),
                (f"regret of the pick, {model.groups} groups", "regret", False, ""),
                ("regret, worst group", "regret_worst", False, ""),
                ("pairs in order", "concordance", False, ""),
            )
        ]
        columns = [text(f"{model.rows} measured rows"), number("predicted")]
        columns += [number("two lines"), number("measured twice")]
        report.table(columns, [row for row in cells if row[1] or row[2]])
        efficiency = scores.efficiency or 0.0
        report.line(
            f"two lines: FLOPs at {efficiency:.1%} of the peak, fitted to these rows, x (1 + (p-1)/(m v))"
        )
        if len(rows) > _ROWS:
            timed = [(error, row.name) for row in rows if (error := time_error(row)) is not None]
            timed.sort(key=lambda pair: -abs(pair[0]))
            report.line("worst: " + "; ".join(f"{name} {error:+.0%}" for error, name in timed[:_WORST]))
    if memory.rows:
        report.line(
            f"memory: {memory.rows} rows recorded, mean error {_percent(memory.mape)}, bias "
            f"{_percent(memory.bias, signed=True)}, worst {_percent(memory.worst, signed=True)}"
        )
    if failed := sum(memory.out_of_memory.values()):
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in memory.out_of_memory.items())
        report.line(f"out of memory: {counted(failed, 'row')}, predicted: {verdicts}")
    if memory.ran_does_not_fit:
        report.line(f"{memory.ran_does_not_fit} of {memory.ran} rows that ran were predicted not to fit")


def _percent(value: float | None, *, signed: bool = False) -> str:
    return "" if value is None else f"{value:{'+' if signed else ''}.1%}"


def _add_notes(report: CommandReport, rows: Sequence[PredictedRow]) -> None:
    """List rows whose TFLOP/s may count recomputation, defaults of empty cells, and refused rows."""
    # up to a third of the measured time depends on it
    undeclared = [
        row.number
        for row in rows
        if row.run and "flops_counted" in row.run.defaults and row.run.job.recompute.mode != "none"
    ]
    if undeclared:
        report.line(
            f"{_rows_text(undeclared)}: tflops_per_gpu is taken as model FLOPs; if it counts "
            "recomputation too, the measured step was longer: set flops_counted"
        )
    counts = Counter(default for row in rows if row.run is not None for default in row.run.defaults.items())
    if counts:
        report.line("defaults of empty cells:")
    chosen = sorted(counts.items(), key=lambda entry: (entry[0][0] not in _WEIGHTY, -entry[1]))
    for (name, value), count in chosen[:_DEFAULTS]:
        report.line(f"  {name}={value}: {counted(count, 'row')}")
    if len(chosen) > _DEFAULTS:
        report.line(
            f"  and {len(chosen) - _DEFAULTS} more: --out FILE.csv lists them by row, --row N one row"
        )
    reasons: dict[str, list[int]] = {}
    for row in rows:
        if row.refused:
            reasons.setdefault(row.refused, []).append(row.number)
    for reason, refused in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        report.line(f"not predicted: {len(refused)} x {reason} ({_rows_text(refused)})")


def _rows_text(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:_WORST]))
    more = f" and {len(rows) - _WORST} more" if len(rows) > _WORST else ""
    return f"row{'s' if len(rows) > 1 else ''} {shown}{more}"
