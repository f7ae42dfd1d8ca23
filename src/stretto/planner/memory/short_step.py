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
from stretto.planner.memory.ranks import MemoryJob, RankMemory, one_rank, stage_memory_of, step_ids
from stretto.planner.memory.stage import StageMemory
from stretto.program.action import ActionKind
from stretto.program.lower import LOOKAHEAD, RankLowering

NEARLY = 0.95  # of the most activations: such a rank may be the fullest by what is not counted here


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
    of each kind (embedding and head are kinds) the first, the last and those that nearly hold the most.
    """
    program, shape = memory_job.program, memory_job.shape
    kinds = [(*non_blocks_among(shape, s), kind_counts(shape, s)) for s in memory_job.stages]
    stages = {kind: stage for stage, kind in enumerate(kinds)}  # one of each kind
    moves = {kind: _moves(stage_memory_of(memory_job, stage)) for kind, stage in stages.items()}
    alike = dict[object, dict[int, int]]()  # the most bytes of activations of each rank
    for rank, order in enumerate(program.orders):
        now = peak = 0
        for stage, action_kind, _ in order:
            during, change = moves[kinds[stage % program.depth]].get(action_kind, (0, 0))
            peak, now = max(peak, now + during), now + change
        alike.setdefault(tuple(kinds[s % program.depth] for s in program.stages_of(rank)), {})[rank] = peak
    chosen = {0, min(1, program.ranks - 1), max(0, program.ranks - 2), program.ranks - 1}
    for peaks in alike.values():
        full = NEARLY * max(peaks.values())
        chosen |= {min(peaks), max(peaks), *(rank for rank, peak in peaks.items() if peak >= full)}
    return sorted(chosen)


def _moves(work: StageMemory) -> dict[ActionKind, tuple[int, int]]:
    """Bytes of activations during each action of a stage, and the change of what is held after it."""
    saved, kind = work.saved + work.ends, ActionKind
    return {
        kind.F: (work.forward, saved),
        kind.B: (work.backward, -saved),
        kind.I: (work.split, work.queued - saved),
        kind.W: (work.products, -work.queued),
    }


def short_step_fit(job: Job, device: Device, assumptions: Assumptions, every: bool = False) -> Fit:
    """Fit of a job's memory on a device, counted on a short step.

    Args:
        every: check every pipeline rank, not only those that may be the fullest.
    """
    free = FREE if job.framework == STRETTO else FREE_OF_OTHERS
    return fit(short_step_memory(job, every), device, assumptions.reserve, free)
