"""`stretto predict`: time and memory of one layout, or of every row of a table beside its measurements."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import interop
from stretto.cli.options import Json
from stretto.cli.output import (
    check_writable,
    command_app,
    plain_table,
    report,
    say_no,
    tflops_text,
    uncut,
    write_text,
)
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.planner.estimate import Estimate
    from stretto.planner.machines.cluster import Cluster
    from stretto.planner.memory.fits import Bytes, Fit
    from stretto.planner.run_scores import PredictedRow
    from stretto.planner.runs import RunRecord
    from stretto.spec.job import Job
    from stretto.spec.shape import ModelShape


app = command_app()


@app.command(
    epilog="Example: stretto predict --model llama3-70b --cluster dgx-h100:512 tp=8 pp=4 micro=1 batch=512 "
    "schedule=interleaved chunks=5 recompute=selective zero=1"
)
def predict(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [key=value ...]",
            help="A config with overrides, or fields of a layout named as a table's columns: tp, cp, "
            "ep, pp, dp, micro, batch, seq, schedule, chunks, group, recompute, zero, sp, precision, "
            "attention, software, offload, ...",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model by name, or its config.json.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="A cluster or device by name, with :N for N devices, or a YAML file.")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(help="A CSV file with one run per row; --table-columns documents its columns."),
    ] = None,
    table_columns: Annotated[
        bool, typer.Option(help="Print the reference of a table's columns (Markdown).")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the table with added columns of predictions here.")
    ] = None,
    row: Annotated[
        int | None, typer.Option(help="Predict this row of the table alone, and show its cells and defaults.")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Predict memory too.")] = True,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FRAMEWORK",
            help="Read the job from a file of that framework, or from - (standard input), and show what "
            "would be faster.",
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="With --from: time limit of the search; default: 8.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict a step's time, with an interval, and the memory of the fullest rank.

    With --table, predict every row; where rows have measurements, report the errors, beside those of a
    two-line model and the noise of measuring twice. Fields that are left out take defaults, which are listed,
    as are the reasons why rows are refused; --row shows one row cell by cell.
    With --from, price what a file of another framework runs (a script that starts Megatron-LM, ...), and
    search for layouts of it that do the same work in less time.

    Exit code 1: the layout does not fit the device.
    """
    arguments = words or []
    if source is not None:
        conflicting = {"--table": table, "--out": out, "--row": row}
        if (
            option := next((name for name, value in conflicting.items() if value is not None), None)
        ) is not None:
            raise StrettoError(f"--from reads the job, so {option} conflicts", hint="leave one of them out")
        made = interop.emit.priced(
            source, arguments, model=model, cluster=cluster, seconds=seconds or 8.0, memory=memory
        )

        def priced_text(to: Console) -> None:
            show(to, made.today, {})
            interop.emit.show_priced(to, made)

        record = {"rows": [facts(made.today, {})], **interop.emit.priced_facts(made), "error": None}
        report(record, as_json, priced_text)
        _say_whether_it_fits(made.today)
        return
    if seconds is not None:
        raise StrettoError("--seconds is for --from", hint="without it nothing is searched")
    if table_columns:
        from stretto.planner.runs import column_reference

        text = column_reference()
        report({"columns": text}, as_json, lambda _: print(text, end=""))
        return
    if table is not None:
        if arguments:
            raise StrettoError(
                f"--table takes its layouts from its rows, not from {arguments[0]!r}",
                hint="leave one of them out",
            )

        predict_table(
            table=table, number=row, out=out, cluster=cluster, model=model, memory=memory, as_json=as_json
        )
        return
    for option, value in (("--out", out), ("--row", row)):
        if value is not None:
            raise StrettoError(f"{option} needs --table", hint="add --table FILE.csv, or print with --json")

    result, defaults = _one(arguments, model, cluster, memory)
    report({"rows": [facts(result, defaults)], "error": None}, as_json, lambda to: show(to, result, defaults))
    _say_whether_it_fits(result)


def _say_whether_it_fits(made: Estimate) -> None:
    """Leave with exit code 1 where the layout does not fit."""
    if made.memory is not None and made.memory.verdict == "does not fit":
        raise say_no()


def _is_config(word: str, model: str | None) -> bool:
    """Whether the first word names a config, which it must where there is no --model."""
    named = word.endswith((".yaml", ".yml")) or os.path.isfile(word)
    return "=" not in word and (named or model is None)


def _one(
    words: list[str], model: str | None, cluster: str | None, memory: bool
) -> tuple[Estimate, dict[str, str]]:
    """The estimate of one layout, and the defaults used."""
    from stretto.planner.estimate import estimate

    if cluster is None:
        raise StrettoError("--cluster is missing", hint="add --cluster dgx-a100-80gb:64, or another")
    if words and _is_config(words[0], model):
        if model is not None:
            raise StrettoError(
                f"the model comes from {words[0]}, so --model {model} conflicts",
                hint="leave out --model, or the config",
            )

        job, machine = configured(words[0], words[1:], cluster)
        return estimate(job, machine, memory=memory), {}
    if model is None:
        raise StrettoError("--model is missing", hint="add --model llama3-8b, a config, or --table FILE.csv")

    run = run_from_arguments(words, model, cluster)
    return estimate(run.job, run.cluster, run.assumptions, memory=memory), dict(run.defaults)


GIB = 2**30
_BAR = 40  # characters of a whole step, at most
_BESIDE_BAR = 50  # characters that the other columns take
# columns that KEY=VALUE arguments may set; model and cluster are options
_FIELDS = ("layout", "batch", "memory", "software")
_MORE_FIELDS = ("dropout", "gpus", "node_size", "network", "network_gbs")


def run_from_arguments(words: Sequence[str], model: str, cluster: str) -> RunRecord:
    """Return the layout described by arguments such as `tp=8 pp=4 batch=512`.

    Raises:
        StrettoError: an argument that is not KEY=VALUE, a job that is not legal, or degrees that do not fit
            the cluster.
    """
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.planner.runs import SECTIONS, column_name, read_run

    fields = {*_MORE_FIELDS, *(name for section in _FIELDS for name in SECTIONS[section])}
    cells = dict[str, str]()
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise StrettoError(
                f"{word!r} is not of the form key=value", hint="as in tp=8 pp=4 micro=1 batch=512"
            )
        name = column_name(key)
        if name not in fields:
            raise StrettoError(f"{key} is not a field of a layout", hint="--model and --cluster are options")
        if name in cells:
            raise StrettoError(f"{key} is given twice", hint="give every field at most once")
        cells[name] = value
    return read_run({**cells, "model": model}, find_cluster(cluster), model_named(model))


def model_named(name: str) -> ModelShape:
    """A model by its published name, in any usual spelling, or by its config.json.

    Raises:
        StrettoError: no such model.
    """
    from stretto.spec.presets import find_shape

    return find_shape(name)


def configured(config: str, overrides: Sequence[str], cluster: str) -> tuple[Job, Cluster]:
    """The job of a config on a cluster; "here" is this machine as the config's training uses it.

    Raises:
        StrettoError: a config that does not load, a job that is not legal, a cluster with fewer devices.
    """
    from stretto.cli.jobs import load_language
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.run.config.check import job_of
    from stretto.run.train.prediction import machine_of
    from stretto.spec.rules import problems

    loaded = load_language(config, overrides)
    job = job_of(loaded)
    wrong = problems(job)
    if wrong:
        raise wrong[0]
    if cluster == "here":
        return job, machine_of(job, loaded.train)
    return job, find_cluster(cluster).sized(job.layout.world)


# ------------------------------------------------------------------ JSON


def facts(estimate: Estimate, defaults: Mapping[str, str]) -> dict[str, Any]:
    """An estimate as the command's JSON."""
    job, held = estimate.job, estimate.memory
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
        "step_time_s": estimate.seconds,
        "low": estimate.low,
        "high": estimate.high,
        "widths": dict(estimate.widths),
        "tokens_per_s": estimate.tokens_per_s,
        "tokens_per_s_per_gpu": estimate.tokens_per_s / job.layout.world,
        "tflops_per_gpu": estimate.tflops_per_gpu,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "bubble": estimate.bubble,
        "parts": dict(estimate.parts),
        "dominant": estimate.dominant,
        **memory_facts(held),
        "defaults": dict(defaults),
    }


def memory_facts(held: Fit | None) -> dict[str, Any]:
    """The memory of the fullest rank as JSON; `memory_gib` is allocated, as in metrics.jsonl."""
    if held is None:
        return {"memory_gib": None, "memory": None, "verdict": None}
    return {
        "memory_gib": held.allocated.mid / GIB,
        "memory": {
            "allocated": _interval(held.allocated),
            "reserved": _interval(held.reserved),
            "device": _interval(held.device),
            "capacity_gib": held.capacity / GIB if held.capacity < float("inf") else None,
        },
        "verdict": held.verdict,
    }


def _interval(held: Bytes) -> dict[str, float]:
    return {"low_gib": held.low / GIB, "gib": held.mid / GIB, "high_gib": held.high / GIB}


# ------------------------------------------------------------------ text


def show(to: Console, estimate: Estimate, defaults: Mapping[str, str]) -> None:
    """Print time, rates, memory, and a breakdown of the time."""
    from stretto.view.plan_texts import uncertainty_text

    job = estimate.job
    machine = f"{job.layout.world} x {estimate.cluster.device.name} ({estimate.cluster.name})"
    batch = f"{job.microbatches} microbatches of {job.micro_batch} x {job.sequence} tokens"
    to.print(
        f"{job.layout} on {machine}, {job.schedule_name}{_options(job.options)}, {batch}", soft_wrap=True
    )
    table = plain_table("", "predicted", "")
    table.add_row(
        "step time", _seconds(estimate.seconds), f"{_seconds(estimate.low)} to {_seconds(estimate.high)}"
    )
    table.add_row("", "uncertain by", uncertainty_text(estimate.widths))
    table.add_row(
        "tokens/s",
        f"{estimate.tokens_per_s:,.0f}",
        f"{estimate.tokens_per_s / job.layout.world:,.0f} a device",
    )
    table.add_row("TFLOP/s a device", tflops_text(estimate.tflops_per_gpu), "model FLOPs, attention in full")
    table.add_row("MFU", f"{100 * estimate.mfu:.1f}%", f"HFU {100 * estimate.hfu:.1f}%")
    table.add_row("bubble", f"{100 * estimate.bubble:.1f}%", "")
    if estimate.memory is not None:
        for name in ("allocated", "reserved", "device"):
            held: Bytes = getattr(estimate.memory, name)
            table.add_row(
                f"memory, {name}",
                f"{held.mid / GIB:.1f} GiB",
                f"{held.low / GIB:.1f} to {held.high / GIB:.1f}",
            )
        capacity = estimate.memory.capacity
        whole = "" if capacity == float("inf") else f"of {capacity / GIB:.1f} GiB"
        table.add_row("", estimate.memory.verdict, whole)
    to.print(uncut(to, table), soft_wrap=True)
    to.print()
    _bars(to, estimate)
    if defaults:
        defaults_text = "; ".join(f"{name}={value}" for name, value in defaults.items())
        to.print(f"defaults: {defaults_text}", soft_wrap=True)


def _bars(to: Console, estimate: Estimate) -> None:
    """One bar per part, the longest first."""
    table = plain_table("where the time goes", "s", "", "", left=1)
    bar = max(10, min(_BAR, to.width - _BESIDE_BAR))
    for name, seconds in sorted(estimate.parts.items(), key=lambda part: -part[1]):
        share = seconds / estimate.seconds
        if share >= 0.0005:
            table.add_row(name, f"{seconds:.3g}", f"{100 * share:.1f}%", "█" * max(1, round(share * bar)))
    to.print(uncut(to, table), soft_wrap=True)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"


def _options(options: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    return f" ({text})" if text else ""


def predict_table(
    *,
    table: Path,
    number: int | None,
    out: Path | None,
    cluster: str | None,
    model: str | None,
    memory: bool,
    as_json: bool,
) -> None:
    """Predict every row, or the one of that number, write the file, and report the scores.

    Raises:
        StrettoError: a file that is not a table or cannot be written, a row that it does not have, or an
            unknown model or cluster.
    """
    from stretto.cli.predict_table import show_table, table_csv
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.planner.run_scores import predict_rows, read_table, summary
    from stretto.planner.runs import read_run

    cells = read_table(table)
    shape = None if model is None else model_named(model)
    machine = None if cluster is None else find_cluster(cluster)
    if number is not None and not 1 <= number <= len(cells):
        raise StrettoError(f"{table} has no row {number}", hint=f"rows are numbered from 1 to {len(cells)}")
    check_writable(out)
    chosen = cells if number is None else cells[number - 1 : number]
    read = partial(read_run, cluster=machine, shape=shape)
    predicted = predict_rows(chosen, read, memory, start=number or 1)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        to_stderr = Console(stderr=True)
        predicted = track(predicted, "predicting", len(chosen), console=to_stderr, transient=True)
    rows = list(predicted)
    if out is not None:
        write_text(out, table_csv(rows))
    scores = summary(rows)
    facts = {"rows": [row_facts(row) for row in rows], **scores.as_dict()} if as_json else {}
    if number is not None:
        report(facts, as_json, lambda to: _show_row(to, rows[0]))
        return
    report(facts, as_json, lambda to: show_table(to, rows, scores, out))


def row_facts(row: PredictedRow) -> dict[str, Any]:
    """A row as JSON: predictions, measurements, and the original cells."""
    from stretto.planner.run_scores import memory_error, time_error

    base: dict[str, Any] = {"row": row.number, "refused": row.refused or None}
    if row.run is not None and row.estimate is not None:
        base |= facts(row.estimate, row.run.defaults)
        base |= {
            "measured_step_time_s": row.run.measured.seconds,
            "measured_by": row.run.measured.by or None,
            "error": time_error(row),
            "memory_error": memory_error(row),
            "out_of_memory": row.run.measured.out_of_memory,
        }
    return {**base, "cells": dict(row.cells)}


def _show_row(to: Console, row: PredictedRow) -> None:
    """Print a row cell by cell, then its prediction or why there is none."""
    from stretto.cli.predict_table import percent_text, show_cells
    from stretto.planner.run_scores import time_error

    show_cells(to, row)
    if row.estimate is None or row.run is None:
        to.print(f"not predicted: {row.refused}", soft_wrap=True)
        return
    show(to, row.estimate, {})
    if row.run.measured.seconds is not None:
        error = percent_text(time_error(row), signed=True)
        to.print(f"measured: {_seconds(row.run.measured.seconds)} by {row.run.measured.by}, error {error}")
