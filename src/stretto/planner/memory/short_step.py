"""The memory of a long step, counted on a shorter one with the same peak (`program.transforms.shorten`)."""

from __future__ import annotations

from dataclasses import replace

from stretto.job.framework import STRETTO
from stretto.job.job import Job
from stretto.planner.assumptions import Assumptions
from stretto.planner.machines.cluster import Cluster
from stretto.planner.memory.fits import FREE, FREE_OF_OTHERS, Fit, add_host, fit
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import RankMemory, rank_memory, step_ids
from stretto.program.program import Program


def short_program(job: Job) -> Program:
    """The program on which a job's memory is counted: the whole one if recomputation is chosen to fit, since
    that choice depends on the batch of the whole step.

    Raises:
        StrettoError: the job has no program.
    """
    return job.peak_program() if job.recompute.mode == "auto" else job.short_step()


def short_step_memory(job: Job) -> list[RankMemory]:
    """The memory of all pipeline ranks, equal to that of `rank_memory` for the whole step."""
    program = short_program(job)
    memory_job = memory_of(job, program=program)
    tokens = step_ids(memory_job, (job.microbatches or 0) - program.step_microbatches)
    return [
        replace(rank, batch=rank.batch + tokens, between_actions=rank.between_actions + tokens)
        for rank in rank_memory(memory_job)
    ]


def short_step_fit(job: Job, cluster: Cluster, assumptions: Assumptions) -> Fit:
    """Fit of a job's memory on the devices and hosts of a cluster, counted on a short step."""
    free = FREE if job.framework == STRETTO else FREE_OF_OTHERS
    used = fit(short_step_memory(job), cluster.device, assumptions.reserve, free)
    return add_host(used, job.layout, cluster)
