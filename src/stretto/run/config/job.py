"""From a config to the job that rules, planner, training and proofs take."""

from __future__ import annotations

from stretto.run.config.schema import TrainConfig
from stretto.spec.data_parallel import DataParallel, Precision
from stretto.spec.job import Job, Recompute


def job_of(
    config: TrainConfig,
    *,
    vocab: int | None = None,
    world: int | None = None,
    devices: int | None = None,
) -> Job:
    """The config's job.

    Args:
        vocab: of the tokenizer, where it is known.
        world: processes, where others start them.
        devices: accelerators of all machines, where each rank needs one.

    Raises:
        StrettoError: the model's sizes or the layout's order make no whole.
    """
    return Job(
        shape=config.shape(vocab),
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
        precision=_precision(config),
        optimiser=config.optim.settings(),
        attention=config.train.attention,
        vocab_multiple=config.train.vocab_multiple,
        bucket=int(config.train.bucket_mib * 2**20),
        one_memory=config.train.device == "cpu",
    )


def _precision(config: TrainConfig) -> Precision:
    """The types of weights, gradients and products."""
    precision = config.precision
    return Precision(
        dtype=config.train.dtype,
        gradients=precision.gradients,
        keep=tuple(precision.keep),
        fp8=precision.fp8,
        loss_scale=precision.loss_scale,
        loss_scale_steps=precision.loss_scale_steps,
    )
