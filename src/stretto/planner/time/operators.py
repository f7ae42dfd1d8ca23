"""Time of one operation on one device: matrix products, passes over memory, attention.

The model has few constants, which `benchmarks/fit_operators.py` fits to measured operations. What was
measured on the device itself (`Device.kernels`) replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import log
from typing import Any, Literal

from stretto.planner.machines.device import Device, Precision
from stretto.planner.time.constants import Flash, Products, bandwidth, chip, flash_of, products, sustained
from stretto.planner.time.measured import interpolate, nearest_rate

# classes of memory-bound operations, each with its effective bandwidth
PassKind = (
    Literal["add", "norm", "rope", "gated", "gelu", "softmax", "dropout", "copy"]
    | Literal["embedding", "loss", "adam", "reduce"]
)


@lru_cache(maxsize=65536)
def pass_seconds(device: Device, kind: PassKind, size: float) -> float:
    """Time of a memory-bound operation that reads and writes `size` bytes in total."""
    tables: Any = device.kernels.get("passes")
    if tables:
        rows = tables.get(kind) or tables.get("copy") or next(iter(tables.values()))
        return interpolate([(float(size), float(seconds)) for size, seconds in rows], size)
    rate, fixed = bandwidth(device, kind)
    return size / rate + fixed


# Tiles of the result that libraries choose from, and split counts of a long inner dimension (split-k).
TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (256, 64), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4, 8)
LARGEST = 128 * 256
# Operands of this many elements in total are the reference of the power law in their size, which is constant
# beyond the measured sizes.
MIDDLE = 2.0**26
LEVEL = (2.0**-4, 2.0**3)
# Each split writes and reads partial sums in 32 bits, and launches one more kernel.
SUM_BYTES, SUM_SECONDS = 8.0, 3e-6
_SHARP = 6  # sharpness of the transition between memory-bound and compute-bound
_WIDTHS: dict[Precision, float] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp4": 0.5}
_SCALED: frozenset[Precision] = frozenset({"fp8", "fp4"})  # cast with scales from 16 bits


@lru_cache(maxsize=65536)
def matmul_seconds(
    device: Device,
    m: int,
    n: int,
    k: int,
    precision: Precision = "bf16",
    batch: int = 1,
    casts: float = 1.0,
) -> float:
    """Time of `batch` products [m, k] times [k, n], in one call.

    In 8 bits and fewer the operands are cast from 16 bits first, each in a pass that reads and writes it.

    Args:
        casts: share of these passes that no other kernel does along with its own work.
    """
    table = _measured(device, precision)
    if table is not None:
        rows, faster = table
        launch = float(device.kernels.get("launch", 0.0))  # pyright: ignore[reportArgumentType]
        points = [((a, b, c, e), 2.0 * a * b * c * e, seconds) for a, b, c, e, seconds in rows]
        rate = nearest_rate(points, (float(m), float(n), float(k), float(batch)), launch)
        return 2.0 * m * n * k * batch / (rate * faster) + launch
    fitted = products(device)
    reached = fitted.memory * device.bandwidth
    width = _WIDTHS[precision]
    # products of narrower operands have 16-bit results
    moved = batch * (width * (m * k + k * n) + max(width, 2) * m * n) / reached
    if precision in _SCALED:
        # filling a tile's pipeline takes as long as in 16 bits, for which the constants are fitted
        faster = sustained(device, precision) / sustained(device, "bf16")
        fitted = replace(fitted, prologue=fitted.prologue * faster)
    rate = fitted.compute * sustained(device, precision) / fitted.units
    work = _tiled(fitted=fitted, m=m, n=n, k=k, batch=batch, rate=rate, reached=reached)
    seconds = (work**_SHARP + moved**_SHARP) ** (1 / _SHARP) + fitted.fixed
    if precision not in _SCALED:
        return seconds
    copied, fixed = bandwidth(device, "copy")
    return seconds + casts * (3.0 * batch * (m * k + k * n) / copied + 2 * fixed)


# Speed of products by the largest power of two that divides the widths of their operands, over that of
# multiples of 64: tensor cores load 16 bytes at a time, and cache lines have 128 (NVIDIA, "Matrix
# multiplication background user's guide", section 3). At 16, BigScience measured 0.78: 94 TFLOP/s with a
# width of 3600 a rank, 120 with 3456.
_ALIGNED = {64: 1.0, 32: 0.93, 16: 0.80, 8: 0.70, 4: 0.40, 2: 0.30, 1: 0.25}


def alignment(device: Device, precision: Precision, *widths: int) -> float:
    """Speed of products whose operands have rows of these widths, over that of well aligned ones."""
    if device.kernels or chip(device) in _UNALIGNED or precision not in ("fp16", "bf16", "fp8", "fp4"):
        return 1.0
    return min(_ALIGNED[min(64, width & -width)] for width in widths)


_UNALIGNED = ("cpu", "tpu")  # without such loads, or padded by the compiler


def unscaled(precision: Precision) -> Precision:
    """The precision of attention, logits and routers, which stay in 16 bits if products have fewer."""
    return "bf16" if precision in _SCALED else precision


def _tiled(fitted: Products, m: int, n: int, k: int, batch: int, rate: float, reached: float) -> float:
    """Seconds of the arithmetic with the best tile and split; `rate` is the FLOP/s of one multiprocessor."""
    best = float("inf")
    for rows, columns in TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        tile_seconds = 2.0 * rows * columns / (rate * (rows * columns / LARGEST) ** fitted.tile)
        for split in SPLITS:
            waves = tiles * split / fitted.units
            part = tile_seconds * (k / split + fitted.prologue)
            if waves * part >= best:
                break  # further splits only add prologues
            waves += (-(-tiles * split // fitted.units) - waves) * fitted.wave
            seconds = waves * part
            if split > 1:
                seconds += SUM_BYTES * split * batch * m * n / reached + SUM_SECONDS
            best = min(best, seconds)
    large = min(max((m + n) * k / MIDDLE, LEVEL[0]), LEVEL[1])
    return best * large**fitted.droop


def _measured(device: Device, precision: Precision) -> tuple[Sequence[Sequence[float]], float] | None:
    """Measured rows of this precision with 1.0, or of another precision with the ratio of their peaks."""
    tables: Any = device.kernels.get("matmul")
    if not tables:
        return None
    if tables.get(precision):
        return tables[precision], 1.0
    for other, rows in tables.items():
        if rows:
            return rows, device.peak(precision) / device.peak(other)
    return None


_ROWS = 128  # queries that one multiprocessor works on at a time
_HEAD = 32  # fused kernels are made for multiples of this many features, and compute the next larger one
BACKWARD = 2.5  # products of a fused backward over the forward's two: scores again, and four gradients


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
    fused_softmax: bool = True,
) -> float:
    """Time of softmax(q k^T) v, or of its backward.

    Args:
        queries, keys: positions; q is [batch, heads, queries, head_dim], keys and values have the same heads.
        causal: a fused kernel skips what is masked.
        flash: one fused kernel (Dao 2022), whose backward recomputes the scores: 2.5 times the products of
            the forward. Else the matrix of scores is written out, and softmax, mask and dropout pass over it.
        backward: time the backward instead of the forward.
        fused_softmax: scale, mask and softmax of stored scores are one kernel.
    """
    rows: Any = device.kernels.get("attention")
    if rows and flash:
        # from measured rows of the same direction and mask, if there are such, at their arithmetic rate
        shape = (batch, queries, keys, heads, head_dim)
        launch = float(device.kernels.get("launch", 0.0))  # pyright: ignore[reportArgumentType]
        matching = [r for r in rows if bool(r[6]) == backward]
        matching = matching or list(rows)
        matching_mask = [r for r in matching if bool(r[5]) == causal] or matching
        measurements = [
            (tuple(float(x) for x in r[:5]), _work(r[:5], bool(r[6])), float(r[7])) for r in matching_mask
        ]
        rate = nearest_rate(measurements, tuple(float(x) for x in shape), launch)
        return _work(shape, backward) / rate + launch
    sizes = batch * heads, queries, keys, head_dim
    if flash:
        return _fused(device, sizes, precision, causal, backward)
    return _explicit(device, sizes, precision, backward, fused_softmax)


_Sizes = tuple[int, int, int, int]  # heads of all samples, queries, keys, features of a head


def _fused(device: Device, sizes: _Sizes, precision: Precision, causal: bool, backward: bool) -> float:
    heads, queries, keys, head_dim = sizes
    fitted = flash_of(device)
    left = 0.5 if causal and queries == keys else 1.0
    padded = -(-head_dim // _HEAD) * _HEAD
    products_of = 4.0 * heads * queries * keys * padded * left * (BACKWARD if backward else 1.0)
    ramp = fitted.causal_ramp if left < 1 else fitted.ramp
    share = _share(fitted, head_dim, backward) * keys / (keys + ramp)
    # few heads with few queries leave multiprocessors idle; a backward is parallel over keys
    blocks = heads * -(-(keys if backward else queries) // _ROWS)
    idle = max(1.0, products(device).units / blocks)
    element = 4 if precision in ("fp32", "tf32") else 2
    moved = element * heads * head_dim * (2 * queries + 2 * keys) * (2 if backward else 1)
    rate, fixed = bandwidth(device, "copy")
    return max(products_of * idle / (share * device.peak(precision)), moved / rate) + fixed


def _share(fitted: Flash, head_dim: int, backward: bool) -> float:
    """The share of the peak, linear in the logarithm of head_dim between the known ones."""
    shares = sorted((fitted.backward if backward else fitted.forward).items())
    if head_dim <= shares[0][0]:
        return shares[0][1] * (head_dim / shares[0][0]) ** 0.5
    for (low, below), (high, above) in pairwise(shares):
        if head_dim <= high:
            return below + (above - below) * log(head_dim / low) / log(high / low)
    return shares[-1][1]


def _explicit(
    device: Device, sizes: _Sizes, precision: Precision, backward: bool, fused_softmax: bool
) -> float:
    """Attention with the scores in memory; softmax, scale and mask in one kernel, dropout with a byte mask in
    another.

    Forward: both read and write the scores, dropout writes its mask. Backward: dropout reads the gradient and
    the mask and writes, softmax reads the gradient and its result and writes.
    """
    heads, queries, keys, head_dim = sizes
    element = 4 if precision in ("fp32", "tf32") else 2
    scores = float(heads * queries * keys)
    softmax = pass_seconds(device, "softmax", element * scores * (3 if backward else 2))
    if not fused_softmax:
        # scale, mask, the cast to 32 bits, the cast back; softmax itself then moves 32 bits
        softmax *= 2
        softmax += 2 * pass_seconds(device, "copy", (2 * element + 1) * scores)
        softmax += 2 * pass_seconds(device, "copy", (element + 4) * scores)
    dropout = pass_seconds(device, "dropout", (2 * element + 1) * scores)
    # products such as q k^T have a short inner dimension, those with v a narrow result
    inner = matmul_seconds(device=device, m=queries, n=keys, k=head_dim, precision=precision, batch=heads)
    outer = matmul_seconds(device=device, m=queries, n=head_dim, k=keys, precision=precision, batch=heads)
    products_seconds = inner + outer
    if backward:
        thin = matmul_seconds(device=device, m=keys, n=head_dim, k=queries, precision=precision, batch=heads)
        products_seconds = inner + thin * 2 + outer
    return products_seconds / alignment(device, precision, head_dim) + softmax + dropout


def _work(shape: Any, backward: bool) -> float:
    batch, queries, keys, heads, head_dim = shape
    return 4.0 * batch * heads * queries * keys * head_dim * (BACKWARD if backward else 1.0)
