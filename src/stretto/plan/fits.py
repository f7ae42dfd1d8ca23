"""Whether a job's memory fits a device: allocated, reserved and device memory, each with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stretto.cost.machine.device import Device
from stretto.plan.memory import RankMemory

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class Bytes:
    """A number of bytes and the interval that it lies in nine times of ten."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Fit:
    """The memory of the fullest rank beside what the device has.

    Attributes:
        allocated: of all tensors.
        reserved: by the allocator, free blocks between tensors included.
        device: as the driver shows it: with the context and the buffers of communication libraries.
        capacity: bytes of the device.
        ranks: every pipeline rank looked at.
    """

    allocated: Bytes
    reserved: Bytes
    device: Bytes
    capacity: float
    ranks: tuple[RankMemory, ...]

    @property
    def verdict(self) -> Verdict:
        if self.device.high <= self.capacity:
            return "fits"
        return "tight" if self.device.low <= self.capacity else "does not fit"

    @property
    def slack(self) -> float:
        """Bytes that are left; negative: that lack."""
        return self.capacity - self.device.mid


def fit(ranks: Sequence[RankMemory], device: Device) -> Fit:
    """Whether the fullest of these ranks fits."""
    most = max(rank.total for rank in ranks)
    allocated = Bytes(0.97 * most, most, 1.03 * most)
    reserved = Bytes(most, 1.06 * most, 1.15 * most)
    fixed = 2.5 * 2**30
    whole = Bytes(reserved.low + 0.5 * fixed, reserved.mid + fixed, reserved.high + 2 * fixed)
    return Fit(allocated, reserved, whole, device.memory, tuple(ranks))
