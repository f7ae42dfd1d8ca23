"""From a job to the memory of its ranks."""

from __future__ import annotations

from stretto.cost.shape import ModelShape
from stretto.plan.job import Job
from stretto.plan.memory import MemoryJob
from stretto.plan.recompute import block_modes
from stretto.plan.running import Running, computing, keeping
from stretto.schedule.program import Program


def memory_of(
    job: Job,
    running: Running,
    shape: ModelShape | None = None,
    program: Program | None = None,
    apart: bool = False,
) -> MemoryJob:
    """What the memory of the job's ranks depends on, with a mode of recomputation for each block.

    Args:
        shape: in place of the job's, with the tokenizer's vocabulary.
        program: of a step, where it is made already.
        apart: weight gradients are formed apart, as the matrix library of the machine may do.

    Raises:
        StrettoError: with recompute mode `auto`, if no choice fits the budget.
    """
    recompute = job.recompute
    program = program or job.program()
    held = MemoryJob(
        shape or job.shape,
        program,
        computing(job, running),
        keeping=keeping(job, running, program),
        gather=job.dp.gathers(job.layout.pp),
        apart=apart,
    )
    return block_modes(held, recompute.mode, recompute.blocks, recompute.memory_gib)
