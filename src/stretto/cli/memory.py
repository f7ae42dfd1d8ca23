"""`stretto memory`: the memory of every rank of a job, by tensor and by kind."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, memory_size, report, side_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from stretto.layout.shards import Mode
    from stretto.planner.memory.alternatives import Advice, ModeBytes
    from stretto.planner.memory.ranks import MemoryJob, RankMemory
    from stretto.run.config.schema import LoopConfig
    from stretto.run.train.memory_measured import RankHeld
    from stretto.spec.job import Job


app = command_app()

_KINDS = ("weights", "gradients", "optimizer", "activations", "ends", "messages", "transient")
# shown where some rank has any: 16-bit weights' masters, transiently gathered tensors, offloaded ones
_SOME = ("masters", "gathered", "open", "versions", "saving", "host", "disk")


@app.command(epilog="Example: stretto memory configs/llama-1b-64gpu.yaml layout.sequence_parallel=true")
def memory(
    path: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, as `stretto train` takes it.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Fields to override.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Also measure: train two steps on local ranks, on random tokens.",
        ),
    ] = False,
    modes: Annotated[
        bool,
        typer.Option(
            "--modes",
            help="Compare what each data-parallel mode keeps on a rank, and the ZeRO paper's count.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict the memory of every rank, by tensor and by kind.

    Lists a block's tensors with their formulas, then weights, gradients, optimizer states, activations in
    flight, embedding and head, messages and temporaries at each rank's fullest moment.

    Only the process's tensors are counted. A GPU needs more for its context, the libraries' buffers and
    allocator fragmentation, several GiB in all.
    """
    from stretto.cli.jobs import load_language
    from stretto.planner.memory.alternatives import advice
    from stretto.planner.memory.job import memory_of
    from stretto.planner.memory.ranks import rank_memory
    from stretto.run.config.job import job_of

    config = load_language(path, overrides or [])
    if modes:
        show_modes(job_of(config), as_json)
        return
    described = job_of(config)
    _check(described)
    if measure:  # steps that save nothing
        described = replace(described, async_save=False)
    held = _measured(described, config.train) if measure else None
    # what is measured are steps that drain
    program = described.program() if measure else None
    job = memory_of(described, program, apart=measure and _apart(described))
    ranks = rank_memory(job)
    advices = advice(job)
    report(
        _facts(job, ranks, advices, held) if as_json else {},
        as_json,
        lambda to: _show(to, job, ranks, advices, held),
    )


def _check(job: Job) -> None:
    """Raise StrettoError for an illegal job; files and devices, which may be elsewhere, are not checked."""
    from stretto.spec.rules import problems

    broken = problems(job)
    if broken:
        raise broken[0]


def _measured(job: Job, train: LoopConfig) -> list[RankHeld]:
    """The memory that local ranks hold while they train."""
    from stretto.run.launch.local import check_ranks, run_ranks
    from stretto.run.train.memory_measured import measure_rank

    check_ranks(job.layout.world)
    return run_ranks(job.layout.world, measure_rank, job, train, threads=train.threads)


def _apart(job: Job) -> bool:
    """Whether this machine's library forms weight gradients in a buffer of their own."""
    from stretto.engine.parallel.tensor.matmul import ONEDNN

    return ONEDNN and job.precision.dtype == "float32"


# ------------------------------------------------------------------ JSON


def _facts(
    job: MemoryJob, ranks: Sequence[RankMemory], advices: Sequence[Advice], held: Sequence[RankHeld] | None
) -> dict[str, Any]:
    from stretto.planner.counts.activations import block_saved
    from stretto.planner.counts.published_activations import published_formula

    published = published_formula(job.shape, _how(job))
    return {
        "block": [asdict(saved) for saved in block_saved(job.shape, _how(job))],
        "published": None if published is None else asdict(published),
        "modes": list(job.modes),
        "ranks": [{**asdict(rank), "states": rank.states, "total": rank.total} for rank in ranks],
        "fullest": max(range(len(ranks)), key=lambda r: ranks[r].total),
        "advice": [asdict(one) for one in advices],
        "measured": None if held is None else [_measured_facts(one, ranks) for one in held],
    }


def _measured_facts(held: RankHeld, ranks: Sequence[RankMemory]) -> dict[str, Any]:
    predicted = ranks[held.pipeline]
    return {
        "rank": held.rank,
        "pipeline": held.pipeline,
        "peak": held.peak,
        "held": held.held,
        "kinds": held.kinds,
        "predicted_peak": predicted.total,
        "predicted_held": predicted.held,
        "error": predicted.total / held.peak - 1,
    }


# ------------------------------------------------------------------ text


def _show(
    to: Console,
    job: MemoryJob,
    ranks: Sequence[RankMemory],
    advices: Sequence[Advice],
    held: Sequence[RankHeld] | None,
) -> None:
    to.print(_block_table(job), soft_wrap=True)
    to.print()
    to.print(_rank_table(ranks), soft_wrap=True)
    some = [kind for kind in _SOME if any(getattr(rank, kind) for rank in ranks)]
    if some:
        others = side_table("rank", *some)
        for rank in ranks:
            others.add_row(str(rank.rank), *(memory_size(getattr(rank, kind)) for kind in some))
        to.print(others, soft_wrap=True)
    fullest = max(ranks, key=lambda rank: rank.total)
    flights = ", ".join(
        f"stage {s}: {n} x {memory_size(fullest.stages[s])}" for s, n in fullest.flights.items()
    )
    to.print(
        f"fullest: pipeline rank {fullest.rank} during {fullest.at}; microbatches in flight there: {flights}",
        soft_wrap=True,
    )
    for one in advices:
        if one.cheaper:
            to.print(
                f"{one.setting} saves {memory_size(one.saved)} of {memory_size(fullest.total)}",
                soft_wrap=True,
            )
    if held is not None:
        to.print()
        to.print(_measured_table(ranks, held), soft_wrap=True)


def _block_table(job: MemoryJob) -> Table:
    """The tensors that one block saves for its backward."""
    from stretto.planner.counts.activations import block_saved, total
    from stretto.planner.counts.published_activations import published_formula

    compute = _how(job)
    table = side_table("one block keeps", "bytes", "formula")
    saved = block_saved(job.shape, compute)
    for tensor in saved:
        table.add_row(tensor.name, f"{tensor.bytes:,}", tensor.formula)
    table.add_section()
    table.add_row("sum", f"{total(saved):,}", "")
    published = published_formula(job.shape, compute)
    if published is not None:
        table.add_row(published.source, f"{published.bytes:,.0f}", published.formula)
    return table


def _rank_table(ranks: Sequence[RankMemory]) -> Table:
    """One line per pipeline rank; ranks that differ in other axes only hold the same."""
    kinds = [*_KINDS, "batch", "total"]
    table = side_table("rank", *kinds, "in flight")
    for rank in ranks:
        table.add_row(
            str(rank.rank),
            *(memory_size(getattr(rank, kind)) for kind in kinds),
            " ".join(str(n) for n in rank.flights.values()),
        )
    return table


def _measured_table(ranks: Sequence[RankMemory], held: Sequence[RankHeld]) -> Table:
    table = side_table(
        "rank", "pipeline rank", "measured", "predicted", "difference", "between actions", "predicted"
    )
    for one in held:
        rank = ranks[one.pipeline]
        table.add_row(
            str(one.rank),
            str(one.pipeline),
            memory_size(one.peak),
            memory_size(rank.total),
            f"{100 * (rank.total / one.peak - 1):+.2f}%",
            memory_size(one.held),
            memory_size(rank.held),
        )
    return table


def _how(job: MemoryJob) -> Any:
    """The computation of most blocks, where their recomputation differs."""
    most = max(set(job.modes), key=job.modes.count) if job.modes else job.compute.recompute
    return replace(job.compute, recompute=most)


def show_modes(job: Job, as_json: bool) -> None:
    """Print all modes that are legal on the job's layout.

    Raises:
        StrettoError: the job is not legal in any mode.
    """
    from stretto.planner.memory.alternatives import compare_modes
    from stretto.planner.memory.job import memory_of
    from stretto.spec.data_parallel import MODES
    from stretto.spec.rules import problems

    jobs: dict[Mode, Job] = {mode: _in_mode(job, mode) for mode in MODES}
    wrong = {mode: problems(one) for mode, one in jobs.items()}
    legal: list[Mode] = [mode for mode in MODES if not wrong[mode]]
    if not legal:
        raise wrong["ddp"][0]
    compared = compare_modes(legal, lambda mode: memory_of(jobs[mode]))
    refused: dict[Mode, str] = {mode: wrong[mode][0].message for mode in MODES if wrong[mode]}
    facts = {
        "copies": job.copies,
        "modes": [{**asdict(one), "states": one.states} for one in compared],
        "refused": refused,
    }
    report(facts, as_json, lambda to: _show_modes(to, compared, refused, job.copies, job.precision.half))


def _in_mode(job: Job, mode: Mode) -> Job:
    """The job in another mode; shard sizes and the moments of reductions belong to the job's own mode."""
    from stretto.spec.data_parallel import DataParallel

    if mode == job.dp.mode:
        return job
    return replace(job, dp=DataParallel(mode=mode, offload=job.dp.offload, path=job.dp.path))


def _show_modes(
    to: Console, compared: Sequence[ModeBytes], refused: Mapping[Mode, str], copies: int, half: bool
) -> None:
    away = [kind for kind in ("host", "disk") if any(getattr(one, kind) for one in compared)]
    kinds = ["weights", "gradients", "masters", "optimizer", "states", *away, "peak"]
    table = side_table("mode", *kinds, "ZeRO paper")
    for one in compared:
        paper = "" if one.published is None else memory_size(round(one.published))
        table.add_row(one.mode, *(memory_size(getattr(one, kind)) for kind in kinds), paper)
    to.print(table, soft_wrap=True)
    ranks = f"{copies} ranks have" if copies > 1 else "one rank has"
    to.print(f"on the fullest rank; {ranks} the same parameters", soft_wrap=True)
    count = "the paper counts 2 + 2 + 12 bytes a parameter: 16-bit weights and gradients, AdamW in 32 bits"
    to.print(count + ("" if half else "; the weights here are wider"), soft_wrap=True)
    for mode, why in refused.items():
        to.print(f"{mode}: {why}", soft_wrap=True)
