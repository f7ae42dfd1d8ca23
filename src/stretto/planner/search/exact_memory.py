"""The exact memory of a candidate, from a shorter step that is as full at its fullest."""

from __future__ import annotations

from stretto.planner.execution import Assumptions
from stretto.planner.machines.device import Device
from stretto.planner.memory.fits import Fit, fit
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import rank_memory
from stretto.planner.memory.short_step import brief_memory
from stretto.spec.job import Job


def weigh(job: Job, device: Device, assumptions: Assumptions, every: bool = False) -> Fit:
    """The memory of a job.

    Args:
        every: of every pipeline rank; else of those that may be the fullest.
    """
    return fit(brief_memory(job, every), device, assumptions.reserve)


def weigh_whole(job: Job, device: Device, assumptions: Assumptions) -> Fit:
    """The same, walked through the whole step."""
    return fit(rank_memory(memory_of(job)), device, assumptions.reserve)
