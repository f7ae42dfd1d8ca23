"""Time and memory of one job on one cluster: its layers' times, replayed through its own program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from stretto.errors import StrettoError
from stretto.planner.assumptions import Assumptions
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.device import Precision
from stretto.planner.memory.fits import Fit, fit
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import rank_memory
from stretto.planner.time.step import step_time
from stretto.spec.flops import hardware_flops_per_token, model_flops_per_step
from stretto.spec.job import Job

PARTS = (
    "compute",  # forwards and backwards of layers
    "recompute",
    "tensor",  # collectives over tp, and so on
    "context",
    "expert",
    "messages",  # between stages, where a rank waits for them
    "bubble",
    "data",  # reductions and gathers that nothing hides
    "optimiser",
    "offload",
    "other",
)
# Median relative difference between two measurements of one configuration: 69 configurations that NVIDIA
# measured in successive releases of its containers.
NOISE = 0.022


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a step of a job takes.

    Attributes:
        seconds: of a step.
        low, high: the interval that the measured step lies in nine times of ten.
        parts: seconds of the busiest pipeline rank by the names of `PARTS`; they add up to `seconds`.
        bubble: idle part of the step, of all pipeline ranks.
        memory: of the fullest rank; None: not asked for.
    """

    job: Job
    cluster: Cluster
    seconds: float
    low: float
    high: float
    parts: Mapping[str, float]
    bubble: float
    memory: Fit | None

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.job.global_batch * self.job.sequence

    @property
    def tokens_per_s(self) -> float:
        """Of all devices together."""
        return self.tokens / self.seconds

    @cached_property
    def tflops_per_gpu(self) -> float:
        """Model FLOPs a second and device, attention counted in full, 1e12."""
        flops = model_flops_per_step(self.job.shape, self.job.sequence, self.job.global_batch)
        return flops / (self.seconds * self.job.layout.world * 1e12)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of the vendor's dense peak, 0 to 1."""
        return self.tflops_per_gpu * 1e12 / self.cluster.device.peak(precision_of(self.job))

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: with what is recomputed."""
        shape = self.job.shape
        sequence = self.job.sequence
        mode = self.job.recompute.mode
        again = hardware_flops_per_token(shape, sequence, "none" if mode == "auto" else mode)
        return self.mfu * again / hardware_flops_per_token(shape, sequence)

    @property
    def dominant(self) -> str:
        """The largest part beside computing."""
        return max((name for name in self.parts if name != "compute"), key=lambda name: self.parts[name])


_PRECISIONS: dict[str, Precision] = {
    "float32": "fp32",
    "float64": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
}


def interval(cluster: Cluster) -> tuple[float, float]:
    """Factors on a predicted time between which nine measured ones of ten lie: narrower where this very
    cluster was measured. `benchmarks/planning.py` tells how often they held on runs never fitted on.
    """
    return _MEASURED if cluster.tables else _KNOWN


_KNOWN, _MEASURED = (0.85, 1.25), (0.9, 1.15)


def precision_of(job: Job) -> Precision:
    """In what matrix products are computed."""
    if job.precision.fp8 != "none":
        return "fp8"
    return _PRECISIONS[job.precision.dtype]


def estimate(
    job: Job, cluster: Cluster, assumptions: Assumptions | None = None, *, memory: bool = True
) -> Estimate:
    """Time and memory of a legal job (`spec.rules.problems` finds none) on a cluster of its size.

    Raises:
        StrettoError: the schedule cannot be made, or the batch does not divide.
    """
    if not job.microbatches:
        raise StrettoError(
            f"batch of {job.global_batch} does not divide into microbatches of {job.micro_batch} "
            f"on {job.layout.dp} replicas"
        )
    assumptions = assumptions or Assumptions()
    chosen = job.recompute.mode == "auto" or job.recompute.blocks is not None
    held = memory_of(job) if memory or chosen else None
    time = step_time(
        job, cluster, assumptions, precision_of(job), held.modes if held is not None and chosen else None
    )
    fits = (
        fit(rank_memory(held), cluster.device, assumptions.reserve) if held is not None and memory else None
    )
    seconds = time.seconds * cluster.correction
    parts = {name: part * cluster.correction for name, part in time.parts.items()}
    low, high = interval(cluster)
    return Estimate(
        job=job,
        cluster=cluster,
        seconds=seconds,
        low=low * seconds,
        high=high * seconds,
        parts=parts,
        bubble=time.bubble,
        memory=fits,
    )
