"""Gradients that several tensor-parallel ranks share in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.parallel.collectives import start_sum
from stretto.parallel.reduction import same_place

Reduced = Callable[[nn.Parameter], tuple[Tensor, int] | None]


@dataclass(frozen=True)
class PartialGradient:
    """A slice of a parameter whose gradient other ranks share in: summed over `group` once a step."""

    parameter: nn.Parameter
    dim: int
    start: int
    size: int
    group: ProcessGroup

    def view(self, reduced: Reduced | None = None) -> Tensor:
        """The slice of the gradient; of a gradient that is split over data-parallel ranks, what lies here."""
        found = None if reduced is None else reduced(self.parameter)
        if found is None or len(found[0]) == self.parameter.numel():
            whole = self.parameter.grad if found is None else found[0].view(self.parameter.shape)
            assert whole is not None
            return whole.narrow(self.dim, self.start, self.size)
        assert self.dim == 0, "a part of a tensor that is split by rows is"
        flat, first = found
        row = self.parameter.numel() // self.parameter.shape[0]
        low = min(max(self.start * row - first, 0), len(flat))
        high = min(max((self.start + self.size) * row - first, low), len(flat))
        return flat[low:high]


def sum_partial(parts: Sequence[PartialGradient], reduced: Reduced | None = None) -> None:
    """Add up what the ranks of each group have: one all-reduce for all gradients of a group and a type.

    All ranks of a group give the same slices, in one order.

    Args:
        reduced: where the gradient of a parameter is, if it is not in `grad`.
    """
    together = dict[tuple[int, torch.dtype], tuple[ProcessGroup, list[Tensor]]]()
    for part in parts:
        view = part.view(reduced)
        if not view.numel():
            continue
        together.setdefault((id(part.group), view.dtype), (part.group, []))[1].append(view)
    started = [
        (views, flat, start_sum(flat, group)) for group, views in together.values() for flat in [_flat(views)]
    ]
    for views, flat, work in started:
        work.wait()
        if not same_place(flat, views[0]):
            for view, summed in zip(views, flat.split([v.numel() for v in views]), strict=True):
                view.copy_(summed.view_as(view))


def _flat(views: Sequence[Tensor]) -> Tensor:
    """One tensor of all; the gradient itself where it is the only one."""
    if len(views) == 1 and views[0].is_contiguous():
        return views[0].view(-1)
    return torch.cat([view.reshape(-1) for view in views])
