"""Time and memory of one job on one cluster: times of its layers, replayed through its program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import exp, fsum, hypot, log2, sqrt
from typing import Any, NamedTuple

from stretto.display import render
from stretto.errors import StrettoError
from stretto.job.data_parallel import Dtype
from stretto.job.flops import hardware_flops_per_token, model_flops_per_step
from stretto.job.framework import STRETTO
from stretto.job.job import Job
from stretto.planner.assumptions import Assumptions, SoftwareAssumptions
from stretto.planner.known_errors import known_errors
from stretto.planner.machines.cluster import Cluster, group_of
from stretto.planner.machines.device import Device, Precision
from stretto.planner.machines.reading import shipped
from stretto.planner.memory.fits import FREE, FREE_OF_OTHERS, Fit, add_host, fit
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import MemoryJob, rank_memory
from stretto.planner.time.constants import is_fitted
from stretto.planner.time.step import StepTime, step_time
from stretto.program.replay.timeline import Timeline

# the parts of a step (`planner.estimate.PARTS`) that each source of uncertainty scales; idle time follows all
SOURCES: Mapping[str, tuple[str, ...]] = {
    "kernels": ("compute", "recompute", "optimiser"),
    "network": ("tensor", "context", "expert", "data", "offload"),
    "host": ("host", "other"),
}


class Interval(NamedTuple):
    """Factors on a predicted time between which nine measurements out of ten lie.

    Attributes:
        low, high: the factors.
        widths: by "kernels", "network", "host" and "noise", the half width that each alone would have, as a
            share of the step. Their squares add up to the square of the whole half width.
    """

    low: float
    high: float
    widths: Mapping[str, float]


@cache
def _constants() -> dict[str, Any]:
    return shipped("stretto.planner", "intervals")


def interval(
    job: Job,
    cluster: Cluster,
    precision: Precision,
    parts: Mapping[str, float],
    software: SoftwareAssumptions,
    scale: float | None = None,
) -> Interval:
    """The interval of a step with these seconds by part.

    Args:
        scale: factor on all widths, or None for the calibrated one.
    """
    constants = _constants()
    factor: float = constants["scale"] if scale is None else scale
    busy = fsum(parts.get(name, 0.0) for names in SOURCES.values() for name in names)
    widths = {"noise": factor * constants["noise"]}
    for source, names in SOURCES.items():
        share = fsum(parts.get(name, 0.0) for name in names) / busy if busy else 0.0
        modelled = factor * share * _uncertainty(source, job, cluster, precision, software)
        widths[source] = hypot(modelled, share * cluster.spread.get(source, 0.0))
    half_width = sqrt(fsum(width**2 for width in widths.values()))
    # a factor up is as likely as its inverse down
    return Interval(exp(-half_width), exp(half_width), {name: widths[name] for name in (*SOURCES, "noise")})


def _uncertainty(
    source: str, job: Job, cluster: Cluster, precision: Precision, software: SoftwareAssumptions
) -> float:
    """Relative uncertainty of a source's time."""
    constants = _constants()[source]
    if source == "kernels":
        measurement = "fitted" if is_fitted(cluster.device) else "other"
        if cluster.computing is not None:  # the catalogue has one CPU for all
            measurement = "cpu"
        if cluster.device.kernels:
            measurement = "calibrated"
        more = [constants["low_precision"]] if precision in ("fp8", "fp4") else []
        if (moe := job.shape.moe) is not None:  # launches and casts of each expert, and small products
            more.append(constants["experts"] * (1 + log2(max(1, moe.experts // job.layout.ep)) / 4))
        if not cluster.device.kernels:  # else measured with the software of this machine
            more.append(software.spread)
        return sqrt(fsum(x**2 for x in (constants[measurement], *more)))
    if source == "network":
        if cluster.tables:
            return constants["calibrated"]
        nodes = group_of(job.layout, "tp-cp-dp-pp", cluster.node).nodes
        links = (cluster.inner, cluster.outer) if nodes > 1 else (cluster.inner,)
        measured = tuple(_constants()["measured_links"])
        fitted = all(link.kind.startswith(measured) for link in links)
        # tables measure collectives over a few nodes; paths collide over many
        return constants["fitted" if fitted else "other"] * (1 + constants["doubling"] * log2(nodes))
    return constants["calibrated" if cluster.device.kernels else "other"]


PARTS = (
    "compute",  # forwards and backwards of layers
    "recompute",
    "host",  # kernels wait until the host has launched them
    "tensor",  # collectives over tp; the next two: over cp, and for experts
    "context",
    "expert",
    "bubble",  # the rank waits for other stages: for their work, and for their messages
    "data",  # reductions and gathers that computation does not hide
    "optimiser",
    "offload",
    "other",
)
# Median relative difference between two measurements of one configuration: 69 configurations that NVIDIA
# measured in successive releases of its containers.
NOISE = 0.022
_STABLE = 0.2  # half width of a CPU's measured kernels up to which its peak is one to compare with


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The predicted step of a job.

    Attributes:
        seconds: time of a step.
        low, high: the interval that contains the measured step nine times out of ten.
        widths: by source of uncertainty (`interval`), the half width of the interval that it alone
            would make, as a share of the step.
        parts: seconds of the busiest pipeline rank by the names of `PARTS`; they add up to `seconds`.
        forward, backward: seconds of the busiest pipeline rank in forwards and in backwards, with collectives
            of layers and recomputation; with the parts bubble, data, optimiser and offload they add up to
            `seconds`.
        precision: precision of matrix products.
        memory: memory of the fullest rank, or None if not requested.
        known_errors: what is known to be wrong with such predictions (`planner.known_errors`).
    """

    job: Job
    cluster: Cluster
    seconds: float
    low: float
    high: float
    widths: Mapping[str, float]
    parts: Mapping[str, float]
    forward: float
    backward: float
    precision: Precision
    memory: Fit | None
    known_errors: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return a summary in one line."""
        device = f"{self.job.layout.world} x {self.cluster.device.name}"
        step = f"{self.seconds:.4g} s a step ({self.low:.3g} to {self.high:.3g})"
        rates = f"{self.tokens_per_s:,.0f} tokens/s" + ("" if self.mfu is None else f", MFU {self.mfu:.1%}")
        fit = ""
        if self.memory is not None:
            fit = f", {self.memory.device.mid / 2**30:.1f} GiB: {self.memory.verdict}"
        return f"Estimate({str(self.job.layout)!r} on {device}: {step}, {rates}{fit})"

    def _repr_html_(self) -> str | None:
        return render("estimate_html", self)

    @property
    def bubble(self) -> float:
        """Share of the step that the busiest pipeline rank waits for other stages, 0 to 1."""
        return self.parts["bubble"] / self.seconds

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.job.global_batch * self.job.sequence

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices together."""
        return self.tokens / self.seconds

    @cached_property
    def tflops_per_gpu(self) -> float:
        """Model FLOPs per second and device, attention counted in full, 1e12."""
        job = self.job
        flops = model_flops_per_step(job.shape, job.sequence, job.global_batch, target=job.target_sequence)
        return flops / (self.seconds * self.job.layout.world * 1e12)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, a fraction of the vendor's dense peak, or of the measured peak of a CPU's
        core; None if that was not measured (`stretto calibrate`), or was disturbed.
        """
        if self.cluster.computing is not None and (
            not self.cluster.device.kernels or self.cluster.spread.get("kernels", 0.0) > _STABLE
        ):
            return None
        return self.tflops_per_gpu * 1e12 / self.cluster.device.peak(self.precision)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation, which counts recomputation too; None as `mfu`."""
        if self.mfu is None:
            return None
        shape = self.job.shape
        sequence = self.job.sequence
        mode = self.job.recompute.mode
        hardware = hardware_flops_per_token(
            shape, sequence, "none" if mode == "auto" else mode, operators=self.job.framework.operators
        )
        return self.mfu * hardware / hardware_flops_per_token(shape, sequence)

    @property
    def dominant(self) -> str:
        """The largest part besides computing."""
        return max((name for name in self.parts if name != "compute"), key=lambda name: self.parts[name])


_PRECISIONS: dict[str, Precision] = {
    "float32": "fp32",
    "float64": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
}


def usual_dtype(device: Device) -> Dtype:
    """The default type of weights: bfloat16, or float16 on devices before Ampere, which lack it."""
    return "float16" if "fp16" in device.tflops and "bf16" not in device.tflops else "bfloat16"


def precision_of(job: Job) -> Precision:
    """The precision of matrix products."""
    if job.precision.fp8 != "none":
        return "fp8"
    return _PRECISIONS[job.precision.dtype]


def estimate(
    job: Job, cluster: Cluster, assumptions: Assumptions | None = None, *, memory: bool = True
) -> Estimate:
    """Time and memory of a legal job (`job.rules.problems` finds none) on a cluster of its size.

    Raises:
        StrettoError: the schedule cannot be made, or the batch does not divide.
    """
    if not job.microbatches:
        raise StrettoError(
            f"batch of {job.global_batch} does not divide into microbatches of {job.micro_batch} "
            f"on {job.layout.dp} replicas"
        )
    assumptions = assumptions or Assumptions()
    memory_job = memory_of(job) if memory or _modes_depend_on_memory(job) else None
    time = _step_time(job, cluster, assumptions, memory_job)
    free = FREE if job.framework == STRETTO else FREE_OF_OTHERS
    fits = (
        add_host(fit(rank_memory(memory_job), cluster.device, assumptions.reserve, free), job.layout, cluster)
        if memory_job is not None and memory
        else None
    )
    precision = assumptions.products or precision_of(job)
    software = assumptions.software
    return estimate_of(
        job=job, cluster=cluster, precision=precision, time=time, software=software, memory=fits
    )


def estimate_of(
    *,
    job: Job,
    cluster: Cluster,
    precision: Precision,
    time: StepTime,
    software: SoftwareAssumptions,
    memory: Fit | None = None,
) -> Estimate:
    """The estimate of a step that was replayed already.

    Args:
        precision: precision of matrix products.
    """
    seconds = time.seconds * cluster.correction
    parts = {name: part * cluster.correction for name, part in time.parts.items()}
    forward, backward = (
        cluster.correction * fsum(part for name, part in phase.items() if name != "data")
        for phase in (time.forward, time.backward)
    )
    around = interval(job, cluster, precision, time.parts, software)
    return Estimate(
        job=job,
        cluster=cluster,
        seconds=seconds,
        low=around.low * seconds,
        high=around.high * seconds,
        widths=around.widths,
        parts=parts,
        forward=forward,
        backward=backward,
        precision=precision,
        memory=memory,
        known_errors=known_errors(job=job, cluster=cluster, precision=precision, software=software),
    )


def timeline_of(expected: Estimate, assumptions: Assumptions | None = None) -> tuple[Timeline, float]:
    """The replay behind an estimate, and the seconds that a unit of its time lasts.

    Args:
        assumptions: those of the estimate.
    """
    job = expected.job
    memory_job = memory_of(job) if _modes_depend_on_memory(job) else None
    time = _step_time(job, expected.cluster, assumptions or Assumptions(), memory_job)
    return time.timeline, expected.cluster.correction


def _modes_depend_on_memory(job: Job) -> bool:
    return job.recompute.mode == "auto" or job.recompute.blocks is not None


def _step_time(
    job: Job, cluster: Cluster, assumptions: Assumptions, memory_job: MemoryJob | None
) -> StepTime:
    modes = memory_job.modes if memory_job is not None and _modes_depend_on_memory(job) else None
    return step_time(job, cluster, assumptions, assumptions.products or precision_of(job), modes)
