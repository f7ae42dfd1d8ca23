"""The memory of a job as the planner sees it: from a config to what ranks hold."""

from __future__ import annotations

from stretto.config.check import job_of
from stretto.config.schema import TrainConfig
from stretto.cost.activations import Computing
from stretto.cost.keeping import Keeping
from stretto.cost.shape import ModelShape
from stretto.plan.job import Job
from stretto.plan.memory import MemoryJob
from stretto.plan.recompute import block_modes
from stretto.plan.reduction import reduction
from stretto.schedule.program import Program

BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
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
    recompute, given = config.recompute, job_of(config)
    program = program or given.program()
    job = MemoryJob(
        shape or config.shape(),
        program,
        computing(config),
        keeping=keeping(config, given, program),
        gather=given.dp.gathers(given.layout.pp),
        apart=apart,
    )
    return block_modes(job, recompute.mode, recompute.blocks, recompute.memory_gib)


def keeping(config: TrainConfig, job: Job, program: Program) -> Keeping:
    """How the first of the ranks with the same parameters keeps states; none has more."""
    dp, optim, element = job.dp, config.optim, BYTES[config.train.dtype]
    momentum = optim.momentum or (0.95 if optim.name == "muon" else 0.0)
    return Keeping(
        dp.mode,
        dp.sizes(job.copies),
        job.copies,
        job.layout.size("expert_dp"),
        element=element,
        gradient=2 if config.precision.gradients == "same" else 4,
        keep=tuple(config.precision.keep),
        optimiser=optim.name,
        momentum=momentum,
        moment=_MOMENTS[optim.states],
        each=reduction(program, dp.mode, dp.reduce) == "microbatch",
        lasting=bool(program.versions),
        bucket=int(config.train.bucket_mib * 2**20),
        offload=dp.offload,
        offload_parameters=dp.offload_parameters,
        one_memory=config.train.device == "cpu",
    )


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
    )
