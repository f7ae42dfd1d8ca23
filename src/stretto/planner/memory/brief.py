"""The memory of a long step from a short one: once a pipeline is full, more microbatches hold no more."""

from __future__ import annotations

from dataclasses import replace

from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import MemoryJob, RankMemory, one_rank
from stretto.spec.job import Job

# schedules that hold as much in every period of their steady part
# and how many periods, of a pipeline's ranks or of an interleaved schedule's group, they take to reach it
_STEADY = {
    "1f1b": 2,
    "zb-h1": 2,
    "1f1b-eager": 4,
    "interleaved": 4,
    "interleaved-zb": 4,
    "zb-h2": 4,
    "zb-v": 4,
    "v-half": 4,
    "v-min": 4,
}
_ALONE = 4  # microbatches without a pipeline
_ID = 8  # bytes of a token's id


def brief(job: Job) -> Job:
    """The job with the fewest microbatches that hold as much at once; itself, where its schedule or its
    choice of recomputation depends on how many there are.
    """
    microbatches = job.microbatches
    if not microbatches or job.schedule not in _STEADY or job.recompute.mode == "auto":
        return job
    period = max(job.layout.pp, int(job.options.get("group") or 1))
    fewer = microbatches - max(0, microbatches // period - _STEADY[job.schedule]) * period
    if job.layout.pp == 1:
        fewer = min(microbatches, _ALONE)
    return replace(job, global_batch=fewer * job.micro_batch * job.layout.dp)


def brief_memory(job: Job, every: bool = False) -> list[RankMemory]:
    """The memory of the pipeline ranks that may be the fullest, as `rank_memory` has it.

    Args:
        every: of all ranks; else of the first and the last of those with equally many layers, since between
            them what is in flight only falls or only rises along the pipeline.
    """
    short = brief(job)
    held = memory_of(short)
    ranks = range(held.program.ranks) if every else _extremes(held)
    more = (job.microbatches or 0) - (short.microbatches or 0)
    tokens = 2 * _ID * held.how.tokens * more  # and targets
    found = [one_rank(held, rank) for rank in ranks]
    return [replace(rank, batch=rank.batch + tokens) for rank in found]


def _extremes(held: MemoryJob) -> list[int]:
    """The first and the last rank of each number of layers, the first two and the last two of all."""
    program, stages = held.program, held.stages
    ends = dict[tuple[int, ...], list[int]]()
    for rank in range(program.ranks):
        layers = tuple(len(stages[stage % program.depth]) for stage in program.stages_of(rank))
        ends.setdefault(layers, []).append(rank)
    kept = {rank for same in ends.values() for rank in (same[0], same[-1])}
    return sorted(kept | {0, min(1, program.ranks - 1), max(0, program.ranks - 2), program.ranks - 1})
