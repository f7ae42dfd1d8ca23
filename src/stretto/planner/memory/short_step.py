"""The memory of a long step, counted on a shorter one with the same peak (`program.transforms.shorten`)."""

from __future__ import annotations

from dataclasses import replace

from stretto.job.chain import kind_counts, non_blocks_among
from stretto.job.framework import STRETTO
from stretto.job.job import Job
from stretto.planner.assumptions import Assumptions
from stretto.planner.machines.device import Device
from stretto.planner.memory.fits import FREE, FREE_OF_OTHERS, Fit, fit
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import MemoryJob, RankMemory, one_rank, step_ids
from stretto.program.action import ActionKind
from stretto.program.lower import LOOKAHEAD, RankLowering
from stretto.program.memory import peak_held
from stretto.program.program import Program


def short_program(job: Job) -> RankLowering:
    """The program on which a job's memory is counted: the whole one if recomputation is chosen to fit, since
    that choice depends on the batch of the whole step.

    Raises:
        StrettoError: the job has no program.
    """
    if job.recompute.mode == "auto":
        return RankLowering(job.peak_program(), lookahead=LOOKAHEAD)
    return job.short_step()


def short_step_memory(job: Job, every: bool = False) -> list[RankMemory]:
    """The memory of the pipeline ranks that may be the fullest, equal to that of `rank_memory` for the whole
    step.

    Args:
        every: all ranks; else, of ranks with equally many layers, those that hold the most activations.
    """
    lowering = short_program(job)
    program = lowering.program
    memory_job = memory_of(job, program=program)
    ranks = list(range(program.ranks)) if every else fullest(memory_job)
    memory_job = replace(memory_job, program=lowering.lowered(ranks))
    more = (job.microbatches or 0) - program.step_microbatches
    tokens = step_ids(memory_job, more)
    memories = [one_rank(memory_job, rank) for rank in ranks]
    return [
        replace(rank, batch=rank.batch + tokens, between_actions=rank.between_actions + tokens)
        for rank in memories
    ]


def fullest(memory_job: MemoryJob) -> list[int]:
    """The ranks that may be the fullest: the first two, the last two, and of ranks with equally many layers
    of each kind the first, the last and those that hold the most microbatches. Embedding and head are kinds
    of their own.
    """
    program, shape = memory_job.program, memory_job.shape
    alike = dict[object, list[int]]()
    for rank in range(program.ranks):
        stages = [memory_job.stages[stage % program.depth] for stage in program.stages_of(rank)]
        layers = tuple((*non_blocks_among(shape, stage), kind_counts(shape, stage)) for stage in stages)
        alike.setdefault(layers, []).append(rank)
    chosen = {0, min(1, program.ranks - 1), max(0, program.ranks - 2), program.ranks - 1}
    # a microbatch counts until its weight gradient is done, or until its input gradient is
    for peaks in (peak_held(program), _peak_flights(program)):
        for group in alike.values():
            full = max(peaks[rank] for rank in group)
            full_ranks = [rank for rank in group if peaks[rank] == full]
            chosen |= {group[0], group[-1], full_ranks[0], full_ranks[-1]}
    return sorted(chosen)


def _peak_flights(program: Program) -> list[int]:
    """Per rank, the most microbatches at once between forward and backward, over all its stages."""
    step = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.I: -1}
    peaks = list[int]()
    for order in program.orders:
        now = peak = 0
        for action in order:
            now += step.get(action.kind, 0)
            peak = max(peak, now)
        peaks.append(peak)
    return peaks


def short_step_fit(job: Job, device: Device, assumptions: Assumptions, every: bool = False) -> Fit:
    """Fit of a job's memory on a device, counted on a short step.

    Args:
        every: check every pipeline rank, not only those that may be the fullest.
    """
    free = FREE if job.framework == STRETTO else FREE_OF_OTHERS
    return fit(short_step_memory(job, every), device, assumptions.reserve, free)
