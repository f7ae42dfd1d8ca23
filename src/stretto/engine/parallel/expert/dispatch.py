"""Send tokens to the ranks that hold their experts, and return the results.

A token has `top_k` copies, one for each expert that it is routed to. Copies are sorted by expert, which makes
those for one rank contiguous; they are sent to the expert-parallel rank that holds the expert, and from there
to all ranks that hold a slice of it (expert tensor parallelism). The counts are uneven, so one all-gather
first distributes the number of copies that each rank has for each expert. Only then does the host wait for
the device.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.device import moved
from stretto.engine.parallel.collectives import exchange, gather, gather_uneven, scatter_uneven
from stretto.engine.parallel.expert.grouped import Groups

if TYPE_CHECKING:
    from stretto.engine.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """The ranks that together hold the experts of a layer.

    Attributes:
        ep, ep_index, ep_group: ranks that hold different experts.
        tp, tp_index, tp_group: ranks that hold slices of the same experts.
        both: all of these ranks, ordered with tp fastest if `tp_fastest`, else with ep fastest.
    """

    ep: int = 1
    ep_index: int = 0
    ep_group: ProcessGroup | None = None
    tp: int = 1
    tp_index: int = 0
    tp_group: ProcessGroup | None = None
    both: ProcessGroup | None = None
    tp_fastest: bool = True

    @classmethod
    def of(cls, mesh: Mesh) -> ExpertRanks:
        """Return the ranks that hold the experts together with this rank."""
        return cls(
            ep=mesh.size("ep"),
            ep_index=mesh.index("ep"),
            ep_group=mesh.group("ep"),
            tp=mesh.size("expert_tp"),
            tp_index=mesh.index("expert_tp"),
            tp_group=mesh.group("expert_tp"),
            both=mesh.group("expert_tp-ep"),
            tp_fastest=mesh.layout.order.index("tp") < mesh.layout.order.index("ep"),
        )


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """The routes of one microbatch's copies to the experts and back; both directions are differentiable.

    Attributes:
        copies: number of copies of all tokens, including dropped ones.
        order: indices of the copies that are not dropped, sorted by expert; int64.
        send, receive: number of copies sent to, and received from, each expert-parallel rank.
        arrived: number of copies that each expert-tensor-parallel rank received.
        by_expert: order that sorts the arrived copies by expert, [sum(arrived)], int64, or None if they are
            already sorted.
        groups: groups of the sorted rows, one for every local expert.
    """

    copies: int
    top_k: int
    order: Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    arrived: tuple[int, ...]
    by_expert: Tensor | None
    groups: Groups
    ranks: ExpertRanks

    @property
    def dropped(self) -> int:
        """Number of this rank's copies that are not sent."""
        return self.copies - len(self.order)

    def to_experts(self, x: Tensor) -> Tensor:
        """Send tokens [n, hidden] and return this rank's rows [groups.rows, hidden], sorted by expert."""
        rows = cast(Tensor, _Copy.apply(x, self.order, self.top_k))
        rows = exchange(rows, self.send, self.receive, self.ranks.ep_group)
        rows = gather_uneven(rows, self.arrived, self.ranks.tp_group)
        return rows if self.by_expert is None else cast(Tensor, _Permute.apply(rows, self.by_expert))

    def from_experts(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the experts' outputs as the weighted sum of each token's copies [n, hidden].

        Args:
            rows: outputs [groups.rows, hidden], partial sums if experts are split.
            weights: weights of the copies, [n, top_k].
        """
        if self.by_expert is not None:
            rows = cast(Tensor, _Place.apply(rows, self.by_expert, len(rows)))
        rows = scatter_uneven(rows, self.arrived, self.ranks.tp_group)
        rows = exchange(rows, self.receive, self.send, self.ranks.ep_group)
        copies = cast(Tensor, _Place.apply(rows, self.order, self.copies))
        return mix(copies.view(-1, self.top_k, rows.shape[-1]), weights)


def mix(copies: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums [n, hidden] of copies [n, top_k, hidden] with weights [n, top_k]."""
    return cast(Tensor, _Mix.apply(copies, weights))


@torch.no_grad()
def plan(choices: Tensor, kept_choices: Tensor | None, experts: int, ranks: ExpertRanks) -> Dispatch:
    """Return the routes of this rank's copies. Collective over the ranks that hold the experts.

    Args:
        choices: experts of each token, [n, top_k], int64.
        kept_choices: bool [n, top_k], False for dropped choices, or None if none is dropped.
        experts: number of experts of the layer, on all ranks.
    """
    flat = choices.flatten()
    if kept_choices is not None:
        flat = flat.masked_fill(~kept_choices.flatten(), experts)  # sorts dropped copies to the end
    counts = flat.new_zeros(experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:experts]
    table = _table(counts, flat.numel(), ranks)
    local_experts = experts // ranks.ep
    local_slice = slice(ranks.ep_index * local_experts, (ranks.ep_index + 1) * local_experts)
    counts_here = table[ranks.ep_index][ranks.tp_index]
    send = tuple(sum(counts_here[i * local_experts : (i + 1) * local_experts]) for i in range(ranks.ep))
    receive = tuple(sum(row[ranks.tp_index][local_slice]) for row in table)
    arrived = tuple(sum(sum(row[i][local_slice]) for row in table) for i in range(ranks.tp))
    chunks = [row[i][local_slice] for i in range(ranks.tp) for row in table]  # in the order of arrival
    return Dispatch(
        copies=flat.numel(),
        top_k=choices.shape[-1],
        order=flat.argsort(stable=True)[: sum(send)],
        send=send,
        receive=receive,
        arrived=arrived,
        by_expert=_sorting(chunks, flat.device),
        groups=Groups(tuple(map(sum, zip(*chunks, strict=True))), flat.device),
        ranks=ranks,
    )


_even = list[bool]()  # not empty while tensors have no values (dry runs)


@contextmanager
def even_routing() -> Generator[None]:
    """Within this context every expert counts as chosen equally often: for tensors without values."""
    _even.append(True)
    try:
        yield
    finally:
        _even.pop()


def _table(counts: Tensor, copies: int, ranks: ExpertRanks) -> list[list[list[int]]]:
    """Gather the number of copies that rank (ep, tp) has for each expert: [ep][tp][experts].

    Args:
        counts: this rank's copies for each expert, [experts].
        copies: number of this rank's copies, one for each choice.
    """
    every = gather(counts.unsqueeze(0), ranks.both, 0)
    if _even:
        each, remainder = divmod(copies, len(counts))
        row = [each + (expert < remainder) for expert in range(len(counts))]
        return [[row] * ranks.tp] * ranks.ep
    if ranks.tp_fastest:
        table = every.view(ranks.ep, ranks.tp, -1)
    else:
        table = every.view(ranks.tp, ranks.ep, -1).transpose(0, 1)
    return cast(list[list[list[int]]], table.tolist())


def _sorting(chunks: Sequence[Sequence[int]], device: torch.device) -> Tensor | None:
    """Return the order that sorts rows by expert, or None if they are sorted.

    Args:
        chunks: rows of each local expert in each chunk, [chunks][local experts]; chunks are sorted by expert.
    """
    if len(chunks) == 1 or len(chunks[0]) == 1:
        return None
    sizes = torch.tensor(chunks)
    expert = moved(torch.arange(sizes.shape[1]).expand_as(sizes).flatten(), device)
    rows = sum(map(sum, chunks))
    return expert.repeat_interleave(moved(sizes.flatten(), device), output_size=rows).argsort(stable=True)


class _Mix(torch.autograd.Function):
    """A batched product whose backward is faster than torch's, which works token by token on CPUs."""

    @staticmethod
    def forward(ctx: Any, copies: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(copies, weights)
        return torch.bmm(weights.to(copies.dtype).unsqueeze(1), copies).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None]:
        copies, weights = ctx.saved_tensors
        dy = grads[0].unsqueeze(1)
        dcopies = dy * weights.to(dy.dtype).unsqueeze(-1) if ctx.needs_input_grad[0] else None
        dweights = (copies * dy).sum(-1, dtype=weights.dtype) if ctx.needs_input_grad[1] else None
        return dcopies, dweights


class _Copy(torch.autograd.Function):
    """Selects the rows of some copies of tokens. The gradients of a token's copies are summed in the order of
    its choices, so the sum is bitwise reproducible.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = (len(x), top_k, x.shape[1])
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        n, top_k, hidden = ctx.shape
        return _placed(grads[0], order, n * top_k).view(n, top_k, hidden).sum(1), None, None


class _Permute(torch.autograd.Function):
    """rows[order] for a permutation."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return _placed(grads[0], order, len(order)), None


class _Place(torch.autograd.Function):
    """Puts row i at index order[i] of `size` rows, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(order)
        return _placed(rows, order, size)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order), None, None


def _placed(rows: Tensor, order: Tensor, size: int) -> Tensor:
    full = rows.new_empty if len(order) == size else rows.new_zeros
    return full(size, rows.shape[1]).index_copy_(0, order, rows)
