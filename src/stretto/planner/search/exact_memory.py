"""The exact memory of a candidate, from a shorter step that is as full at its fullest."""

from __future__ import annotations

from dataclasses import replace

from stretto.planner.execution import Assumptions, computing
from stretto.planner.machines.device import Device
from stretto.planner.memory.brief import brief, brief_memory
from stretto.planner.memory.fits import Fit, fit
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import rank_memory
from stretto.planner.search.moments import enough
from stretto.planner.search.task import Order
from stretto.spec.job import Job

_ID = 8  # bytes of a token's number


def shortened(job: Job) -> Job:
    """The job with a batch of no more microbatches than its memory depends on."""
    assert job.microbatches
    if job.layout.pp == 1 or job.recompute.mode == "auto":
        return brief(job)
    order = Order(job.schedule, tuple(sorted(job.options.items())))
    count = enough(order, job.layout.pp, job.microbatches)
    return replace(job, global_batch=count * job.layout.dp * job.micro_batch)


def weigh(job: Job, device: Device, assumptions: Assumptions, every: bool = False) -> Fit:
    """The memory of a job; its batch's tokens are those of the whole step.

    Args:
        every: of every pipeline rank; else of those that may be the fullest.
    """
    short = shortened(job)
    assert job.microbatches
    assert short.microbatches
    tokens = 2 * _ID * computing(job).tokens * (job.microbatches - short.microbatches)
    ranks = [replace(rank, batch=rank.batch + tokens) for rank in brief_memory(short, every)]
    return fit(ranks, device, assumptions.reserve)


def weigh_whole(job: Job, device: Device, assumptions: Assumptions) -> Fit:
    """The same, walked through the whole step."""
    return fit(rank_memory(memory_of(job)), device, assumptions.reserve)
