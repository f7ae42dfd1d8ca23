"""The memory of a job as the planner sees it: from a config to what ranks hold."""

from __future__ import annotations

from stretto.config.check import job_of
from stretto.config.schema import TrainConfig
from stretto.cost.activations import Computing
from stretto.cost.shape import ModelShape
from stretto.plan.memory import MemoryJob
from stretto.plan.recompute import block_modes
from stretto.schedule.program import Program

BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}


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
    recompute = config.recompute
    job = MemoryJob(
        shape or config.shape(),
        program or job_of(config).program(),
        computing(config),
        optimiser=config.optim.name,
        momentum=config.optim.momentum,
        weight=max(4, BYTES[config.train.dtype]),
        apart=apart,
    )
    return block_modes(job, recompute.mode, recompute.blocks, recompute.memory_gib)


def computing(config: TrainConfig) -> Computing:
    """How a rank computes a microbatch; blocks are not recomputed."""
    layout, train = config.layout, config.train
    return Computing(
        config.batch.micro_size,
        config.data.sequence,
        BYTES[train.dtype],
        layout.tp,
        layout.cp,
        layout.ep,
        layout.expert_tp if layout.ep > 1 else None,
        layout.sequence_parallel and layout.tp > 1,
        train.attention,
        layout.context,
        shard_inputs=config.recompute.shard_inputs,
        vocab_multiple=train.vocab_multiple,
        autocast=train.dtype == "bfloat16",
    )
