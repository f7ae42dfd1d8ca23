"""Adafactor (Shazeer and Stern 2018): second moments of a matrix, stored as means of its rows and columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from stretto.engine.optim.base import (
    FragmentOptimizer,
    Group,
    TensorGroup,
    count,
    counted_pieces,
    member_shape,
    member_size,
    rounds,
)
from stretto.engine.optim.tensor_sums import (
    is_whole,
    member_squares,
    round_robin,
    subtract_scaled,
)
from stretto.engine.parallel.fragment import ParameterFragment

# the paper's values (section 9)
BETA2_DECAY = -0.8  # beta2 at step t is 1 - t^BETA2_DECAY
SMALLEST_SCALE = 1e-3  # epsilon 2
CLIP = 1.0  # d
SMALLEST = torch.finfo(torch.float32).eps  # root of epsilon 1, as in torch


class Adafactor(FragmentOptimizer):
    """Steps relative to the RMS of a tensor's weights, from factored second moments, without momentum.

    The rule is that of torch.optim.Adafactor: `lr` is the largest relative step and the factor of the
    decoupled decay, and epsilon 1 bounds the second moments from below. Epsilon 1 is float32's for every
    dtype: float64's would scale up gradients that are mere rounding errors, such as those of key biases. Each
    expert of a stack counts as a tensor. Each group of holders has two all-reduces per step: of row and
    column sums with the weights' squares, then of the updates' squares. The updates stay in memory in between
    (without holders, on a CPU, those of a batch).

    States: for a matrix `row_var` [..., rows] and `col_var` [..., columns], complete on every rank; for a
    vector `variance`, of the fragment's shape.
    """

    replicated: ClassVar[frozenset[str]] = frozenset({"row_var", "col_var"})

    def __init__(self, groups: list[Group], fragments: Iterable[ParameterFragment], lr: float) -> None:
        super().__init__(groups, fragments, {"lr": lr, "weight_decay": 0.0})

    def new_state(self, fragment: ParameterFragment) -> dict[str, Tensor]:
        """Return zero second moments."""
        p, shape = fragment.parameter, fragment.placed.shape
        if not _factored(fragment):
            return {"step": count(), "variance": torch.zeros_like(p)}
        rows = torch.zeros(shape[:-1], dtype=p.dtype, device=p.device)
        columns = torch.zeros((*shape[:-2], shape[-1]), dtype=p.dtype, device=p.device)
        return {"step": count(), "row_var": rows, "col_var": columns}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        """Run one update. Collective over the holders."""
        for batches in rounds(self.begin()):
            round_robin(batches, [_update(batch, self.scratch(batch)) for batch in batches])


def _update(batch: TensorGroup, updates: list[Tensor]) -> Iterator[Tensor]:
    """Run the update of a batch, yielding tensors to sum; see `round_robin`.

    Args:
        updates: memory for the updates.
    """
    sizes, sums = member_squares(batch, batch.parameters), _sums(batch, updates)
    if batch.fragments[0].holders is not None:
        parts = [*(two[0] for two in sums if two), *(two[1] for two in sums if two), sizes]
        summed = torch.cat([part.flatten() for part in parts])
        yield summed
        for part, total in zip(parts, summed.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))
    new = [float(step) ** BETA2_DECAY for step in batch.state("step")]
    vectors = [at for at, two in enumerate(sums) if not two]
    if vectors:
        gradients = [batch.gradients[at] for at in vectors]
        variances = [batch.states[at]["variance"] for at in vectors]
        squares = torch._foreach_mul(gradients, gradients)
        torch._foreach_lerp_(variances, squares, [new[at] for at in vectors])
        roots = torch._foreach_clamp_min(variances, SMALLEST**2)
        torch._foreach_rsqrt_(roots)
        torch._foreach_mul_(roots, gradients)
        torch._foreach_copy_([updates[at] for at in vectors], roots)
    for at, (two, (fragment, gradient, state)) in enumerate(zip(sums, batch, strict=True)):
        if two:
            rows, columns = member_shape(fragment)
            state["row_var"].lerp_((two[0] / columns).to(gradient.dtype), new[at])
            state["col_var"].lerp_((two[1] / rows).to(gradient.dtype), new[at])
            _divide(fragment, gradient, state["row_var"], state["col_var"], updates[at])
    lengths = member_squares(batch, updates)
    yield lengths
    lr = batch.group["lr"]
    # for each member the bound of the relative step and the number of elements
    bounds = [(min(lr, float(state["step"]) ** -0.5), member_size(f)) for f, _, state in batch]
    table = [fact for fact, total in zip(bounds, batch.members, strict=True) for _ in range(prod(total))]
    relative, elements = torch.tensor(table, dtype=torch.float64).to(sizes.device, non_blocking=True).T
    rates = (sizes / elements).sqrt_().clamp_(min=SMALLEST_SCALE).mul_(relative)
    rates /= (lengths / elements).sqrt_().div_(CLIP).clamp_(min=1.0)
    if batch.group["weight_decay"]:
        torch._foreach_mul_(batch.parameters, 1.0 - lr * batch.group["weight_decay"])
    subtract_scaled(batch, updates, rates)


def _factored(fragment: ParameterFragment) -> bool:
    return len(member_shape(fragment)) == 2


Sums = tuple[()] | tuple[Tensor, Tensor]


def _sums(batch: TensorGroup, scratch: Sequence[Tensor]) -> list[Sums]:
    """Return for each matrix the sums of the counted elements' squares: of each row, [..., rows], and column,
    [..., columns], in float64. For a vector the entry is empty.
    """
    sums = list[Sums]()
    for fragment, gradient, memory in zip(batch.fragments, batch.gradients, scratch, strict=True):
        if not _factored(fragment):
            sums.append(())
        elif is_whole(fragment):
            squares = torch.mul(gradient, gradient, out=memory)
            sums.append((squares.sum(-1, dtype=torch.float64), squares.sum(-2, dtype=torch.float64)))
        else:
            sums.append(_part_sums(fragment, gradient))
    return sums


def _part_sums(fragment: ParameterFragment, gradient: Tensor) -> tuple[Tensor, Tensor]:
    shape, device = fragment.placed.shape, gradient.device
    rows = torch.zeros(shape[:-1], dtype=torch.float64, device=device)
    columns = torch.zeros((*shape[:-2], shape[-1]), dtype=torch.float64, device=device)
    for piece in counted_pieces(fragment):
        squares = piece.of_local(gradient).square()
        *stack, row, column = (slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
        rows[(*stack, row)] += squares.sum(-1)
        columns[(*stack, column)] += squares.sum(-2)
    return rows, columns


def _divide(
    fragment: ParameterFragment, gradient: Tensor, rows: Tensor, columns: Tensor, into: Tensor
) -> None:
    """Divide the gradient by the root of the second moments, which are rows x columns / mean of rows and at
    least epsilon 1: roots are taken of each vector factor, not of a matrix.
    """
    mean = rows.mean(-1).clamp_(min=SMALLEST).unsqueeze(-1)
    left, right = (rows / mean).rsqrt_(), columns.rsqrt()
    if not is_whole(fragment):
        into.zero_()
    for piece in fragment.placed.pieces:
        *stack, row, column = (slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
        update = piece.of_local(into)
        torch.mul(left[(*stack, row)].unsqueeze(-1), right[(*stack, column)].unsqueeze(-2), out=update)
        update.clamp_(max=1.0 / SMALLEST).mul_(piece.of_local(gradient))
