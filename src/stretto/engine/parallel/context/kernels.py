"""Attention of some queries to one block of keys: fused kernels, and the formula written out for dropout and
where no fused kernel applies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 256  # queries
_aten: Any = torch.ops.aten


class Kernel(Protocol):
    """Attention to one block, forward and backward; causal (query i sees keys 0 to i) requires as many
    queries as keys.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """q [b, heads, n, d], k and v [b, kv_heads, m, d] to the output for this block [b, heads, n, d] and
        the log-sum-exp of its scores [b, heads, n] (float32; float64 for float64).
        """
        ...

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's part of the gradients of q, k and v; y and lse are those of all blocks together."""
        ...


class Cpu:
    """Torch's tiled attention on CPUs: any strides, any floating type, grouped heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, y, lse, 0.0, causal)


class Flash:
    """FlashAttention on CUDA: 16-bit types, grouped heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout's random state
        return _aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, y, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused
        )


class Efficient:
    """Memory-efficient attention on CUDA, which takes float32 too, but no grouped heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        k, v = (_repeat_heads(t, q.shape[1]) for t in (k, v))
        y, lse = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
        return y, lse[..., : q.shape[2]]

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))  # the kernel's alignment
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        wide = (_repeat_heads(t, q.shape[1]) for t in (k, v))
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dy, q, *wide, None, y, lse, unused, unused, 0.0, [True, True, True, False], causal
        )
        return dq, _sum_heads(dk, k.shape[1]), _sum_heads(dv, k.shape[1])


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[b, kv_heads, m, d] with each key head repeated for all of its query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_heads(x: Tensor, kv_heads: int) -> Tensor:
    """Gradients of repeated heads, summed for each key head."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)


@dataclass(frozen=True)
class DropoutMask:
    """Which attention probabilities dropout keeps.

    mask: bool [b, heads, queries, keys].
    scale: by which the kept ones are multiplied.
    """

    mask: Tensor
    scale: float

    def at(self, queries: slice, keys: slice) -> DropoutMask:
        """The mask of some queries and keys."""
        return DropoutMask(self.mask[:, :, queries, keys], self.scale)

    def factors(self, queries: slice, keys: slice, dtype: torch.dtype) -> Tensor:
        """What the probabilities of these queries and keys are multiplied by: 0 or the scale."""
        return self.mask[:, :, queries, keys].to(dtype).mul_(self.scale)


@dataclass(frozen=True)
class Explicit:
    """The formula written out, for any device and type, and for dropout. It goes through tiles of queries, so
    that only one tile's scores are in memory, and skips the keys after each tile of a causal block.
    """

    dropout: DropoutMask | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        b, heads, n, d = q.shape
        exact = exact_type(q.dtype)
        y = q.new_empty(b, n, heads, d, dtype=exact).transpose(1, 2)
        lse = q.new_empty(b, heads, n, dtype=exact)
        for rows, keys in _tiles(n, k.shape[2], causal):
            scores = _scores(q[:, :, rows], k[:, :, keys], rows, causal)
            lse[:, :, rows] = scores.logsumexp(-1)
            p = scores.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
            if self.dropout is not None:
                p.mul_(self.dropout.factors(rows, keys, exact))
            y[:, :, rows] = _ungrouped(_grouped(p.to(v.dtype), v) @ v[:, :, keys], q)
        return y, lse

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As derived by Dao et al. 2022, appendix B.2."""
        exact, kind = lse.dtype, q.dtype
        # subtracted by the softmax's backward; dropout does not change it
        through = (dy.to(exact) * y).sum(-1, keepdim=True)
        dq = torch.empty_like(q, dtype=exact)
        dk, dv = (torch.zeros_like(t, dtype=exact) for t in (k, v))
        for rows, keys in _tiles(q.shape[2], k.shape[2], causal):
            q_rows, dy_rows = q[:, :, rows], dy[:, :, rows].to(kind)
            p = _scores(q_rows, k[:, :, keys], rows, causal).sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
            dp = _ungrouped(_grouped(dy_rows, k) @ v[:, :, keys].transpose(2, 3), q_rows).to(exact)
            passed = p
            if self.dropout is not None:
                factors = self.dropout.factors(rows, keys, exact)
                passed, dp = p * factors, dp.mul_(factors)
            dv[:, :, keys] += _grouped(passed.to(kind), k).transpose(2, 3) @ _grouped(dy_rows, k)
            ds = p.mul_(dp.sub_(through[:, :, rows])).mul_(q.shape[-1] ** -0.5).to(kind)
            dq[:, :, rows] = _ungrouped(_grouped(ds, k) @ k[:, :, keys], q_rows)
            dk[:, :, keys] += _grouped(ds, k).transpose(2, 3) @ _grouped(q_rows, k)
        return dq, dk, dv


def _tiles(n: int, m: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Tiles of queries, and the keys that any query of the tile sees."""
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        yield slice(start, stop), slice(0, stop if causal else m)


def _scores(q: Tensor, k: Tensor, rows: slice, causal: bool) -> Tensor:
    """q k^T / sqrt(d) of one tile [b, heads, rows, keys], in the exact type; -inf where masked."""
    scores = _ungrouped(_grouped(q, k) @ k.transpose(2, 3), q).to(exact_type(q.dtype))
    scores.mul_(q.shape[-1] ** -0.5)
    if causal:
        size = rows.stop - rows.start
        later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
        scores[..., rows.start :].masked_fill_(later, float("-inf"))
    return scores


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[b, heads, n, ...] to [b, kv_heads, heads / kv_heads n, ...]: the queries of a key head in
    one matrix.
    """
    return x if x.shape[1] == k.shape[1] else x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _ungrouped(x: Tensor, q: Tensor) -> Tensor:
    """Back to [b, heads, n, ...], with q's heads and n."""
    return x if x.shape[1] == q.shape[1] else x.unflatten(2, (-1, q.shape[2])).flatten(1, 2)


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and of sums over blocks."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernel_for(q: Tensor, explicit: bool = False, dropout: DropoutMask | None = None) -> Kernel:
    """The fastest kernel for queries like q; the formula written out with `explicit` or dropout."""
    if explicit or dropout is not None:
        return Explicit(dropout)
    d = q.shape[-1]
    if q.device.type == "cpu" and q.is_floating_point():
        return Cpu()
    if q.device.type == "cuda" and d % 8 == 0:
        if q.dtype in (torch.float16, torch.bfloat16) and d <= 256:
            return Flash()
        if q.dtype == torch.float32:
            return Efficient()
    return Explicit()
