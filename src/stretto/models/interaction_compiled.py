"""The dot interaction compiled by numba: a sample's vectors stay in the cache while all pairs are formed.

As batched products it is limited by small matrices, of which half is thrown away. Four vectors at a time, so
that what is read is used four times. Sums are in an order of their own, which sizes alone decide.
"""

from __future__ import annotations

from typing import Any, cast

import numba
import numpy as np

_njit = cast(Any, numba).njit
_compiled = _njit(nogil=True, cache=True, fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")


@_compiled
def forward(x: Any, pooled: Any, out: Any) -> None:
    """x [b, dim] and pooled [b, tables, dim] to out [b, dim + pairs]."""
    samples, tables, dim = pooled.shape
    n = tables + 1
    padded = (n + 3) // 4 * 4
    vectors = np.zeros((padded, dim), x.dtype)
    products = np.empty(padded, x.dtype)
    for s in range(samples):
        for k in range(dim):
            vectors[0, k] = x[s, k]
        for i in range(tables):
            for k in range(dim):
                vectors[i + 1, k] = pooled[s, i, k]
        for k in range(dim):
            out[s, k] = vectors[0, k]
        at = dim
        for i in range(1, n):
            for j in range(0, i, 4):
                a = b = c = d = x.dtype.type(0)
                for k in range(dim):
                    v = vectors[i, k]
                    a += v * vectors[j, k]
                    b += v * vectors[j + 1, k]
                    c += v * vectors[j + 2, k]
                    d += v * vectors[j + 3, k]
                products[j], products[j + 1], products[j + 2], products[j + 3] = a, b, c, d
            for j in range(i):
                out[s, at] = products[j]
                at += 1


@_compiled
def backward(x: Any, pooled: Any, given: Any, dx: Any, dpooled: Any) -> None:
    """The gradients of both from that of out: of a product of two vectors each gets the other."""
    samples, tables, dim = pooled.shape
    n = tables + 1
    padded = (n + 3) // 4 * 4
    vectors = np.zeros((padded, dim), x.dtype)
    square = np.zeros((n, padded), x.dtype)
    total = np.empty(dim, x.dtype)
    for s in range(samples):
        for k in range(dim):
            vectors[0, k] = x[s, k]
        for i in range(tables):
            for k in range(dim):
                vectors[i + 1, k] = pooled[s, i, k]
        at = dim
        for i in range(1, n):
            for j in range(i):
                square[i, j] = given[s, at]
                square[j, i] = given[s, at]
                at += 1
        for i in range(n):
            for k in range(dim):
                total[k] = 0
            for j in range(0, padded, 4):
                a, b, c, d = square[i, j], square[i, j + 1], square[i, j + 2], square[i, j + 3]
                for k in range(dim):
                    total[k] += (
                        a * vectors[j, k]
                        + b * vectors[j + 1, k]
                        + c * vectors[j + 2, k]
                        + d * vectors[j + 3, k]
                    )
            if i == 0:
                for k in range(dim):
                    dx[s, k] = total[k] + given[s, k]
            else:
                for k in range(dim):
                    dpooled[s, i - 1, k] = total[k]
