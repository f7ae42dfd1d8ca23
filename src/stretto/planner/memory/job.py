"""From a job to its `MemoryJob`, with the recomputation of each block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import ceil, floor, log10

from stretto.errors import Problem
from stretto.job.chain import block_count, blocks_among, layer_of
from stretto.job.flops import Recompute, attention_flops, block_flops
from stretto.job.job import Job, RecomputeMode
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.state_bytes import StateConfig
from stretto.planner.memory.ranks import MemoryJob, one_rank
from stretto.program.program import Program

Counts = tuple[int, int]  # blocks of a stage that are recomputed fully, and selectively

GIB = 2**30
_MOST_COMBINATIONS = 4000  # combinations over stages that are enumerated; of more, stages are treated alike


def block_modes(
    job: MemoryJob, wanted: RecomputeMode, blocks: int | None = None, memory_gib: float | None = None
) -> MemoryJob:
    """The job with `modes` filled in: how each block of the model is recomputed.

    Args:
        wanted: `none`, `selective` and `full` hold for all blocks; `auto` chooses for each pipeline rank the
            choice with the fewest extra operations among those that fit.
        blocks: number of blocks of each stage that `full` recomputes, the first ones; or None for all.
        memory_gib: memory that a rank may hold with `auto`, GiB.

    Raises:
        StrettoError: with `auto`, without a budget or if nothing fits it; names the smallest possible budget.
    """
    if wanted == "auto":
        if memory_gib is None:
            raise Problem(
                "recompute.memory_gib",
                "null",
                "recompute.mode=auto needs to know what a rank may hold",
                "recompute.memory_gib=70 leaves room for libraries on a GPU of 80 GB",
            )
        return choose_modes(job, memory_gib * GIB)
    modes: list[Recompute] = ["none"] * block_count(job.shape)
    for stage in job.stages:
        blocks_of_stage = blocks_among(job.shape, stage)
        for layer in blocks_of_stage if blocks is None or wanted != "full" else blocks_of_stage[:blocks]:
            modes[_block_index(job, layer)] = wanted
    return replace(job, modes=tuple(modes))


def choose_modes(job: MemoryJob, budget: float) -> MemoryJob:
    """The cheapest modes with which each rank holds at most `budget` bytes.

    Blocks of a stage are alike, so that only their number matters. The first ones are recomputed: the
    activations of the last are made last and consumed first, around the moment when the rank is fullest.
    Weight gradients are taken to be formed apart, whatever this machine does, so that all ranks choose alike.

    Raises:
        StrettoError: nothing fits.
    """
    modes: list[Recompute] = ["none"] * block_count(job.shape)
    job, original = replace(job, separate_gradients=True), job
    for ranks in _ranks_sharing_stages(job):
        stages = sorted({s % job.program.depth for rank in ranks for s in job.program.stages_of(rank)})
        chosen = _cheapest(job, ranks, stages, budget)
        for stage, counts in zip(stages, chosen, strict=True):
            _set_modes(job, modes, stage, counts)
    return replace(original, modes=tuple(modes))


def _ranks_sharing_stages(job: MemoryJob) -> list[list[int]]:
    """Groups of ranks that hold copies of the same stages, and so must choose alike."""
    groups = list[tuple[set[int], list[int]]]()
    for rank in range(job.program.ranks):
        stages = {s % job.program.depth for s in job.program.stages_of(rank)}
        touching = [entry for entry in groups if entry[0] & stages]
        merged = (stages.union(*(s for s, _ in touching)), [r for _, rs in touching for r in rs] + [rank])
        groups = [entry for entry in groups if not entry[0] & stages] + [merged]
    return [ranks for _, ranks in groups]


def _cheapest(
    job: MemoryJob, ranks: Sequence[int], stages: Sequence[int], budget: float
) -> tuple[Counts, ...]:
    """The cheapest choice for these stages that fits all of `ranks`, the holders of these stages."""
    best: tuple[float, str] | None = None
    for choice in _choices(job, stages):
        modes: list[Recompute] = ["none"] * block_count(job.shape)
        for stage, counts in zip(stages, choice, strict=True):
            _set_modes(job, modes, stage, counts)
        tried = replace(job, modes=tuple(modes))
        fullest = max((one_rank(tried, rank).total, rank) for rank in ranks)
        if fullest[0] <= budget:
            return choice
        if best is None or fullest[0] < best[0]:
            best = fullest[0], f"pipeline rank {fullest[1]}"
    assert best is not None
    gib = best[0] / GIB
    step = 10.0 ** (floor(log10(gib)) - 3)  # rounded up to four digits
    suggestion = float(f"{ceil(gib / step) * step:.4g}")
    raise Problem(
        "recompute.memory_gib",
        f"{budget / GIB:.4g}",
        f"{best[1]} needs {gib:.4g} GiB whatever is recomputed",
        f"recompute.memory_gib={suggestion}, a smaller batch.micro_size, or more of layout.tp or layout.pp",
    )


def _choices(job: MemoryJob, stages: Sequence[int]) -> Iterator[tuple[Counts, ...]]:
    """Choices for these stages, the cheapest first; if they are too many, only those with equal counts for
    all stages.
    """
    shape, sequence = job.shape, job.compute.sequence
    full, selective = block_flops(shape, sequence), attention_flops(shape, sequence)
    blocks = [len(blocks_among(job.shape, job.stages[stage])) for stage in stages]
    options = [_counts(n) for n in blocks]
    size = 1
    for option in options:
        size *= len(option)
    if size <= _MOST_COMBINATIONS:
        choices = product(*options)
    else:
        choices = (
            tuple((min(full, n), min(few, n - min(full, n))) for n in blocks)
            for full, few in _counts(max(blocks))
        )
    yield from sorted(choices, key=lambda choice: sum(f * full + s * selective for f, s in choice))


def _counts(blocks: int) -> list[Counts]:
    return [(full, selective) for full in range(blocks + 1) for selective in range(blocks - full + 1)]


def _set_modes(job: MemoryJob, modes: list[Recompute], stage: int, counts: Counts) -> None:
    """Set the modes of the first blocks of a stage."""
    blocks, (full, selective) = blocks_among(job.shape, job.stages[stage]), counts
    for index, layer in enumerate(blocks[: full + selective]):
        modes[_block_index(job, layer)] = "full" if index < full else "selective"


def _block_index(job: MemoryJob, layer: int) -> int:
    """The index of a block among all of the model."""
    block = layer_of(job.shape, layer).block
    assert block is not None
    return block


def memory_of(job: Job, program: Program | None = None, separate_gradients: bool = False) -> MemoryJob:
    """The `MemoryJob` of a job, with a mode of recomputation for each block.

    Args:
        program: the program in which memory is counted, or None for `Job.peak_program`.
        separate_gradients: weight gradients are formed apart, as the matrix library of the machine may do.

    Raises:
        StrettoError: with recompute mode `auto`, if no choice fits the budget.
    """
    recompute = job.recompute
    program = program or job.peak_program()
    memory_job = MemoryJob(
        shape=job.shape,
        program=program,
        compute=ComputeConfig.of(job),
        state_config=StateConfig.of(job, program),
        gather=job.dp.gathers(job.layout.pp),
        saves_in_background=job.async_save,
        separate_gradients=separate_gradients,
        cut=job.stages(program.depth),
    )
    return block_modes(memory_job, recompute.mode, recompute.blocks, recompute.memory_gib)
