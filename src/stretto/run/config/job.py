"""From a config to the job that planner and rules take, to how it runs, and to the memory of its ranks."""

from __future__ import annotations

from stretto.planner.execution import Running
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import MemoryJob
from stretto.program.program import Program
from stretto.run.config.schema import TrainConfig
from stretto.spec.data_parallel import DataParallel, Precision
from stretto.spec.job import Job, Recompute
from stretto.spec.shape import ModelShape

_MOMENTS = {"float32": None, "bfloat16": 2}


def job_of(config: TrainConfig, *, world: int | None = None, devices: int | None = None) -> Job:
    """The job as the rules see it.

    Raises:
        StrettoError: the model's sizes or the layout's order make no whole.
    """
    return Job(
        shape=config.shape(),
        layout=config.layout.to_layout(),
        global_batch=config.batch.global_size,
        micro_batch=config.batch.micro_size,
        sequence=config.data.sequence,
        schedule=config.schedule.name,
        options=config.schedule.options,
        world=world,
        devices=devices,
        clip=config.optim.clip,
        expert_tp=config.layout.expert_tp,
        sequence_parallel=config.layout.sequence_parallel,
        context=config.layout.context,
        recompute=Recompute(**config.recompute.model_dump()),
        dp=DataParallel(**config.dp.model_dump()),
        precision=precision_of(config),
    )


def precision_of(config: TrainConfig) -> Precision:
    """The types of a job as the planner sees them."""
    given = config.precision
    return Precision(
        dtype=config.train.dtype,
        gradients=given.gradients,
        keep=tuple(given.keep),
        fp8=given.fp8,
        loss_scale=given.loss_scale,
        loss_scale_steps=given.loss_scale_steps,
    )


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
        attention=train.attention,
        vocab_multiple=train.vocab_multiple,
        optimiser=optim.name,
        momentum=optim.settings().usual_momentum,
        moment=_MOMENTS[optim.states],
        bucket=int(train.bucket_mib * 2**20),
        one_memory=train.device == "cpu",
    )
