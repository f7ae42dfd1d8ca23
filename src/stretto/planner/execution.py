"""A job as one rank computes and keeps it, and what times are assumed to depend on beside the job."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.planner.counts.activations import Computing
from stretto.planner.counts.state_bytes import Keeping
from stretto.planner.time.software import Habits, habits_of
from stretto.program.program import Program
from stretto.spec.job import Job
from stretto.spec.reduction import reduction

BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


def _today() -> Habits:
    return habits_of("today")


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """How the program runs a job's kernels and messages: what times depend on beside job and cluster.

    Attributes:
        overlap: reductions and gathers of data parallelism run beside the computation.
        blocking: a rank waits until what it sends to the next stage is there.
        scattered: what one tp rank would send to the next stage whole is sent in parts and gathered there
            (Narayanan et al. 2021, section 4.1).
        reserve: bytes that the program keeps beside tensors; None: as the device is usually used.
        habits: how kernels and collectives run.
    """

    overlap: bool = True
    blocking: bool = False
    scattered: bool = False
    reserve: float | None = None
    habits: Habits = field(default_factory=_today)


def computing(job: Job) -> Computing:
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
        attention=job.attention,
        context=job.context,
        shard_inputs=job.recompute.shard_inputs,
        vocab_multiple=job.vocab_multiple,
        fused_loss=job.fused_loss,
    )


def keeping(job: Job, program: Program) -> Keeping:
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
        optimiser=job.optimiser.name,
        momentum=job.optimiser.usual_momentum,
        moment=job.optimiser.moment_bytes,
        each=reduction(program, dp.mode, dp.reduce) == "microbatch",
        lasting=bool(program.versions),
        bucket=job.bucket,
        offload=dp.offload,
        offload_parameters=dp.offload_parameters,
        one_memory=job.one_memory,
    )
