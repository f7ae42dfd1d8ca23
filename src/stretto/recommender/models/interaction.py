"""The dot interaction of DLRM (Naumov et al. 2019, arXiv 1906.00091, sec. 2.1), reference and fast."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stretto.engine.loops import jit


def _forward_loop(x: Any, pooled: Any, out: Any) -> None:
    """Fill out [b, dim + pairs] from x [b, dim] and pooled [b, tables, dim]."""
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
                products[j] = a
                products[j + 1] = b
                products[j + 2] = c
                products[j + 3] = d
            for j in range(i):
                out[s, at] = products[j]
                at += 1


def _backward_loop(x: Any, pooled: Any, gradient: Any, dx: Any, dpooled: Any) -> None:
    """Fill dx and dpooled from the gradient of out; d(u.v)/du = v for each pair of vectors."""
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
                square[i, j] = gradient[s, at]
                square[j, i] = gradient[s, at]
                at += 1
        for i in range(n):
            for k in range(dim):
                total[k] = 0
            for j in range(0, padded, 4):
                a = square[i, j]
                b = square[i, j + 1]
                c = square[i, j + 2]
                d = square[i, j + 3]
                for k in range(dim):
                    total[k] += (
                        a * vectors[j, k]
                        + b * vectors[j + 1, k]
                        + c * vectors[j + 2, k]
                        + d * vectors[j + 3, k]
                    )
            if i == 0:
                for k in range(dim):
                    dx[s, k] = total[k] + gradient[s, k]
            else:
                for k in range(dim):
                    dpooled[s, i - 1, k] = total[k]


def pair_products(x: Tensor, pooled: Tensor) -> Tensor:
    """x concatenated with the dot products of all pairs of distinct vectors: [b, dim + pairs].

    Pairs are the entries below the diagonal of the Gram matrix of [x; pooled], row by row.

    Args:
        x: [b, dim].
        pooled: [b, tables, dim].
    """
    vectors = torch.cat([x.unsqueeze(1), pooled], 1)
    products = vectors @ vectors.transpose(1, 2)
    row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1, device=x.device)
    return torch.cat([x, products[:, row, column]], 1)


def dot_interaction(x: Tensor, pooled: Tensor) -> Tensor:
    """As `pair_products`, with a hand-written backward, and compiled loops if they are faster."""
    floats = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    large = floats and pooled.numel() * pooled.shape[1] >= LARGE
    kernels = _compile_loops() if large and torch.get_num_threads() <= THREADS else None
    products: Any = _Dot.apply(x, pooled) if kernels is None else _CompiledDot.apply(x, pooled, kernels)
    return products


# compiled loops pay off from this many multiplications, and are faster up to this many threads
LARGE, THREADS = 2**22, 4


@cache
def _compile_loops() -> tuple[Any, Any] | None:
    """Return the compiled forward and backward loops; None without numba."""
    try:
        return jit(_forward_loop), jit(_backward_loop)
    except ImportError:
        return None


class _CompiledDot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pooled: Tensor, kernels: tuple[Any, Any]) -> Tensor:
        ctx.backward_loop = kernels[1]
        ctx.save_for_backward(x, pooled)
        n, dim = pooled.shape[1] + 1, x.shape[1]
        out = x.new_empty(len(x), dim + n * (n - 1) // 2)
        kernels[0](*(t.detach().numpy() for t in (x, pooled, out)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        gradient: Tensor = grads[0]
        x, pooled = ctx.saved_tensors
        dx, dpooled = torch.empty_like(x), torch.empty_like(pooled)
        ctx.backward_loop(*(t.detach().numpy() for t in (x, pooled, gradient, dx, dpooled)))
        return dx, dpooled, None


class _Dot(torch.autograd.Function):
    """One batched matrix product in the forward and one in the backward; pairs are gathered by copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pooled: Tensor) -> Tensor:
        vectors = torch.cat([x.unsqueeze(1), pooled], 1)
        ctx.save_for_backward(vectors)
        n, dim = vectors.shape[1:]
        below, _ = _pair_indices(n, x.device)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        out = x.new_empty(len(x), dim + len(below))
        out[:, :dim] = x
        out[:, dim:] = products.index_select(1, below)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        gradient: Tensor = grads[0]
        (vectors,) = ctx.saved_tensors
        n, dim = vectors.shape[1:]
        _, mirrored = _pair_indices(n, gradient.device)
        # d(u.v)/du = v: a symmetric matrix of pair gradients, zero on the diagonal, times the vectors
        padded = functional.pad(gradient[:, dim:], (0, 1))
        square = padded.index_select(1, mirrored).view(-1, n, n)
        products = torch.bmm(square, vectors)
        return products[:, 0] + gradient[:, :dim], products[:, 1:]


@cache
def _pair_indices(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the flat indices of the pairs in an n x n matrix, and the index of the pair at each entry of the
    matrix; the diagonal has the number of pairs."""
    row, column = torch.tril_indices(n, n, -1, device=device)
    pairs = torch.full((n, n), len(row), device=device)
    pairs[row, column] = pairs[column, row] = torch.arange(len(row), device=device)
    return row * n + column, pairs.flatten()
