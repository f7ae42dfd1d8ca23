"""What costs depend on beside the job itself: how layers compute, and what the optimiser keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.planner.counts.activations import Computing
from stretto.planner.counts.state_bytes import BUCKET_BYTES, Keeping
from stretto.planner.time.software import Habits, habits_of
from stretto.program.program import Program
from stretto.spec.attention import AttentionKernel
from stretto.spec.job import Job
from stretto.spec.optimiser import OptimiserName
from stretto.spec.reduction import reduction

BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


def _today() -> Habits:
    return habits_of("today")


@dataclass(frozen=True, kw_only=True)
class Running:
    """How a job is run.

    Attributes:
        attention: `explicit` forms the matrix of probabilities.
        vocab_multiple: each rank's share of the vocabulary is a multiple of it.
        momentum: of the optimiser, where it has one.
        moment: bytes of an element of the optimiser's means; None: the masters'.
        bucket: bytes of weights at which a unit is full.
        one_memory: host and device are one, as on a CPU.
        overlap: reductions and gathers of data parallelism run beside the computation.
        blocking: a rank waits until what it sends to the next stage is there.
        scattered: what one tp rank would send to the next stage whole is sent in parts and gathered there
            (Narayanan et al. 2021, section 4.1).
        reserve: bytes that the program keeps beside tensors; None: as the device is usually used.
        habits: how kernels and collectives run.
        fused_loss: see `Computing`; Stretto's own is not.
    """

    attention: AttentionKernel = "flash"
    vocab_multiple: int = 1
    optimiser: OptimiserName = "adamw"
    momentum: float = 0.0
    moment: int | None = None
    bucket: int = BUCKET_BYTES
    one_memory: bool = False
    overlap: bool = True
    blocking: bool = False
    scattered: bool = False
    reserve: float | None = None
    habits: Habits = field(default_factory=_today)
    fused_loss: bool = False


def computing(job: Job, running: Running) -> Computing:
    """How a rank computes a microbatch; blocks are not recomputed."""
    layout = job.layout
    return Computing(
        batch=job.micro_batch,
        sequence=job.sequence,
        element=BYTES[job.precision.dtype],
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        expert_tp=layout.expert_tp if layout.ep > 1 else None,
        sequence_parallel=job.sequence_parallel and layout.tp > 1,
        attention=running.attention,
        context=job.context,
        shard_inputs=job.recompute.shard_inputs,
        vocab_multiple=running.vocab_multiple,
        fused_loss=running.fused_loss,
    )


def keeping(job: Job, running: Running, program: Program) -> Keeping:
    """How the first of the ranks with the same parameters keeps states; none has more."""
    dp, precision = job.dp, job.precision
    return Keeping(
        mode=dp.mode,
        sizes=dp.sizes(job.copies),
        copies=job.copies,
        expert_copies=job.layout.size("expert_dp"),
        element=BYTES[precision.dtype],
        gradient=2 if precision.gradients == "same" else 4,
        keep=tuple(precision.keep),
        optimiser=running.optimiser,
        momentum=running.momentum,
        moment=running.moment,
        each=reduction(program, dp.mode, dp.reduce) == "microbatch",
        lasting=bool(program.versions),
        bucket=running.bucket,
        offload=dp.offload,
        offload_parameters=dp.offload_parameters,
        one_memory=running.one_memory,
    )
