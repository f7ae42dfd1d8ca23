"""One kind of accelerator, as the cost model sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Device:
    """A kind of device. Compared by identity, so that it can be a key of caches.

    Attributes:
        name: name in the catalogue, as "a100-80gb-sxm".
        tflops: dense peaks of the vendor by precision, TFLOP/s.
        memory: bytes of device memory, whether the vendor means GB or GiB.
        bandwidth: bandwidth of device memory, bytes/s.
        sustained: TFLOP/s that large matrix products reach, by precision, if measured.
        aliases: other names that tables and drivers use.
        pattern: regular expression of the driver's name, or None.
        unless: regular expression that the driver's name must not match: a slice or a slower card of the same
            chip.
        kernels: measurements of this device (`stretto calibrate`) in place of the constants of
            `planner.time`. "launch": seconds; "matmul": {precision: rows of m, n, k, batch, seconds};
            "passes": {kind: rows of bytes, seconds}; "attention": rows of batch, queries, keys, heads,
            head_dim, causal, backward, seconds. On a CPU, whose host does not run ahead of kernels, also
            "layer": seconds of host code besides the kernels of a block, forward and backward, and "action":
            the same of a stage's forward, equal to that of its backward.
        released: the month from which it could be had, "2020-11"; "": not known.
        price: dollars per hour, or None if unknown.
        notes: sources and doubts.
    """

    name: str
    tflops: Mapping[Precision, float]
    memory: float
    bandwidth: float
    sustained: Mapping[Precision, float] = field(default_factory=dict[Precision, float])
    aliases: tuple[str, ...] = ()
    pattern: str | None = None
    unless: str = "MIG"
    kernels: Mapping[str, object] = field(default_factory=dict[str, object])
    released: str = ""
    price: float | None = None
    notes: str = ""

    def peak(self, precision: Precision) -> float:
        """The vendor's FLOP/s at that precision, or at the next higher one that the device has."""
        for fallback in _FALLBACKS[precision]:
            if fallback in self.tflops:
                return self.tflops[fallback] * 1e12
        raise ValueError(f"device {self.name} has no peak")


_FALLBACKS: dict[Precision, tuple[Precision, ...]] = {
    "fp4": ("fp4", "fp8", "bf16", "fp16", "tf32", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "tf32", "fp32"),
    "bf16": ("bf16", "fp16", "tf32", "fp32"),
    "fp16": ("fp16", "bf16", "tf32", "fp32"),
    "tf32": ("tf32", "fp32"),
    "fp32": ("fp32", "tf32", "bf16", "fp16"),
}
