"""Fit of a job's memory on a device: allocated, reserved and device memory, each with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

from stretto.layout.layout import Layout
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.device import Device
from stretto.planner.memory.ranks import RankMemory

# Low, middle, high: the caching allocator's reserved bytes over those of tensors, of 44 ranks on a simulated
# GPU (docs/evidence/gpu.md); of other frameworks from pairs of both in published logs
# (docs/evidence/planning-evidence.md); and the bytes that context, workspaces of libraries and communicators
# take in addition.
FULL = 1.04  # also in place of others' middle if the device is full: cached blocks are freed before it fails
FREE = (1.0, FULL, 1.18)
FREE_OF_OTHERS = (1.0, 1.15, 1.25)
RESERVE = (1.0 * 2**30, 2.5 * 2**30, 5.0 * 2**30)

PROCESS = (0.2 * 2**30, 0.4 * 2**30, 0.8 * 2**30)  # on a CPU: Python, PyTorch and gloo

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class Bytes:
    """A number of bytes, with the interval that contains it nine times out of ten."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The memory of the fullest rank, compared with that of the device, and of the fullest node's host.

    Attributes:
        allocated: bytes of all tensors.
        reserved: bytes that the allocator holds, with free blocks between tensors.
        device: bytes that the driver reports, with the context and the buffers of communication libraries.
        capacity: bytes of the device.
        ranks: the pipeline ranks that were examined.
        host: bytes of the fullest node's host memory that hold what its ranks offload, and copies of
            checkpoints that are being written.
        host_capacity: bytes of a node's host memory, infinite if the cluster does not state them.
    """

    allocated: Bytes
    reserved: Bytes
    device: Bytes
    capacity: float
    ranks: tuple[RankMemory, ...]
    host: float = 0.0
    host_capacity: float = inf

    @property
    def verdict(self) -> Verdict:
        if self.host > self.host_capacity:
            return "does not fit"
        if self.device.high <= self.capacity:
            return "fits"
        return "tight" if self.device.low <= self.capacity else "does not fit"

    @property
    def likely(self) -> bool:
        """True if it is more likely to fit than not; plans contain only such layouts."""
        return self.device.mid <= self.capacity and self.host <= self.host_capacity

    @property
    def slack(self) -> float:
        """Bytes left on the device; negative if they are missing."""
        return self.capacity - self.device.mid

    @property
    def missing(self) -> float:
        """Bytes that are missing on the device or the host; negative if it fits."""
        return max(-self.slack, self.host - self.host_capacity)

    @property
    def host_text(self) -> str:
        """The host memory that it needs, in words."""
        capacity = f" of {self.host_capacity / 2**30:.4g}" if self.host_capacity < inf else ""
        unstated = " (not stated)" * (not capacity)
        return f"{self.host / 2**30:.4g}{capacity} GiB of a node's host memory{unstated}"

    @property
    def needed(self) -> str:
        """The bytes that it needs of those of the device; of the host, if those are too few."""
        if self.host > self.host_capacity:
            return self.host_text
        return f"{self.device.mid / 2**30:.4g} of {self.capacity / 2**30:.4g} GiB"


def fit_record(fit: Fit) -> dict[str, Any]:
    """A fit as JSON, in GiB; `memory_gib` is allocated, as in metrics.jsonl."""
    gib = 2**30
    intervals: dict[str, Any] = {
        name: {"low_gib": used.low / gib, "gib": used.mid / gib, "high_gib": used.high / gib}
        for name, used in (("allocated", fit.allocated), ("reserved", fit.reserved), ("device", fit.device))
    }
    for name, size in (("capacity", fit.capacity), ("host", fit.host), ("host_capacity", fit.host_capacity)):
        intervals[f"{name}_gib"] = size / gib if size < inf else None
    return {"memory_gib": fit.allocated.mid / gib, "memory": intervals, "verdict": fit.verdict}


def tensor_bytes(device: Device) -> float:
    """Largest size of tensors, in bytes, that probably fits a device (`Fit.likely`)."""
    overhead = PROCESS if device.name.startswith("cpu") else RESERVE
    return (device.memory - overhead[1]) / FULL


def fit(
    ranks: Sequence[RankMemory],
    device: Device,
    reserve: float | None = None,
    free: tuple[float, float, float] = FREE,
) -> Fit:
    """Fit of the fullest of these ranks on a device.

    Args:
        reserve: bytes of the process besides tensors, or None for `RESERVE` or, on a CPU, `PROCESS`.
        free: the allocator's reserved bytes over those of tensors: low, middle, high.
    """
    fullest = float(max(rank.total for rank in ranks))
    if device.memory == inf:
        exact = Bytes(fullest, fullest, fullest)
        return Fit(allocated=exact, reserved=exact, device=exact, capacity=inf, ranks=tuple(ranks))
    overheads = PROCESS if device.name.startswith("cpu") else RESERVE
    low, mid, high = overheads if reserve is None else (reserve,) * 3
    allocated = Bytes(0.97 * fullest, fullest, 1.03 * fullest)
    likely = min(free[1] * fullest, max(FULL * fullest, device.memory - mid))
    reserved = Bytes(free[0] * allocated.low, likely, free[2] * fullest)
    device_bytes = Bytes(reserved.low + low, reserved.mid + mid, reserved.high + high)
    return Fit(
        allocated=allocated,
        reserved=reserved,
        device=device_bytes,
        capacity=device.memory,
        ranks=tuple(ranks),
    )


def add_host(fit: Fit, layout: Layout, cluster: Cluster) -> Fit:
    """Add the fullest node's host memory to the fit of all pipeline ranks of a layout."""
    node, stage = min(cluster.node, layout.world), layout.world // layout.pp  # devices of each
    stages = max(1, node // stage)  # that a node has, one after the other
    hosts = [rank.host for rank in fit.ranks]
    fullest = max(sum(hosts[at : at + stages]) for at in range(0, layout.pp, stages))
    return replace(fit, host=float(min(node, stage) * fullest), host_capacity=cluster.host.stated_memory)
