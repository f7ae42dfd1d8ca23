"""From a config to the job that planner and rules take, and to the memory of its ranks."""

from __future__ import annotations

from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import MemoryJob
from stretto.program.program import Program
from stretto.run.config.schema import TrainConfig
from stretto.spec.data_parallel import DataParallel, Precision
from stretto.spec.job import Job, Recompute
from stretto.spec.shape import ModelShape


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
        expert_tp=config.layout.expert_tp,
        sequence_parallel=config.layout.sequence_parallel,
        context=config.layout.context,
        recompute=Recompute(**config.recompute.model_dump()),
        dp=DataParallel(**config.dp.model_dump()),
        precision=precision_of(config),
        optimiser=config.optim.settings(),
        attention=config.train.attention,
        vocab_multiple=config.train.vocab_multiple,
        bucket=int(config.train.bucket_mib * 2**20),
        one_memory=config.train.device == "cpu",
    )


def program_of(config: TrainConfig) -> Program:
    """The compute actions of a step, by the config's schedule."""
    return job_of(config).program()


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
    return memory_of(job_of(config), shape, program, apart)
