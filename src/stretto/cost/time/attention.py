"""How long softmax(q k^T) v takes: in one fused kernel, or with the scores in memory."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import log
from typing import Any

from stretto.cost.machine.device import Device, Precision
from stretto.cost.time.constants import Flash, bandwidth, flash_of, products
from stretto.cost.time.measured import rate_near
from stretto.cost.time.passes import pass_seconds
from stretto.cost.time.products import matmul_seconds

_ROWS = 128  # of the queries that one multiprocessor works on at a time
BACKWARD = 2.5  # products of a fused backward over the forward's: the scores once more, and four gradients


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
    rows: Any = device.kernels.get("attention")
    if rows and flash:
        return _from_table(device, rows, (batch, queries, keys, heads, head_dim), causal, backward)
    if flash:
        return _fused(device, batch * heads, queries, keys, head_dim, precision, causal, backward)
    return _explicit(device, batch * heads, queries, keys, head_dim, precision, backward)


def _fused(
    device: Device,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    precision: Precision,
    causal: bool,
    backward: bool,
) -> float:
    how = flash_of(device)
    left = 0.5 if causal and queries == keys else 1.0
    products_of = 4.0 * heads * queries * keys * head_dim * left * (BACKWARD if backward else 1.0)
    ramp = how.causal_ramp if left < 1 else how.ramp
    share = _share(how, head_dim, backward) * keys / (keys + ramp)
    # few heads of few queries leave multiprocessors idle; a backward is cut along the keys
    blocks = heads * -(-(keys if backward else queries) // _ROWS)
    idle = max(1.0, products(device).units / blocks)
    element = 4 if precision in ("fp32", "tf32") else 2
    moved = element * heads * head_dim * (2 * queries + 2 * keys) * (2 if backward else 1)
    rate, fixed = bandwidth(device, "copy")
    return max(products_of * idle / (share * device.peak(precision)), moved / rate) + fixed


def _share(how: Flash, head_dim: int, backward: bool) -> float:
    """Of the peak: straight in the logarithm of head_dim between those that were measured."""
    known = sorted((how.backward if backward else how.forward).items())
    if head_dim <= known[0][0]:
        return known[0][1] * (head_dim / known[0][0]) ** 0.5
    for (low, below), (high, above) in pairwise(known):
        if head_dim <= high:
            return below + (above - below) * log(head_dim / low) / log(high / low)
    return known[-1][1]


def _explicit(
    device: Device, heads: int, queries: int, keys: int, head_dim: int, precision: Precision, backward: bool
) -> float:
    """The scores in memory; softmax, scale and mask in one kernel, dropout with a mask of bytes in another.

    Forward: both read and write the scores, dropout writes its mask. Backward: dropout reads the gradient and
    the mask and writes, softmax reads the gradient and its result and writes.
    """
    element = 4 if precision in ("fp32", "tf32") else 2
    scores = float(heads * queries * keys)
    softmax = pass_seconds(device, "softmax", element * scores * (3 if backward else 2))
    dropout = pass_seconds(device, "dropout", (2 * element + 1) * scores)
    # q k^T and its like have a short inner dimension, those with v a narrow result
    inner = matmul_seconds(device, queries, keys, head_dim, precision, heads)
    outer = matmul_seconds(device, queries, head_dim, keys, precision, heads)
    both = inner + outer
    if backward:
        both = inner + matmul_seconds(device, keys, head_dim, queries, precision, heads) * 2 + outer
    return both + softmax + dropout


def _from_table(device: Device, rows: Any, shape: tuple[int, ...], causal: bool, backward: bool) -> float:
    """From the rows of the same direction and mask, if there are such: their rates of arithmetic."""
    launch = float(device.kernels.get("launch", 0.0))  # pyright: ignore[reportArgumentType]
    same = [r for r in rows if bool(r[6]) == backward]
    same = same or list(rows)
    alike = [r for r in same if bool(r[5]) == causal] or same
    known = [(tuple(float(x) for x in r[:5]), _work(r[:5], bool(r[6])), float(r[7])) for r in alike]
    rate = rate_near(known, tuple(float(x) for x in shape), launch)
    return _work(shape, backward) / rate + launch


def _work(shape: Any, backward: bool) -> float:
    batch, queries, keys, heads, head_dim = shape
    return 4.0 * batch * heads * queries * keys * head_dim * (BACKWARD if backward else 1.0)
