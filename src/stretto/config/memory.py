"""The memory of a job as the planner sees it: from a config to what ranks hold."""

from __future__ import annotations

from stretto.config.check import job_of
from stretto.config.schema import TrainConfig
from stretto.cost.shape import ModelShape
from stretto.plan.holding import memory_of
from stretto.plan.memory import MemoryJob
from stretto.plan.running import Running
from stretto.schedule.program import Program

_MOMENTS = {"float32": None, "bfloat16": 2}


def memory_job(
    config: TrainConfig,
    shape: ModelShape | None = None,
    program: Program | None = None,
    apart: bool = False,
) -> MemoryJob:
    """What the memory of the job's ranks depends on, with a mode of recomputation for each block.

    Args:
        shape: with the tokenizer's vocabulary, where it is known.
        program: of a step, where it is made already.
        apart: weight gradients are formed apart, as the matrix library of the machine may do.

    Raises:
        StrettoError: with recompute.mode=auto, if no choice fits the budget.
    """
    return memory_of(job_of(config), running_of(config), shape, program, apart)


def running_of(config: TrainConfig) -> Running:
    """How the config runs its job."""
    optim, train = config.optim, config.train
    return Running(
        train.attention,
        train.vocab_multiple,
        optim.name,
        optim.momentum or (0.95 if optim.name == "muon" else 0.0),
        _MOMENTS[optim.states],
        int(train.bucket_mib * 2**20),
        one_memory=train.device == "cpu",
    )
