"""`stretto dryrun`: the code of one rank of any layout in one process, beside what the planner counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.output import Json, command_app, memory_size, report, side_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stretto.planner.rank_step.counts import Counts
    from stretto.run.config.schema import TrainConfig
    from stretto.run.dryrun.run import DryRun

app = command_app()

_Counted = Mapping[tuple[str, str], int]

_ALONE = ("lamb", "adafactor", "muon")  # optimisers whose ranks talk while they update


@app.command(epilog="Example: stretto dryrun configs/llama-1b-64gpu.yaml layout.tp=8 --rank 21")
def dryrun(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A YAML file, as `stretto train` takes it.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Fields to override.")
    ] = None,
    rank: Annotated[int, typer.Option("--rank", help="Which rank of the layout, from 0.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="One step in place of two: the same counts in half the time.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the code of one rank of a layout of any size here, on tensors that have shapes and no values: two
    steps of assembly, pipeline, reductions and optimiser. Counts the operations of the second, the bytes and
    calls of every collective, and the most memory that its tensors take, beside what the planner predicts.

    No other rank is there and no text is read. Experts are chosen evenly; bytes are those of the whole that a
    collective is about; groups go by the axes along which their ranks differ.
    """
    from stretto.cli.jobs import load_language
    from stretto.planner.memory.ranks import one_rank
    from stretto.planner.rank_step.counts import counts
    from stretto.run.config.job import job_of, memory_job
    from stretto.spec.rules import problems

    found = load_language(config, overrides or [])
    job = job_of(found)
    wrong = problems(job)
    if wrong:
        raise wrong[0]
    job.layout.coordinates(rank)  # refuses a rank that is none
    from stretto.run.dryrun.run import dry_run  # torch, which what is wrong above does not wait for

    ran, held = dry_run(found, rank, 1 if quick else 2), memory_job(found)
    said = counts(job, rank, held) if _countable(found, bool(held.program.versions)) else None
    memory = one_rank(held, ran.coordinates["pp"]).total
    report(_facts(ran, said, memory), as_json, lambda to: _show(to, found, ran, said, memory))


def _countable(config: TrainConfig, asynchronous: bool) -> bool:
    """Whether `planner.counts.step` knows all that the job does."""
    return not asynchronous and config.optim.name not in _ALONE and config.precision.fp8 == "none"


# ------------------------------------------------------------------ JSON


def _facts(ran: DryRun, said: Counts | None, memory: int) -> dict[str, Any]:
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
            "flops": None if said is None else _nested(said.flops),
            "bytes": None if said is None else _nested(said.bytes),
            "calls": None if said is None else _nested(said.calls),
            "peak_memory_bytes": memory,
        },
    }


def _nested(counted: _Counted) -> dict[str, dict[str, int]]:
    """By the first key, then the second; what is 0 is left out."""
    found = dict[str, dict[str, int]]()
    for (first, second), count in sorted(counted.items()):
        if count:
            found.setdefault(first, {})[second] = count
    return found


# ------------------------------------------------------------------ text


def _show(to: Console, config: TrainConfig, ran: DryRun, said: Counts | None, memory: int) -> None:
    layout = config.layout.to_layout()
    where = ", ".join(f"{axis} {at}" for axis, at in ran.coordinates.items())
    to.print(f"rank {ran.rank} of {layout.world} ({layout.describe()}): {where}", soft_wrap=True)
    to.print()
    to.print(_flops_table(ran, said), soft_wrap=True)
    if ran.bytes or (said is not None and said.bytes):
        to.print(_traffic_table(ran, said), soft_wrap=True)
    table = side_table("memory", "dry run", "predicted", "difference")
    table.add_row(
        f"most, during {ran.at}",
        memory_size(ran.peak),
        memory_size(memory),
        f"{100 * (memory / ran.peak - 1):+.2f}%",
    )
    for kind, size in sorted(ran.kinds.items(), key=lambda item: -item[1]):
        table.add_row(f"  of it {kind}", memory_size(size), "", "")
    to.print(table, soft_wrap=True)
    if said is None:
        to.print(
            "what this schedule, optimiser or precision says and computes, the planner does not count yet"
        )
    to.print(f"{ran.operators:,} operators in {ran.seconds:.1f} s")


def _flops_table(ran: DryRun, said: Counts | None) -> Table:
    table = side_table("operations", "dry run", "predicted", "difference")
    for key in sorted(_keys(ran.flops, None if said is None else said.flops), key=_order):
        one, other = ran.flops.get(key, 0), None if said is None else said.flops.get(key, 0)
        if one or other:
            table.add_row(" ".join(key), f"{one:,}", *_beside(one, other))
    return table


def _order(key: tuple[str, str]) -> tuple[int, str]:
    phases = ("forward", "recompute", "backward")
    return (phases.index(key[0]) if key[0] in phases else len(phases)), key[1]


def _traffic_table(ran: DryRun, said: Counts | None) -> Table:
    table = side_table("over, kind", "calls", "bytes", "predicted", "difference")
    for key in sorted(_keys(ran.bytes, None if said is None else said.bytes)):
        one, other = ran.bytes.get(key, 0), None if said is None else said.bytes.get(key, 0)
        table.add_row(" ".join(key), f"{ran.calls.get(key, 0):,}", f"{one:,}", *_beside(one, other))
    return table


def _keys(one: _Counted, other: _Counted | None) -> set[tuple[str, str]]:
    return set(one) | set(other or {})


def _beside(one: int, other: int | None) -> tuple[str, str]:
    if other is None:
        return "", ""
    return f"{other:,}", "none" if one == other else f"{other - one:+,}"
