"""Ring attention (Liu et al. 2023): keys and values circulate among the context-parallel ranks while each
rank attends to the block it currently holds.

With positions in zigzag order (`tensor/sequence.py`), a rank holds a lower and an upper half of positions,
and needs no mask for another rank's block: all queries see the lower keys of an earlier rank, and the upper
queries see all keys of a later rank. Either way half of the scores are computed, so all ranks have equal work
in every round.

Blocks travel to the previous rank, so that the ranks that need only a block's lower keys receive it last.
From there on only half of the block is sent: a quarter less traffic than with whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from stretto.engine.parallel.context.kernels import DropoutMask, exact_type, kernel_for


def add_block(y: Tensor, lse: Tensor, block_y: Tensor, block_lse: Tensor) -> None:
    """Combine a block's output [b, heads, n, d] and log-sum-exp [b, heads, n] with those of other blocks, in
    place.
    """
    both = torch.logaddexp(lse, block_lse)
    y.mul_((lse - both).exp_().unsqueeze(-1))
    y.addcmul_(block_y.to(y.dtype), (block_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


@dataclass(frozen=True)
class Round:
    """A rank's attention, with some of its queries, to some of the keys in the block of `owner`."""

    owner: int
    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True)
class Ring:
    """This rank's place among those that share a sequence.

    Args:
        group: of these ranks; messages go to neighbours in it.
        explicit: compute attention without fused kernels.
    """

    group: ProcessGroup
    index: int
    size: int
    explicit: bool = False

    def rounds(self, n: int) -> list[Round]:
        """A round for each rank's block of n keys, in the order of arrival; this rank's block is first."""
        return [self._round((self.index + step) % self.size, n) for step in range(self.size)]

    def _round(self, owner: int, n: int) -> Round:
        whole = slice(0, n)
        lower = slice(0, n // 2)
        upper = slice(n // 2, n)
        if owner == self.index:
            return Round(owner, whole, whole, causal=True)
        return Round(owner, *((whole, lower) if owner < self.index else (upper, whole)), causal=False)

    def blocks(self, local: Tensor) -> Iterator[Tensor]:
        """Every rank's block, as much of it as is needed here, in the order of `rounds`. The next one is
        received while the caller uses the last.

        Args:
            local: this rank's block [n, ...], contiguous.
        """
        block, n = local, local.shape[0]
        for step in range(self.size):
            work, coming = list[Work](), block
            if step + 1 < self.size:
                going = block[: self._keys((self.index + step) % self.size, self.index - 1, n)]
                coming = block.new_empty(
                    self._keys((self.index + step + 1) % self.size, self.index, n), *local.shape[1:]
                )
                work = self.pass_on(going, coming)
            yield block
            for one in work:
                one.wait()
            block = coming

    def _keys(self, owner: int, rank: int, n: int) -> int:
        """How many keys of a block of n are needed on a rank other than its owner."""
        return n // 2 if owner < rank % self.size else n

    def pass_on(self, going: Tensor, coming: Tensor) -> list[Work]:
        """Start sending to the previous rank and receiving from the next. Both tensors must live until the
        work is done.
        """
        previous, following = (self.index - 1) % self.size, (self.index + 1) % self.size
        # in one batch: NCCL would run them one after the other, and all ranks would wait in their sends
        return dist.batch_isend_irecv(
            [
                P2POp(dist.isend, going, group=self.group, group_peer=previous),
                P2POp(dist.irecv, coming, group=self.group, group_peer=following),
            ]
        )


def attend(q: Tensor, k: Tensor, v: Tensor, ring: Ring, masks: list[DropoutMask] | None = None) -> Tensor:
    """This rank's rows of causal attention over the whole sequence.

    Args:
        q: [b, heads, n, d], k and v [b, kv_heads, n, d]: this rank's positions in zigzag order.
        masks: dropout's mask of the probabilities in every round; None: no dropout.

    Returns:
        [b, heads, n, d], in memory [b, n, heads, d].
    """
    return cast(Tensor, _RingAttention.apply(q, k, v, ring, masks))


class _RingAttention(torch.autograd.Function):
    """Saves this rank's q, k, v and output, the log-sum-exp, and the dropout masks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, masks: list[DropoutMask] | None
    ) -> Tensor:
        local = _pack(k, v)
        y, lse = _forward(q, local, ring, masks)
        ctx.ring, ctx.scale = ring, masks[0].scale if masks else 1.0
        # k and v in the same storage as q cost nothing to save. Otherwise save the message: v may be a view
        # that keeps a fused product of all three alive.
        ctx.saves_message = not _share_storage(q, k, v)
        keys_and_values = (local,) if ctx.saves_message else (k, v)
        ctx.save_for_backward(q, y, lse, *keys_and_values, *(m.mask for m in masks or ()))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, y, lse, *rest = ctx.saved_tensors
        local = rest[0] if ctx.saves_message else _pack(rest[0], rest[1])
        masks = [DropoutMask(mask, ctx.scale) for mask in rest[1 if ctx.saves_message else 2 :]] or None
        dy: Tensor = grads[0]
        if dy.stride(-1) != 1:
            dy = dy.contiguous()
        backward = Backward(dy=dy, q=q, local=local, y=y, lse=lse, ring=ctx.ring, masks=masks)
        return (*backward.run(), None, None)


def _forward(q: Tensor, local: Tensor, ring: Ring, masks: list[DropoutMask] | None) -> tuple[Tensor, Tensor]:
    y = lse = q  # until the first round
    for step, (here, block) in enumerate(zip(ring.rounds(q.shape[2]), ring.blocks(local), strict=True)):
        rows, kernel = here.queries, kernel_for(q, ring.explicit, masks[step] if masks else None)
        part, part_lse = kernel.forward(q[:, :, rows], *_unpack(block), here.causal)
        if here.causal:
            y, lse = part.to(exact_type(q.dtype)), part_lse
        else:
            add_block(y[:, :, rows], lse[:, :, rows], part, part_lse)
    return y.to(q.dtype), lse


def _share_storage(*tensors: Tensor) -> bool:
    """Whether these are views of one storage, such as the parts of a fused product."""
    return len({t.untyped_storage()._cdata for t in tensors}) == 1


class Backward:
    """One backward. Keys and values circulate once more; their gradients follow one round behind, and each
    rank adds its part.

    The causal block of this rank's keys is computed in parts: the square below the diagonal while the first
    keys arrive, the two triangles while the last gradients do.
    """

    def __init__(
        self,
        dy: Tensor,
        q: Tensor,
        local: Tensor,
        y: Tensor,
        lse: Tensor,
        ring: Ring,
        masks: list[DropoutMask] | None,
    ) -> None:
        self.dy = dy
        self.q = q
        self.local = local
        self.y = y
        self.lse = lse
        self.ring = ring
        self.masks = masks
        exact = exact_type(q.dtype)
        b, heads, self.n, d = q.shape
        self.dq = q.new_zeros(b, self.n, heads, d, dtype=exact).transpose(1, 2)
        self.d_local = torch.zeros_like(local, dtype=exact)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        lower, upper = slice(0, self.n // 2), slice(self.n // 2, self.n)
        rounds = self.ring.rounds(self.n)
        work, coming = list[Work](), self.d_local
        for step, block in enumerate(self.ring.blocks(self.local)):
            here = rounds[step]
            if here.causal:
                self._within(upper, lower, causal=False)
                continue
            grads = self._add_dq(here.queries, block, here.causal, self.masks[step] if self.masks else None)
            for one in work:
                one.wait()
            # in the second round no other rank has added to the block's gradient yet
            going = coming if step > 1 else self._gradient_of(here.owner).zero_()
            _add(going[here.keys], grads)
            coming = self._gradient_of(rounds[(step + 1) % len(rounds)].owner)
            work = self.ring.pass_on(going, coming)
        self._within(lower, lower, causal=True)
        self._within(upper, upper, causal=True)
        for one in work:
            one.wait()
        self.d_local[: coming.shape[0]] += coming
        dk, dv = _unpack(self.d_local.to(self.local.dtype))
        return self.dq.to(self.q.dtype), dk, dv

    def _gradient_of(self, owner: int) -> Tensor:
        """Memory for what other ranks add to the gradient of a block: for the first rank's block, only the
        lower half.
        """
        n = self.n if owner else self.n // 2
        return self.d_local.new_empty(n, *self.d_local.shape[1:])

    def _within(self, rows: slice, keys: slice, causal: bool) -> None:
        """A part of the block of this rank's keys."""
        mask = self.masks[0].at(rows, keys) if self.masks else None
        _add(self.d_local[keys], self._add_dq(rows, self.local[keys], causal, mask))

    def _add_dq(
        self, rows: slice, block: Tensor, causal: bool, mask: DropoutMask | None
    ) -> tuple[Tensor, Tensor]:
        """Add to dq what some queries get from a block; returns the gradients of its keys and values."""
        dy, q, y, lse = (x[:, :, rows] for x in (self.dy, self.q, self.y, self.lse))
        kernel = kernel_for(self.q, self.ring.explicit, mask)
        k, v = _unpack(block)
        dq, dk, dv = kernel.backward(dy=dy, q=q, k=k, v=v, y=y, lse=lse, causal=causal)
        self.dq[:, :, rows] += dq
        return dk, dv


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values [b, kv_heads, n, d] as one message [n, 2, b, kv_heads, d], in which any range of
    positions is contiguous.
    """
    return torch.stack([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], 1)


def _unpack(block: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as views [b, kv_heads, n, d] of a message."""
    return block[:, 0].permute(1, 2, 0, 3), block[:, 1].permute(1, 2, 0, 3)


def _add(block: Tensor, parts: tuple[Tensor, Tensor]) -> None:
    """Add to a message, in place, what is [b, kv_heads, n, d] for keys and for values."""
    for into, part in zip(_unpack(block), parts, strict=True):
        into += part
