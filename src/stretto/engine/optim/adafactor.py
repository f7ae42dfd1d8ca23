"""Adafactor (Shazeer and Stern 2018): second moments of a matrix, stored as means of its rows and columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from stretto.engine.optim.base import (
    FragmentOptimizer,
    Group,
    count,
    depth_of,
    member_shape,
    member_size,
    members_of,
)
from stretto.engine.optim.whole import (
    counted_pieces,
    member_squares,
    stack_slice,
    subtract_scaled,
    sum_over_holders,
)
from stretto.engine.parallel.fragment import Fragment

# The paper's values (section 9)
BETA2_DECAY = -0.8  # beta2 at step t is 1 - t^BETA2_DECAY
SMALLEST_SCALE = 1e-3  # epsilon 2
CLIP = 1.0  # d
SMALLEST = torch.finfo(torch.float32).eps  # root of epsilon 1, as in torch


class Adafactor(FragmentOptimizer):
    """Steps relative to the RMS of a tensor's weights, from factored second moments, without momentum.

    The rule is that of torch.optim.Adafactor: `lr` is the largest relative step and the factor of the
    decoupled decay, and epsilon 1 bounds the second moments from below. Epsilon 1 is float32's for every
    dtype: float64's would scale up gradients that are mere rounding, such as those of key biases. Each expert
    of a stack counts as a tensor. Two all-reduces a step for each group of holders: row and column sums with
    the weights' squares, then the updates' squares; the updates are kept in memory in between.

    States: for a matrix `row_var` [..., rows] and `col_var` [..., columns], whole on every rank; for a vector
    `variance`, of the fragment's shape.
    """

    replicated: ClassVar[frozenset[str]] = frozenset({"row_var", "col_var"})

    def __init__(self, groups: list[Group], fragments: Iterable[Fragment], lr: float) -> None:
        super().__init__(groups, fragments, {"lr": lr, "weight_decay": 0.0})

    def new_state(self, fragment: Fragment) -> dict[str, Tensor]:
        """Second moments."""
        p, shape = fragment.parameter, fragment.placed.shape
        if not _factored(fragment):
            return {"step": count(), "variance": torch.zeros_like(p)}
        rows = torch.zeros(shape[:-1], dtype=p.dtype, device=p.device)
        columns = torch.zeros((*shape[:-2], shape[-1]), dtype=p.dtype, device=p.device)
        return {"step": count(), "row_var": rows, "col_var": columns}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        """One update. Collective over the holders."""
        moving = self.begin()
        fragments = [fragment for _, fragment, _, _ in moving]
        sizes = member_squares(fragments, [f.parameter for f in fragments])
        sums = [_sums(f, gradient) if _factored(f) else () for _, f, gradient, _ in moving]
        sum_over_holders(
            (fragment, tensor)
            for fragment, size, two in zip(fragments, sizes, sums, strict=True)
            for tensor in (size, *two)
        )
        updates = list[Tensor]()
        for (_, fragment, gradient, state), two in zip(moving, sums, strict=True):
            new = float(state["step"]) ** BETA2_DECAY
            if two:
                rows, columns = member_shape(fragment)
                state["row_var"].lerp_((two[0] / columns).to(gradient.dtype), new)
                state["col_var"].lerp_((two[1] / rows).to(gradient.dtype), new)
                updates.append(_factored_update(fragment, gradient, state["row_var"], state["col_var"]))
            else:
                variance = state["variance"].lerp_(gradient.square(), new)
                updates.append(_scaled(variance.clone(), gradient))
        lengths = member_squares(fragments, updates)
        sum_over_holders(zip(fragments, lengths, strict=True))
        for (group, fragment, _, state), update, size, length in zip(
            moving, updates, sizes, lengths, strict=True
        ):
            lr, elements = group["lr"], member_size(fragment)
            relative = min(lr, float(state["step"]) ** -0.5)
            rate = (size / elements).sqrt_().clamp_(min=SMALLEST_SCALE) * relative
            rate /= (length / elements).sqrt_().div_(CLIP).clamp_(min=1.0)
            if group["weight_decay"]:
                fragment.parameter.mul_(1.0 - lr * group["weight_decay"])
            subtract_scaled(fragment, update, rate)


def _factored(fragment: Fragment) -> bool:
    return len(member_shape(fragment)) == 2


def _sums(fragment: Fragment, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the counted elements' squares: of each row, [..., rows], and column, [..., columns];
    float64.
    """
    shape, device = fragment.placed.shape, gradient.device
    rows = torch.zeros(shape[:-1], dtype=torch.float64, device=device)
    columns = torch.zeros((*shape[:-2], shape[-1]), dtype=torch.float64, device=device)
    for piece in counted_pieces(fragment):
        squares = piece.of_local(gradient).square()
        *stack, row, column = (slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
        rows[(*stack, row)] += squares.sum(-1)
        columns[(*stack, column)] += squares.sum(-2)
    return rows, columns


def _factored_update(fragment: Fragment, gradient: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The gradient divided by the root of the second moments, which are rows x columns / mean of rows."""
    mean = rows.mean(-1).clamp_(min=SMALLEST).view(*members_of(fragment), 1)
    update, depth = torch.zeros_like(gradient), depth_of(fragment)
    for piece in fragment.placed.pieces:
        *stack, row, column = (slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
        left = rows[(*stack, row)] / mean[stack_slice(piece, depth)]
        second = left.unsqueeze(-1) * columns[(*stack, column)].unsqueeze(-2)
        piece.of_local(update).copy_(_scaled(second, piece.of_local(gradient)))
    return update


def _scaled(second: Tensor, gradient: Tensor) -> Tensor:
    """gradient / sqrt(second), in the memory of `second`."""
    return second.clamp_(min=SMALLEST**2).rsqrt_().mul_(gradient)
