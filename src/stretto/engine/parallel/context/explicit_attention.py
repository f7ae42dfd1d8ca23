"""Attention to one block of keys, written out tile by tile: for dropout, and where no fused kernel applies.

Queries are taken in tiles, so that never more than one tile's scores are held, and a causal block leaves out
the keys behind each tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 256  # queries


@dataclass(frozen=True)
class Kept:
    """Which probabilities dropout lets pass.

    mask: bool [b, heads, queries, keys].
    scale: what is kept is multiplied by this.
    """

    mask: Tensor
    scale: float

    def at(self, queries: slice, keys: slice) -> Kept:
        """Of some queries and keys."""
        return Kept(self.mask[:, :, queries, keys], self.scale)

    def factors(self, queries: slice, keys: slice, dtype: torch.dtype) -> Tensor:
        """What those probabilities are multiplied by: 0 or the scale."""
        return self.mask[:, :, queries, keys].to(dtype).mul_(self.scale)


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, kept: Kept | None = None) -> tuple[Tensor, Tensor]:
    """q [b, heads, n, d], k and v [b, kv_heads, m, d] to the output [b, heads, n, d] and the log-sum-exp of
    the scores [b, heads, n], both float32 (float64 for float64).

    Args:
        causal: query i sees keys 0 to i.
        kept: of the probabilities [b, heads, n, m]; None: all.
    """
    b, heads, n, d = q.shape
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    y = q.new_empty(b, n, heads, d, dtype=exact).transpose(1, 2)
    lse = q.new_empty(b, heads, n, dtype=exact)
    for rows, keys in _tiles(n, k.shape[2], causal):
        scores = _scores(q[:, :, rows], k[:, :, keys], rows, causal)
        lse[:, :, rows] = scores.logsumexp(-1)
        p = scores.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
        if kept is not None:
            p.mul_(kept.factors(rows, keys, exact))
        y[:, :, rows] = _ungrouped(_grouped(p.to(v.dtype), v) @ v[:, :, keys], q)
    return y, lse


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    causal: bool,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through this block (Dao et al. 2022, appendix B.2).

    y and lse: of all of the queries' keys, which may be more than are here.
    """
    exact, kind = lse.dtype, q.dtype
    through = (dy.to(exact) * y).sum(
        -1, keepdim=True
    )  # what the softmax takes off; dropout does not change it
    dq = torch.empty_like(q, dtype=exact)
    dk, dv = (torch.zeros_like(t, dtype=exact) for t in (k, v))
    for rows, keys in _tiles(q.shape[2], k.shape[2], causal):
        q_rows, dy_rows = q[:, :, rows], dy[:, :, rows].to(kind)
        p = _scores(q_rows, k[:, :, keys], rows, causal).sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
        dp = _ungrouped(_grouped(dy_rows, k) @ v[:, :, keys].transpose(2, 3), q_rows).to(exact)
        passed = p
        if kept is not None:
            factors = kept.factors(rows, keys, exact)
            passed, dp = p * factors, dp.mul_(factors)
        dv[:, :, keys] += _grouped(passed.to(kind), k).transpose(2, 3) @ _grouped(dy_rows, k)
        ds = p.mul_(dp.sub_(through[:, :, rows])).mul_(q.shape[-1] ** -0.5).to(kind)
        dq[:, :, rows] = _ungrouped(_grouped(ds, k) @ k[:, :, keys], q_rows)
        dk[:, :, keys] += _grouped(ds, k).transpose(2, 3) @ _grouped(q_rows, k)
    return dq, dk, dv


def _tiles(n: int, m: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Tiles of queries, and the keys that any of them sees."""
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        yield slice(start, stop), slice(0, stop if causal else m)


def _scores(q: Tensor, k: Tensor, rows: slice, causal: bool) -> Tensor:
    """q k^T / sqrt(d) of one tile [b, heads, rows, keys], exact type; what is not to be seen is -inf."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = _ungrouped(_grouped(q, k) @ k.transpose(2, 3), q).to(exact).mul_(q.shape[-1] ** -0.5)
    if causal:
        size = rows.stop - rows.start
        later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
        scores[..., rows.start :].masked_fill_(later, float("-inf"))
    return scores


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[b, heads, n, ...] to [b, kv_heads, heads / kv_heads n, ...]: queries of one key head in one matrix."""
    return x if x.shape[1] == k.shape[1] else x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _ungrouped(x: Tensor, q: Tensor) -> Tensor:
    """Back to [b, heads, n, ...], heads and n as q has them."""
    return x if x.shape[1] == q.shape[1] else x.unflatten(2, (-1, q.shape[2])).flatten(1, 2)
