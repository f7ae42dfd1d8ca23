"""Ring attention (Liu et al. 2023): keys and values circulate among the context-parallel ranks while each
rank attends to the block it currently holds.

With positions in zigzag order (sequence.py), a rank's queries, a lower and an upper half, need no mask for
the block of another rank: all queries see the lower keys of an earlier rank, and the upper queries see all
keys of a later rank. Both are half of the scores, so all ranks have equal work in every round.

Blocks travel to the previous rank, so that ranks that need only a block's lower keys receive it last: from
there on half a block is sent, a quarter less traffic than with whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from stretto.engine.parallel.context import explicit_attention
from stretto.engine.parallel.context.explicit_attention import Kept

_aten: Any = torch.ops.aten


class Kernel(Protocol):
    """Attention of one block, forward and backward; causal needs as many queries as keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """q [b, heads, n, d], k and v [b, kv_heads, m, d] to the block's own output [b, heads, n, d] and
        log-sum-exp [b, heads, n] (float32; float64 for float64).
        """
        ...

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The block's part of the gradients of q, k and v; y and lse are those of all blocks together."""
        ...


class Cpu:
    """Torch's tiled attention on CPUs: any strides, any floating type, heads grouped."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, y, lse, 0.0, causal)


class Flash:
    """FlashAttention on CUDA: 16-bit types, heads grouped."""

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
    """Memory-efficient attention on CUDA, which has float32 too, but no grouped heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        k, v = (_spread(t, q.shape[1]) for t in (k, v))
        y, lse = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
        return y, lse[..., : q.shape[2]]

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))  # the kernel's alignment
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        wide = (_spread(t, q.shape[1]) for t in (k, v))
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dy, q, *wide, None, y, lse, unused, unused, 0.0, [True, True, True, False], causal
        )
        return dq, _gather(dk, k.shape[1]), _gather(dv, k.shape[1])


@dataclass(frozen=True)
class Explicit:
    """The formula written out: any device and type, and dropout."""

    kept: Kept | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return explicit_attention.forward(q, k, v, causal, self.kept)

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return explicit_attention.backward(dy=dy, q=q, k=k, v=v, y=y, lse=lse, causal=causal, kept=self.kept)


def _spread(x: Tensor, heads: int) -> Tensor:
    """[b, kv_heads, m, d] to one key head for every query head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _gather(x: Tensor, kv_heads: int) -> Tensor:
    """Gradients of spread heads, summed over their group."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)


def kernel_for(q: Tensor, explicit: bool = False, kept: Kept | None = None) -> Kernel:
    """The fastest kernel for queries like q; with `explicit` or dropout the formula written out."""
    if explicit or kept is not None:
        return Explicit(kept)
    d = q.shape[-1]
    if q.device.type == "cpu" and q.is_floating_point():
        return Cpu()
    if q.device.type == "cuda" and d % 8 == 0:
        if q.dtype in (torch.float16, torch.bfloat16) and d <= 256:
            return Flash()
        if q.dtype == torch.float32:
            return Efficient()
    return Explicit(None)


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """In which blocks are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_block(y: Tensor, lse: Tensor, block_y: Tensor, block_lse: Tensor) -> None:
    """Take a block into the sum of others, in place: outputs [b, heads, n, d], log-sum-exps [b, heads, n]."""
    both = torch.logaddexp(lse, block_lse)
    y.mul_((lse - both).exp_().unsqueeze(-1))
    y.addcmul_(block_y.to(y.dtype), (block_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


@dataclass(frozen=True)
class Round:
    """What a rank does with the block of `owner`: attention of some of its queries to some of the keys."""

    owner: int
    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True)
class Ring:
    """Where a rank stands among those that share a sequence.

    Args:
        group: of the ranks; messages go to neighbours in it.
        explicit: attention is written out, without fused kernels.
    """

    group: ProcessGroup
    index: int
    size: int
    explicit: bool = False

    def rounds(self, n: int) -> list[Round]:
        """One for each rank's block of n keys, in the order of arrival here; the own block comes first."""
        return [self._round((self.index + step) % self.size, n) for step in range(self.size)]

    def _round(self, owner: int, n: int) -> Round:
        whole = slice(0, n)
        lower = slice(0, n // 2)
        upper = slice(n // 2, n)
        if owner == self.index:
            return Round(owner, whole, whole, causal=True)
        return Round(owner, *((whole, lower) if owner < self.index else (upper, whole)), causal=False)

    def blocks(self, local: Tensor) -> Iterator[Tensor]:
        """Every rank's block, as far as it matters here, in the order of `rounds`. While one is being used
        the next is on its way.

        Args:
            local: this rank's [n, ...], contiguous.
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
        """How many keys of a block of n matter to a rank that is not its owner."""
        return n // 2 if owner < rank % self.size else n

    def pass_on(self, going: Tensor, coming: Tensor) -> list[Work]:
        """Start sending to the rank before, and receiving from the rank behind. Both tensors must live until
        the work is done.
        """
        before, behind = (self.index - 1) % self.size, (self.index + 1) % self.size
        # In one batch: NCCL would do one after the other, and all ranks would wait with their sends.
        return dist.batch_isend_irecv(
            [
                P2POp(dist.isend, going, group=self.group, group_peer=before),
                P2POp(dist.irecv, coming, group=self.group, group_peer=behind),
            ]
        )


def attend(q: Tensor, k: Tensor, v: Tensor, ring: Ring, kept: list[Kept] | None = None) -> Tensor:
    """This rank's rows of causal attention over the whole sequence.

    Args:
        q: [b, heads, n, d], k and v [b, kv_heads, n, d]: this rank's positions in zigzag order.
        kept: for every round, what dropout keeps of its probabilities.

    Returns:
        [b, heads, n, d], in memory [b, n, heads, d].
    """
    return cast(Tensor, _RingAttention.apply(q, k, v, ring, kept))


class _RingAttention(torch.autograd.Function):
    """Kept for the backward: this rank's q, k, v and output, the log-sum-exp, and the masks of dropout."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, kept: list[Kept] | None) -> Tensor:
        local = _pack(k, v)
        y, lse = _forward(q, local, ring, kept)
        ctx.ring, ctx.scale = ring, kept[0].scale if kept else 1.0
        # Keys and values that q's memory holds anyway cost nothing to keep. Else the message does: a view of
        # the values may hold a fused product of all three.
        ctx.keys_apart = not _one_memory(q, k, v)
        held = (local,) if ctx.keys_apart else (k, v)
        ctx.save_for_backward(q, y, lse, *held, *(one.mask for one in kept or ()))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, y, lse, *rest = ctx.saved_tensors
        local = rest[0] if ctx.keys_apart else _pack(rest[0], rest[1])
        kept = [Kept(mask, ctx.scale) for mask in rest[1 if ctx.keys_apart else 2 :]] or None
        dy: Tensor = grads[0]
        if dy.stride(-1) != 1:
            dy = dy.contiguous()
        return (*Backward(dy=dy, q=q, local=local, y=y, lse=lse, ring=ctx.ring, kept=kept).run(), None, None)


def _forward(q: Tensor, local: Tensor, ring: Ring, kept: list[Kept] | None) -> tuple[Tensor, Tensor]:
    y = lse = q  # until the first round
    for step, (here, block) in enumerate(zip(ring.rounds(q.shape[2]), ring.blocks(local), strict=True)):
        rows, kernel = here.queries, kernel_for(q, ring.explicit, kept[step] if kept else None)
        part, part_lse = kernel.forward(q[:, :, rows], *_unpack(block), here.causal)
        if here.causal:
            y, lse = part.to(exact_type(q.dtype)), part_lse
        else:
            add_block(y[:, :, rows], lse[:, :, rows], part, part_lse)
    return y.to(q.dtype), lse


def _one_memory(*tensors: Tensor) -> bool:
    """Whether these are views of one tensor, as those of a fused product are."""
    return len({t.untyped_storage()._cdata for t in tensors}) == 1


class Backward:
    """One backward. Keys and values go round once more; behind them, one round later, go their gradients, to
    which each rank adds its own part.

    A rank's own block is cut in two: the part below the diagonal is computed while the first keys are on
    their way here, the triangles while the last gradients are.
    """

    def __init__(
        self,
        dy: Tensor,
        q: Tensor,
        local: Tensor,
        y: Tensor,
        lse: Tensor,
        ring: Ring,
        kept: list[Kept] | None,
    ) -> None:
        self.dy = dy
        self.q = q
        self.local = local
        self.y = y
        self.lse = lse
        self.ring, self.kept = ring, kept
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
            grads = self._part(here, step, block)
            for one in work:
                one.wait()
            # in the second round no earlier rank has seen the block
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
        """Room for the gradient of a block as far as other ranks have one: of the first rank's the lower
        half.
        """
        n = self.n if owner else self.n // 2
        return self.d_local.new_empty(n, *self.d_local.shape[1:])

    def _part(self, here: Round, step: int, block: Tensor) -> tuple[Tensor, Tensor]:
        """One round: adds to dq, returns the gradients of the round's keys and values."""
        kept = self.kept[step] if self.kept else None
        return self._backward(here.queries, block, here.causal, kept)

    def _within(self, rows: slice, keys: slice, causal: bool) -> None:
        """A part of the rank's own block."""
        kept = self.kept[0].at(rows, keys) if self.kept else None
        _add(self.d_local[keys], self._backward(rows, self.local[keys], causal, kept))

    def _backward(self, rows: slice, block: Tensor, causal: bool, kept: Kept | None) -> tuple[Tensor, Tensor]:
        dy, q, y, lse = (x[:, :, rows] for x in (self.dy, self.q, self.y, self.lse))
        kernel = kernel_for(self.q, self.ring.explicit, kept)
        k, v = _unpack(block)
        dq, dk, dv = kernel.backward(dy=dy, q=q, k=k, v=v, y=y, lse=lse, causal=causal)
        self.dq[:, :, rows] += dq
        return dk, dv


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values [b, kv_heads, n, d] as one message [n, 2, b, kv_heads, d], any run of whose positions
    is in one piece.
    """
    return torch.stack([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], 1)


def _unpack(block: Tensor) -> tuple[Tensor, Tensor]:
    """Views [b, kv_heads, n, d] of a message."""
    return block[:, 0].permute(1, 2, 0, 3), block[:, 1].permute(1, 2, 0, 3)


def _add(block: Tensor, parts: tuple[Tensor, Tensor]) -> None:
    """Add [b, kv_heads, n, d] for keys and values to a message."""
    for into, part in zip(_unpack(block), parts, strict=True):
        into += part
