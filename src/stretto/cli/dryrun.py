"""`stretto dryrun`: run one rank of any layout in one process, and compare with the planner's counts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, memory_size, report, side_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stretto.layout.layout import Layout
    from stretto.planner.rank_step.counts import Counts
    from stretto.run.dryrun.run import DryRun

app = command_app()

_Counted = Mapping[tuple[str, str], int]


@app.command(epilog="Example: stretto dryrun configs/llama-1b-64gpu.yaml layout.tp=8 --rank 21")
def dryrun(
    path: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, as `stretto train` takes it.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Fields to override.")
    ] = None,
    rank: Annotated[int, typer.Option("--rank", help="The rank to run, from 0.")] = 0,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Run few microbatches, and count the others as those that they repeat: the same counts.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the code of one rank of a layout of any size here, on tensors without values.

    Runs assembly and two steps of pipeline, reductions and optimizer. Counts the operations of the second
    step, the bytes and calls of every collective, and the peak memory of its tensors, beside the planner's
    prediction. A rank of the largest models takes a minute or two; with --quick, seconds.

    No other rank exists and no text is read. Tokens are spread evenly over experts; bytes are the whole
    tensor's that a collective works on; groups are named by the axes along which their ranks differ.
    """
    from stretto.cli.jobs import load_language
    from stretto.planner.memory.job import memory_of
    from stretto.planner.memory.ranks import one_rank
    from stretto.planner.rank_step.counts import countable, counts
    from stretto.run.config.job import job_of
    from stretto.spec.rules import problems

    config = load_language(path, overrides or [])
    job = job_of(config)
    wrong = problems(job)
    if wrong:
        raise wrong[0]
    job.layout.coordinates(rank)  # raises for a rank outside the layout
    what = f"rank {rank} of {job.layout.world}, {job.microbatches} microbatches"
    with _progress(what, as_json) as progress:  # before torch is imported, which takes seconds
        from stretto.run.dryrun.run import dry_run

        ran = dry_run(job, rank, quick=quick, progress=progress)
        if progress is not None:
            progress("the planner's counts", 0, 1)
        held = memory_of(job, job.program())  # of one step, as it ran
        predicted = counts(job, rank, held) if countable(job, held) else None
        memory = one_rank(held, ran.coordinates["pp"]).total
    report(_facts(ran, predicted, memory), as_json, lambda to: _show(to, job.layout, ran, predicted, memory))


_EVERY = 10.0  # seconds between lines where stderr is no terminal


@contextmanager
def _progress(what: str, quiet: bool) -> Generator[Callable[[str, int, int], None] | None]:
    """Show on stderr what runs and how far it is: a bar in a terminal, elsewhere a line every few seconds."""
    if quiet:
        yield None
    elif not sys.stderr.isatty():
        started = last = time.monotonic()
        print(f"dry run of {what}", file=sys.stderr, flush=True)

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
            task = bar.add_task(f"dry run of {what}", total=None)
            yield lambda phase, done, of: bar.update(
                task, description=f"dry run of {what}: {phase}", completed=done, total=of if done else None
            )


# ------------------------------------------------------------------ JSON


def _facts(ran: DryRun, predicted: Counts | None, memory: int) -> dict[str, Any]:
    return {
        "rank": ran.rank,
        "coordinates": ran.coordinates,
        "flops": _nested(ran.flops),
        "bytes": _nested(ran.bytes),
        "calls": _nested(ran.calls),
        "peak_memory_bytes": ran.peak,
        "at": ran.at,
        "memory": ran.kinds,
        "operators": ran.operators,
        "seconds": ran.seconds,
        "predicted": {
            "flops": None if predicted is None else _nested(predicted.flops),
            "bytes": None if predicted is None else _nested(predicted.bytes),
            "calls": None if predicted is None else _nested(predicted.calls),
            "peak_memory_bytes": memory,
        },
    }


def _nested(counted: _Counted) -> dict[str, dict[str, int]]:
    """Nested by the first key, then the second, without zeros."""
    nested = dict[str, dict[str, int]]()
    for (first, second), count in sorted(counted.items()):
        if count:
            nested.setdefault(first, {})[second] = count
    return nested


# ------------------------------------------------------------------ text


def _show(to: Console, layout: Layout, ran: DryRun, predicted: Counts | None, memory: int) -> None:
    where = ", ".join(f"{axis} {at}" for axis, at in ran.coordinates.items())
    to.print(f"rank {ran.rank} of {layout.world} ({layout.describe()}): {where}", soft_wrap=True)
    to.print()
    to.print(_flops_table(ran, predicted), soft_wrap=True)
    if ran.bytes or (predicted is not None and predicted.bytes):
        to.print(_traffic_table(ran, predicted), soft_wrap=True)
    table = side_table("memory", "dry run", "predicted", "difference")
    table.add_row(
        f"peak, during {ran.at}",
        memory_size(ran.peak),
        memory_size(memory),
        f"{100 * (memory / ran.peak - 1):+.2f}%",
    )
    for kind, size in sorted(ran.kinds.items(), key=lambda item: -item[1]):
        table.add_row(f"  of it {kind}", memory_size(size), "", "")
    to.print(table, soft_wrap=True)
    if predicted is None:
        to.print(
            "the planner does not count the operations and messages of this schedule, optimizer or precision"
        )
    to.print(f"{ran.operators:,} operators in {ran.seconds:.1f} s")


def _flops_table(ran: DryRun, predicted: Counts | None) -> Table:
    table = side_table("operations", "dry run", "predicted", "difference")
    for key in sorted(_keys(ran.flops, None if predicted is None else predicted.flops), key=_order):
        one, other = ran.flops.get(key, 0), None if predicted is None else predicted.flops.get(key, 0)
        if one or other:
            table.add_row(" ".join(key), f"{one:,}", *_beside(one, other))
    return table


def _order(key: tuple[str, str]) -> tuple[int, str]:
    phases = ("forward", "recompute", "backward")
    return (phases.index(key[0]) if key[0] in phases else len(phases)), key[1]


def _traffic_table(ran: DryRun, predicted: Counts | None) -> Table:
    table = side_table("over, kind", "calls", "bytes", "predicted", "difference")
    for key in sorted(_keys(ran.bytes, None if predicted is None else predicted.bytes)):
        one, other = ran.bytes.get(key, 0), None if predicted is None else predicted.bytes.get(key, 0)
        table.add_row(" ".join(key), f"{ran.calls.get(key, 0):,}", f"{one:,}", *_beside(one, other))
    return table


def _keys(one: _Counted, other: _Counted | None) -> set[tuple[str, str]]:
    return set(one) | set(other or {})


def _beside(one: int, other: int | None) -> tuple[str, str]:
    if other is None:
        return "", ""
    return f"{other:,}", "none" if one == other else f"{other - one:+,}"
