"""Ring attention (Liu et al. 2023): keys and values circulate among the context-parallel ranks while each
rank attends to the block it currently holds.

With positions in zigzag order (`tensor/sequence.py`), a rank holds a lower and an upper half of positions,
and needs no mask for another rank's block: all queries see the lower keys of an earlier rank, and the upper
queries see all keys of a later rank. Either way half of the scores are computed, so all ranks have equal work
in every round. With a window, each pair of halves is a separate piece of a round, and pieces without visible
scores are left out.

Blocks travel to the previous rank, so that the ranks that need only a block's lower keys receive it last.
From there on only half of the block is sent: a quarter less traffic than with full blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from stretto.engine.documents import DocumentStarts
from stretto.engine.kernels import (
    AttentionTile,
    Band,
    DropoutMask,
    ScoreOptions,
    add_block,
    add_sinks,
    exact_type,
    kernel_for,
    rows,
    sinks_gradient,
)
from stretto.engine.parallel.tensor.sequence import zigzag


@dataclass(frozen=True)
class RingRound:
    """A rank's attention to the keys in the block of `owner`.

    queries, keys: ranges that cover those of all pieces; no other keys of the block are sent to the rank.
    """

    owner: int
    queries: slice
    keys: slice
    pieces: tuple[AttentionTile, ...]


@dataclass(frozen=True, kw_only=True)
class RingMember:
    """One of the ranks that share a sequence.

    Args:
        group: group of these ranks; messages go to neighbours in it.
        scores: options of the scores; a window counts positions of the entire sequence.
        explicit: compute attention without fused kernels.
        documents: documents of the samples; None if attention does not stop at their boundaries.
    """

    group: ProcessGroup
    index: int
    size: int
    scores: ScoreOptions
    explicit: bool = False
    documents: DocumentStarts | None = None

    def rounds(self, n: int) -> list[RingRound]:
        """Return a round for each rank's block of n keys, in the order of arrival; this rank's is first."""
        documents = self.documents
        rounds = [self._round((self.index + step) % self.size, n) for step in range(self.size)]
        if documents is None:
            return rounds

        def make() -> list[RingRound]:
            runs = [documents.runs(zigzag(n * self.size, self.size, rank)) for rank in range(self.size)]
            local_runs = runs[self.index]
            return [
                replace(
                    round_,
                    pieces=tuple(
                        part
                        for piece in round_.pieces
                        for part in documents.inside(piece, local_runs, runs[round_.owner])
                    ),
                )
                for round_ in rounds
            ]

        return documents.cached(("rounds", n, self.scores.window), make)

    def _round(self, owner: int, n: int) -> RingRound:
        full_keys = slice(0, n)
        lower, upper = slice(0, n // 2), slice(n // 2, n)
        window = self.scores.window
        if window is not None and window >= n * self.size:
            window = None
        if owner == self.index:
            return RingRound(owner, full_keys, full_keys, tuple(self._pieces(owner, n, window)))
        queries, keys = (full_keys, lower) if owner < self.index else (upper, full_keys)
        if window is None:
            return RingRound(owner, queries, keys, (AttentionTile(queries, keys, Band(n * self.size)),))
        return RingRound(owner, queries, keys, tuple(self._pieces(owner, n, window)))

    def _pieces(self, owner: int, n: int, window: int | None) -> Iterator[AttentionTile]:
        """Yield tiles of this rank's queries and the keys that they see in a block of n, by pairs of
        halves.
        """
        half, last = n // 2, 2 * self.size - 1
        local_halves, owner_halves = (self.index, last - self.index), (owner, last - owner)
        for i, j in ((1, 0), (0, 0), (1, 1)):  # lower queries see no upper keys
            band = Band((local_halves[i] - owner_halves[j]) * half, window)
            if (visible := band.trim(half, half)) is not None:
                queries, keys = (
                    slice(x.start + at * half, x.stop + at * half)
                    for x, at in zip(visible, (i, j), strict=True)
                )
                yield AttentionTile(queries, keys, band.at(*visible))

    def blocks(self, local: Tensor) -> Iterator[Tensor]:
        """Yield every rank's block, or the part that this rank needs, in the order of `rounds`. The next is
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
            for message in work:
                message.wait()
            block = coming

    def _keys(self, owner: int, rank: int, n: int) -> int:
        """Return the number of keys in a block of n that a rank other than its owner needs."""
        return n // 2 if owner < rank % self.size else n

    def pass_on(self, going: Tensor, coming: Tensor) -> list[Work]:
        """Start sending to the previous rank and receiving from the next. Both tensors must live until the
        work is done.
        """
        previous, following = (self.index - 1) % self.size, (self.index + 1) % self.size
        # in one batch: NCCL would serialise them, and all ranks would wait in their sends
        return dist.batch_isend_irecv(
            [
                P2POp(dist.isend, going, group=self.group, group_peer=previous),
                P2POp(dist.irecv, coming, group=self.group, group_peer=following),
            ]
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: RingMember,
    masks: list[DropoutMask] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return this rank's rows of causal attention over the entire sequence.

    Args:
        q, k, v: [b, heads, n, d], [b, kv_heads, n, d] and [b, kv_heads, n, dv] of this rank's positions, in
            zigzag order.
        masks: dropout masks of the probabilities in every round, or None without dropout.
        sinks: [heads], as in `CausalAttention`.

    Returns:
        [b, heads, n, dv], in memory [b, n, heads, dv].
    """
    return cast(Tensor, _RingAttention.apply(q, k, v, ring, masks, sinks))


class _RingAttention(torch.autograd.Function):
    """Saves this rank's q, k, v and output, the log-sum-exp, the sinks, and the dropout masks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ring: RingMember,
        masks: list[DropoutMask] | None,
        sinks: Tensor | None,
    ) -> Tensor:
        local = _pack(k, v)
        y, lse = _forward(q, local, ring, masks)
        if sinks is not None:
            y, lse = add_sinks(y, lse, sinks)
        y = y.to(q.dtype)
        ctx.ring, ctx.scale = ring, masks[0].scale if masks else 1.0
        # saving k and v is free if they share q's storage. Otherwise save the message: v may be a view that
        # keeps a fused product of all three alive.
        ctx.saves_message = len({t.untyped_storage()._cdata for t in (q, k, v)}) > 1
        keys_and_values = (local, None) if ctx.saves_message else (k, v)
        ctx.save_for_backward(q, y, lse, sinks, *keys_and_values, *(m.mask for m in masks or ()))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, y, lse, sinks, k, v, *mask_tensors = ctx.saved_tensors
        local = k if ctx.saves_message else _pack(k, v)
        masks = [DropoutMask(mask, ctx.scale) for mask in mask_tensors] or None
        dy = rows(grads[0])
        backward = Backward(dy=dy, q=q, local=local, y=y, lse=lse, ring=ctx.ring, masks=masks)
        d_sinks = sinks_gradient(dy, y, lse, sinks) if ctx.needs_input_grad[5] else None
        return (*backward.run(), None, None, d_sinks)


def _forward(
    q: Tensor, local: Tensor, ring: RingMember, masks: list[DropoutMask] | None
) -> tuple[Tensor, Tensor]:
    b, heads, n, d = q.shape
    y = q.new_zeros(b, n, heads, local.shape[-1] - d, dtype=exact_type(q.dtype)).transpose(1, 2)
    lse = y.new_full((b, heads, n), float("-inf"))
    for step, (round_, block) in enumerate(zip(ring.rounds(n), ring.blocks(local), strict=True)):
        for piece in round_.pieces:
            at = piece.of_queries
            k, v = _unpack(block[piece.keys, piece.rows], d)
            kernel = kernel_for(q, v, ring.scores, ring.explicit, _mask(masks, step, round_, piece))
            add_block(at(y), at(lse), *kernel.forward(at(q), k, v, piece.band))
    return y, lse


def _mask(
    masks: list[DropoutMask] | None, step: int, round_: RingRound, piece: AttentionTile
) -> DropoutMask | None:
    """Return the dropout mask of a piece of a round."""
    if masks is None:
        return None
    first, queries = round_.queries.start, piece.queries
    return masks[step].at(slice(queries.start - first, queries.stop - first), piece.keys, piece.rows)


class Backward:
    """One backward. Keys and values circulate again; their gradients follow one round behind, and each rank
    adds its part.

    For this rank's keys, the square below the diagonal is computed while the first keys arrive, and the two
    triangles while the last gradients do.
    """

    def __init__(
        self,
        dy: Tensor,
        q: Tensor,
        local: Tensor,
        y: Tensor,
        lse: Tensor,
        ring: RingMember,
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
        """Return the gradients of q, k and v."""
        rounds = self.ring.rounds(self.n)
        work, coming = list[Work](), self.d_local
        for step, block in enumerate(self.ring.blocks(self.local)):
            round_ = rounds[step]
            if step == 0:
                self._within(round_, diagonal=False)
                continue
            grads = [(piece, self._add_dq(step, round_, piece, block)) for piece in round_.pieces]
            for message in work:
                message.wait()
            # in the second round no other rank has added to the block's gradient yet
            going = coming if step > 1 else self._gradient_of(round_.owner).zero_()
            for piece, parts in grads:
                self._add(going, piece, parts)
            coming = self._gradient_of(rounds[(step + 1) % len(rounds)].owner)
            work = self.ring.pass_on(going, coming)
        self._within(rounds[0], diagonal=True)
        for message in work:
            message.wait()
        self.d_local[: coming.shape[0]] += coming
        dk, dv = _unpack(self.d_local.to(self.local.dtype), self.q.shape[-1])
        return self.dq.to(self.q.dtype), dk, dv

    def _gradient_of(self, owner: int) -> Tensor:
        """Allocate the gradient of a block; only of the lower half for the first rank's block."""
        n = self.n if owner else self.n // 2
        return self.d_local.new_empty(n, *self.d_local.shape[1:])

    def _within(self, round_: RingRound, diagonal: bool) -> None:
        """Add the gradients from this rank's own keys, on the diagonal or off it."""
        for piece in round_.pieces:
            if (piece.band.shift == 0) == diagonal:
                self._add(self.d_local, piece, self._add_dq(0, round_, piece, self.local))

    def _add_dq(
        self, step: int, round_: RingRound, piece: AttentionTile, block: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add a tile's part to dq; return the gradients of its keys and values."""
        dy, q, y, lse = map(piece.of_queries, (self.dy, self.q, self.y, self.lse))
        k, v = _unpack(block[piece.keys, piece.rows], q.shape[-1])
        kernel = kernel_for(
            q, v, self.ring.scores, self.ring.explicit, _mask(self.masks, step, round_, piece)
        )
        dq, dk, dv = kernel.backward(dy=dy, q=q, k=k, v=v, y=y, lse=lse, band=piece.band)
        piece.of_queries(self.dq).add_(dq)
        return dk, dv

    def _add(self, block: Tensor, piece: AttentionTile, parts: tuple[Tensor, Tensor]) -> None:
        """Add gradients [b, kv_heads, n, ...] of a tile's keys and values to a message, in place."""
        round_ = block[piece.keys, piece.rows]
        for into, part in zip(_unpack(round_, self.q.shape[-1]), parts, strict=True):
            into += part


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Pack keys [b, kv_heads, n, d] and values [b, kv_heads, n, dv] into a message [n, b, kv_heads, d + dv],
    in which any range of positions is contiguous.
    """
    return torch.cat([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], -1)


def _unpack(block: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Return keys (of d features) and values as views [b, kv_heads, n, ...] of a message."""
    return block[..., :d].permute(1, 2, 0, 3), block[..., d:].permute(1, 2, 0, 3)
