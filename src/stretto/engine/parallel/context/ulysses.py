"""Attention with the sequence exchanged for heads (Jacobs et al. 2023, DeepSpeed-Ulysses, section 3): each
context-parallel rank computes attention of some of the heads over the entire sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.errors import StrettoError


@dataclass(frozen=True)
class HeadShare:
    """The distribution of heads over the context-parallel ranks.

    Args:
        heads, kv_heads: numbers of heads on each rank before the exchange.
        cp: number of ranks.

    Raises:
        StrettoError: the heads do not divide over the ranks.
    """

    heads: int
    kv_heads: int
    cp: int

    def __post_init__(self) -> None:
        if self.heads % self.cp:
            raise StrettoError(
                f"layout.context ulysses: {self.heads} attention heads (after tp) do not divide over "
                f"cp={self.cp} ranks",
                hint=f"choose cp from {[c for c in range(1, self.heads + 1) if self.heads % c == 0][:8]}, "
                "or layout.context=ring, which does not split heads",
            )

    @property
    def copies(self) -> int:
        """Number of copies of each key head for which all ranks get the same number of them, and each serves
        the same number of query heads.
        """
        return lcm(self.kv_heads, self.cp) // self.kv_heads

    @property
    def widths(self) -> tuple[int, int, int]:
        """Heads of q, k and v on each rank after the exchange."""
        kv = self.kv_heads * self.copies // self.cp
        return self.heads // self.cp, kv, kv


def to_heads(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, cp: int) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange this rank's positions of all heads for all positions of this rank's heads.

    Args:
        q, k, v: [b, heads, n, d], [b, kv_heads, n, d] and [b, kv_heads, n, dv], positions in zigzag order.

    Returns:
        q [b, heads / cp, cp n, d], and k and v with the corresponding key heads, positions in natural order.
    """
    share = HeadShare(q.shape[1], k.shape[1], cp)
    return cast("tuple[Tensor, Tensor, Tensor]", _ToHeads.apply(q, k, v, share, group))


def to_positions(y: Tensor, group: ProcessGroup, cp: int) -> Tensor:
    """Invert `to_heads`: [b, heads / cp, cp n, d] to [b, heads, n, d], in memory [b, n, heads, d]."""
    return cast(Tensor, _ToPositions.apply(y, group, cp))


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: HeadShare, group: ProcessGroup
    ) -> tuple[Tensor, ...]:
        ctx.share, ctx.group = share, group
        k, v = (t.repeat_interleave(share.copies, 1) if share.copies > 1 else t for t in (k, v))
        ctx.shapes = [(heads, t.shape[-1]) for heads, t in zip(share.widths, (q, k, v), strict=True)]
        going = [t.unflatten(1, (share.cp, -1)).permute(1, 0, 3, 2, 4).flatten(3) for t in (q, k, v)]
        coming = _exchange(torch.cat(going, -1), group)  # [cp, b, n, width]
        parts = in_order(coming).split([heads * d for heads, d in ctx.shapes], -1)
        return tuple(t.unflatten(-1, s).transpose(1, 2) for t, s in zip(parts, ctx.shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        share: HeadShare = ctx.share
        going = torch.cat([t.transpose(1, 2).flatten(2) for t in grads], -1)  # [b, cp n, width]
        coming = _exchange(in_zigzag(going, share.cp), ctx.group)
        parts = coming.split([heads * d for heads, d in ctx.shapes], -1)
        dq, dk, dv = (
            t.unflatten(-1, s).permute(1, 0, 3, 2, 4).flatten(1, 2)
            for t, s in zip(parts, ctx.shapes, strict=True)
        )
        if share.copies > 1:
            dk, dv = (t.unflatten(1, (-1, share.copies)).sum(2) for t in (dk, dv))
        return dq, dk, dv, None, None


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: ProcessGroup, cp: int) -> Tensor:
        ctx.group, ctx.cp = group, cp
        coming = _exchange(in_zigzag(y.transpose(1, 2), cp), group)  # [cp, b, n, heads / cp, d]
        return coming.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        dy: Tensor = grads[0].unflatten(1, (ctx.cp, -1))  # [b, cp, heads / cp, n, d]
        coming = _exchange(dy.permute(1, 0, 3, 2, 4), ctx.group)
        return in_order(coming).transpose(1, 2), None, None


def _exchange(going: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all: going[i] is sent to rank i; the result is ordered by sender."""
    going = going.contiguous()
    coming = torch.empty_like(going)
    group.alltoall_base(coming, going, [], []).wait()
    return coming


def in_order(x: Tensor) -> Tensor:
    """Reorder each rank's positions in zigzag order [cp, b, n, ...] to all in natural order [b, cp n,
    ...].
    """
    cp, b, n = x.shape[:3]
    y = x.new_empty(b, 2, cp, n // 2, *x.shape[3:])
    y[:, 0] = x[:, :, : n // 2].transpose(0, 1)
    y[:, 1] = x[:, :, n // 2 :].flip(0).transpose(0, 1)
    return y.flatten(1, 3)


def in_zigzag(x: Tensor, cp: int) -> Tensor:
    """Reorder all positions in natural order [b, cp n, ...] to each rank's [cp, b, n, ...] in zigzag
    order.
    """
    lower, upper = x.unflatten(1, (2, cp, -1)).unbind(1)  # [b, cp, n / 2, ...]
    return torch.cat([lower, upper.flip(1)], 2).transpose(0, 1)
