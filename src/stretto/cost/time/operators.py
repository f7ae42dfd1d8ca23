"""How long one operation takes on one device: a roofline with efficiencies that depend on the shape."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from stretto.cost.machine.device import Device, Precision

# classes of operations that are bound by memory, each with an effective bandwidth of its own
PassKind = Literal[
    "add",
    "norm",
    "rope",
    "gated",
    "gelu",
    "softmax",
    "dropout",
    "copy",
    "embedding",
    "loss",
    "adam",
    "reduce",
]


@lru_cache(maxsize=65536)
def matmul_seconds(
    device: Device, m: int, n: int, k: int, precision: Precision = "bf16", batch: int = 1
) -> float:
    """Time of `batch` products [m, k] times [k, n], one after another in one call."""
    width = 1 if precision == "fp8" else 4 if precision in ("fp32", "tf32") else 2
    work = 2.0 * m * n * k * batch / (0.72 * device.peak(precision))
    moved = width * batch * (m * k + k * n + m * n) / (0.7 * device.bandwidth)
    return max(work, moved) + 8e-6


@lru_cache(maxsize=65536)
def pass_seconds(device: Device, kind: PassKind, size: float) -> float:
    """Time of an operation that is bound by memory and reads and writes `size` bytes in all."""
    return size / (0.6 * device.bandwidth) + 4e-6


@lru_cache(maxsize=65536)
def attention_seconds(
    device: Device,
    batch: int,
    queries: int,
    keys: int,
    heads: int,
    head_dim: int,
    precision: Precision = "bf16",
    *,
    causal: bool = True,
    flash: bool = True,
    backward: bool = False,
) -> float:
    """Time of softmax(q k^T) v, [batch, heads, queries, head_dim] on keys of the same heads; or of its
    backward.

    `flash`: one fused kernel (Dao 2022), in the backward with the scores once more, 2.5 times the forward's
    products; else the matrix of scores is formed and gone over by softmax, mask and dropout. `causal`: a
    fused kernel leaves out what is masked.
    """
    products = 4.0 * batch * heads * queries * keys * head_dim * (2.5 if backward else 1.0)
    if flash:
        return (
            products * (0.5 if causal and queries == keys else 1.0) / (0.55 * device.peak(precision)) + 1e-5
        )
    scores = 2.0 * batch * heads * queries * keys
    passes = pass_seconds(device, "softmax", scores * (6 if backward else 5))
    one = matmul_seconds(device, queries, keys, head_dim, precision, batch * heads)
    return one * (4 if backward else 2) + passes
