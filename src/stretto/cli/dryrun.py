"""`stretto dryrun`: run one rank of any layout in one process, and compare with the planner's counts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.options import ConfigFile, Json, Overrides
from stretto.cli.output import command_app, say_no
from stretto.cli.report import Cell, CommandReport, number, size, text
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.job.job import Job
    from stretto.layout.layout import Layout
    from stretto.planner.rank_step.counts import Counts
    from stretto.run.dryrun.run import DryRun

app = command_app()

_Counted = Mapping[tuple[str, str], int]


@app.command(epilog="Example: stretto dryrun configs/llama-1b-64gpu.yaml layout.tp=8 --rank 21")
def dryrun(
    path: ConfigFile,
    overrides: Overrides = None,
    rank: Annotated[int, typer.Option("--rank", help="The rank to run, from 0.")] = 0,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Run few microbatches, and count the others as those that they repeat: the same counts.",
        ),
    ] = False,
    allocator: Annotated[
        bool,
        typer.Option(
            "--allocator",
            help="Run on a simulated GPU with torch's own allocator (docs/evidence/gpu.md).",
        ),
    ] = False,
    device_gib: Annotated[
        float | None,
        typer.Option(min=1, help="With --allocator: memory of the device; default: an H100's, 79.11."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the code of one rank of a layout of any size here, on tensors without values.

    Runs assembly and two steps of pipeline, reductions and optimizer. Counts the operations of the second
    step, the bytes and calls of every collective, and the peak memory of its tensors, beside the planner's
    prediction. A rank of the largest models takes a minute or two; with --quick, seconds.

    No other rank exists and no text is read. Tokens are spread evenly over experts; bytes are the whole
    tensor's that a collective works on; groups are named by the axes along which their ranks differ.

    With --allocator, the rank runs on a simulated GPU instead, on which kernels compute nothing: torch's own
    allocator and process groups show the memory that tensors take, what the allocator reserves for them, and
    where memory runs out (exit code 1); and what a step asks of the device.
    """
    from stretto.cli.jobs import load_language
    from stretto.job.rules import problems
    from stretto.planner.memory.job import memory_of
    from stretto.planner.memory.ranks import one_rank
    from stretto.planner.rank_step.counts import countable, counts
    from stretto.run.config.job import job_of

    if device_gib is not None and not allocator:
        raise StrettoError("--device-gib needs --allocator", hint="add --allocator")
    if quick and allocator:
        raise StrettoError("--quick and --allocator exclude each other", hint="leave one out")
    job = job_of(load_language(path, overrides or []))
    if wrong := problems(job):
        raise wrong[0]
    job.layout.coordinates(rank)  # raises for a rank outside the layout
    memory = memory_of(job, job.program())  # of one step, as it will run
    if allocator:
        predicted_peak = one_rank(memory, job.layout.coordinates(rank)["pp"]).total
        _run_on_allocator(job, rank, device_gib, predicted_peak, as_json)
        return
    title = f"dry run of rank {rank} of {job.layout.world}, {job.microbatches} microbatches"
    with _progress(title, as_json) as progress:  # before torch is imported, which takes seconds
        from stretto.run.dryrun.run import dry_run

        ran = dry_run(job, rank, quick=quick, progress=progress)
        if progress is not None:
            progress("the planner's counts", 0, 1)
        predicted = counts(job, rank, memory) if countable(job, memory) else None
        predicted_peak = one_rank(memory, ran.coordinates["pp"]).total
    _report(job.layout, ran, predicted, predicted_peak).print(as_json)


def _run_on_allocator(job: Job, rank: int, device_gib: float | None, predicted: int, as_json: bool) -> None:
    from stretto.run.dryrun.simulated_gpu import SimulatedGpu

    gpu = SimulatedGpu(None if device_gib is None else int(device_gib * 2**30))  # before torch
    with _progress(f"rank {rank} of {job.layout.world} on a simulated GPU", as_json) as progress:
        from stretto.run.dryrun.allocator import run_on_allocator

        ran = run_on_allocator(gpu, job, rank, progress=progress)
    report = CommandReport(
        {
            "rank": ran.rank,
            "coordinates": ran.coordinates,
            "allocated_bytes": ran.allocated,
            "reserved_bytes": ran.reserved,
            "predicted_bytes": predicted,
            "retries": ran.retries,
            "work": ran.work,
            "host_s": ran.host_s,
            "out_of_memory": ran.out_of_memory,
        }
    )
    coordinates = ", ".join(f"{axis} {position}" for axis, position in ran.coordinates.items())
    report.line(f"rank {ran.rank} of {job.layout.world} ({job.layout.describe()}): {coordinates}\n")
    failed = ran.out_of_memory is not None
    difference = None if failed else predicted / ran.allocated - 1
    report.table(
        [text("memory, at most"), size("allocator"), size("predicted"), number("difference", "+.2%")],
        [("tensors", ran.allocated, predicted, difference), ("reserved", ran.reserved, None, None)],
    )
    report.table(
        [text("asked of the device"), number("the last step", ",")],
        [(name.replace("_", " "), count) for name, count in ran.work.items()],
    )
    report.line(f"the host ran the step in {ran.host_s:.2f} s; the allocator tried again {ran.retries} times")
    if job.compile != "off" or job.attention == "flex":
        report.line("blocks ran uncompiled and without FlexAttention, so the job's own memory may differ")
    if failed:
        report.line(f"does not fit: {ran.out_of_memory}")
    report.print(as_json)
    if failed:
        raise say_no()


_EVERY = 10.0  # seconds between lines if stderr is no terminal


@contextmanager
def _progress(title: str, quiet: bool) -> Generator[Callable[[str, int, int], None] | None]:
    """Show on stderr what runs and how far it is: a bar in a terminal, elsewhere a line every few seconds."""
    if quiet:
        yield None
    elif not sys.stderr.isatty():
        started = last = time.monotonic()
        print(title, file=sys.stderr, flush=True)

        def line(phase: str, done: int, of: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last > _EVERY:
                last = now
                print(f"{phase}: {done / of:.0%}, {now - started:.0f} s", file=sys.stderr, flush=True)

        yield line
    else:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=None)
            yield lambda phase, done, of: bar.update(
                task, description=f"{title}: {phase}", completed=done, total=of if done else None
            )


def _report(layout: Layout, ran: DryRun, predicted: Counts | None, predicted_peak: int) -> CommandReport:
    report = CommandReport(
        {
            "rank": ran.rank,
            "coordinates": ran.coordinates,
            "flops": _nested(ran.flops),
            "bytes": _nested(ran.bytes),
            "calls": _nested(ran.calls),
            "peak_memory_bytes": ran.peak,
            "at": ran.peak_action,
            "memory": ran.kinds,
            "operators": ran.operators,
            "seconds": ran.seconds,
            "predicted": {
                "flops": None if predicted is None else _nested(predicted.flops),
                "bytes": None if predicted is None else _nested(predicted.bytes),
                "calls": None if predicted is None else _nested(predicted.calls),
                "peak_memory_bytes": predicted_peak,
            },
        }
    )
    coordinates = ", ".join(f"{axis} {position}" for axis, position in ran.coordinates.items())
    report.line(f"rank {ran.rank} of {layout.world} ({layout.describe()}): {coordinates}\n")
    compared = [number("predicted", ","), number("difference")]

    flops = _pairs(ran.flops, None if predicted is None else predicted.flops)
    phases = ("forward", "recompute", "backward")
    report.table(
        [text("operations"), number("dry run", ","), *compared],
        [
            (" ".join(key), count, *_difference(count, guess))
            for key, (count, guess) in sorted(
                flops.items(),
                key=lambda item: (
                    phases.index(item[0][0]) if item[0][0] in phases else len(phases),
                    item[0][1],
                ),
            )
            if count or guess
        ],
    )
    if traffic := _pairs(ran.bytes, None if predicted is None else predicted.bytes):
        report.table(
            [text("over, kind"), number("calls", ","), number("bytes", ","), *compared],
            [
                (" ".join(key), ran.calls.get(key, 0), count, *_difference(count, guess))
                for key, (count, guess) in sorted(traffic.items())
            ],
        )
    kinds = sorted(ran.kinds.items(), key=lambda item: -item[1])
    peak = (f"peak, during {ran.peak_action}", ran.peak, predicted_peak, predicted_peak / ran.peak - 1)
    report.table(
        [text("memory"), size("dry run"), size("predicted"), number("difference", "+.2%")],
        [peak, *((f"  of it {kind}", bytes_, None, None) for kind, bytes_ in kinds)],
    )
    if predicted is None:
        report.line(
            "the planner does not count the operations and messages of this schedule, optimizer or precision"
        )
    report.line(f"{ran.operators:,} operators in {ran.seconds:.1f} s")
    return report


def _nested(counted: _Counted) -> dict[str, dict[str, int]]:
    """Counts nested by the first key, then the second, without zeros."""
    nested = dict[str, dict[str, int]]()
    for (outer, inner), count in sorted(counted.items()):
        if count:
            nested.setdefault(outer, {})[inner] = count
    return nested


def _pairs(counted: _Counted, predicted: _Counted | None) -> dict[tuple[str, str], tuple[int, int | None]]:
    """The count and the prediction by key; None if nothing is predicted."""
    return {
        key: (counted.get(key, 0), None if predicted is None else predicted.get(key, 0))
        for key in {*counted, *(predicted or {})}
    }


def _difference(count: int, predicted: int | None) -> tuple[Cell, Cell]:
    if predicted is None:
        return None, None
    return predicted, "none" if count == predicted else f"{predicted - count:+,}"
