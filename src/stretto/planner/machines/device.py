"""One kind of accelerator, as the cost model sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Device:
    """A kind of device. Equal only to itself, so that it may be a key of caches.

    Attributes:
        name: in the catalogue, as "a100-80gb-sxm".
        tflops: dense peaks of the vendor by precision, TFLOP/s.
        memory: bytes of device memory, as the vendor's GB or GiB really are.
        bandwidth: of device memory, bytes/s.
        sustained: TFLOP/s that large matrix products reach, by precision, where measured.
        aliases: other names that tables and drivers use.
        pattern: of the driver's name, a regular expression; None: not known by its driver.
        unless: and this not: a slice or a slower card of the same chip.
        kernels: what was measured on this very device (`stretto calibrate`) and stands in place of the
            constants of `planner.time`: "launch": seconds; "matmul": {precision: rows of m, n, k, batch,
            seconds}; "passes": {kind: rows of bytes, seconds}; "attention": rows of batch, queries, keys,
            heads, head_dim, causal, backward, seconds; "layer", "action": seconds of the program beside the
            kernels of a block, forward and backward, and of a stage's forward, as long as of its backward:
            only where the host does not run ahead of kernels, on a CPU.
        price: dollars an hour; None: not known.
        notes: sources, and what is doubtful.
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
    price: float | None = None
    notes: str = ""

    def peak(self, precision: Precision) -> float:
        """FLOP/s of the vendor at that precision; of the next higher one where it has none."""
        for known in _FALLBACKS[precision]:
            if known in self.tflops:
                return self.tflops[known] * 1e12
        raise ValueError(f"device {self.name} has no peak")


_FALLBACKS: dict[Precision, tuple[Precision, ...]] = {
    "fp8": ("fp8", "bf16", "fp16", "tf32", "fp32"),
    "bf16": ("bf16", "fp16", "tf32", "fp32"),
    "fp16": ("fp16", "bf16", "tf32", "fp32"),
    "tf32": ("tf32", "fp32"),
    "fp32": ("fp32", "tf32", "bf16", "fp16"),
}
