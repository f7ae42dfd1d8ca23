"""Collectives and the conjugate pairs of autograd operators around a tensor-parallel region.

`copy_to` (identity forward, all-reduce backward) and `reduce_from` (all-reduce forward, identity backward)
are the f and g of Shoeybi et al. 2019, section 3.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceOp, Work

_SUM = AllreduceOptions()
_SUM.reduceOp = ReduceOp.SUM  # pyright: ignore[reportAttributeAccessIssue]
_MAX = AllreduceOptions()
_MAX.reduceOp = ReduceOp.MAX  # pyright: ignore[reportAttributeAccessIssue]


def start_sum(tensor: Tensor, group: ProcessGroup) -> Work:
    """Start an in-place sum over the group.

    The process group is called directly: torch's wrapper costs as much as a small message.
    """
    return group.allreduce([tensor], _SUM)


def all_sum(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over the group, in place; without a group the tensor as it is."""
    if group is not None:
        start_sum(tensor, group).wait()
    return tensor


def all_max(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Largest over the group, in place."""
    if group is not None:
        group.allreduce([tensor], _MAX).wait()
    return tensor


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return all_sum(grads[0].contiguous().clone(), ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_sum(x.contiguous().clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


def copy_to(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """f: enter a tensor-parallel region with a replicated tensor."""
    return x if group is None else cast(Tensor, _CopyTo.apply(x, group))


def reduce_from(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """g: leave a tensor-parallel region by summing partial results."""
    return x if group is None else cast(Tensor, _ReduceFrom.apply(x, group))
