"""BatchNorm (Ioffe & Szegedy 2015) with samples on several ranks: statistics of the full batch.

Each rank sends its mean, variance and number of elements; they are combined as in Chan et al. 1983, without
the cancellation of a sum of squares. torch.nn.SyncBatchNorm does the same on GPUs only.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from stretto.engine.parallel.collectives import all_sum, start_gather


class BatchNormOverRanks(nn.Module):
    """Mixin of a BatchNorm of whose batch each rank has a part. In evaluation the running statistics are
    used, which are the same on all ranks, and nothing is sent.
    """

    _group: ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this rank's samples [b, channels, ...]."""
        norm = cast(_BatchNorm, self)
        tracked = norm.running_mean is not None and norm.running_var is not None
        if not (norm.training or not tracked):
            return super().forward(x)
        cast(Any, norm)._check_input_dim(x)
        y, mean, variance = _Normalised.apply(x, norm.weight, norm.bias, norm.eps, self._group)
        if norm.training and norm.running_mean is not None and norm.running_var is not None:
            factor = norm.momentum
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
                factor = 1.0 / float(norm.num_batches_tracked) if factor is None else factor
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), factor or 0.0)
            norm.running_var.lerp_(variance.to(norm.running_var.dtype), factor or 0.0)
        return y


class _Normalised(torch.autograd.Function):
    """Returns the normalised x, and the mean and unbiased variance of the full batch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        others = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(exact, others, correction=0)
        count = exact.new_full((1,), x.numel() // x.shape[1])
        pieces, work = start_gather(torch.cat([mean, variance, count]), group)
        work.wait()
        means, variances, counts = pieces.split([len(mean), len(mean), 1], 1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        variance = ((variances + (means - mean).square()) * counts).sum(0) / total
        scale = (variance + eps).rsqrt()
        y = (exact - _channels(mean, x)) * _channels(scale, x)
        if weight is not None:
            y = y.mul_(_channels(weight, x))
        if bias is not None:
            y = y.add_(_channels(bias, x))
        ctx.save_for_backward(x, mean, scale, weight, total)
        ctx.group = group
        unbiased = variance * (total / (total - 1))
        ctx.mark_non_differentiable(mean, unbiased)
        return y.to(x.dtype), mean, unbiased

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, mean, scale, weight, total = ctx.saved_tensors
        dy = grads[0].to(mean.dtype)
        others = [dim for dim in range(x.dim()) if dim != 1]
        normal = (x - _channels(mean, x)) * _channels(scale, x)
        local_sums = torch.stack(
            [dy.sum(others), (dy * normal).sum(others)]
        )  # the gradients of bias and weight
        dx = None
        if ctx.needs_input_grad[0]:
            sums = all_sum(local_sums.clone(), ctx.group) / total
            dx = dy - _channels(sums[0], x) - normal * _channels(sums[1], x)
            dx = dx * _channels(scale if weight is None else scale * weight, x)
            dx = dx.to(x.dtype)
        dweight = local_sums[1] if ctx.needs_input_grad[1] else None
        dbias = local_sums[0] if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None


def _channels(values: Tensor, like: Tensor) -> Tensor:
    """Reshape [channels] to broadcast over an activation [b, channels, ...]."""
    return values.view(-1, *[1] * (like.dim() - 2))


@cache
def _class_over_ranks(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    return type(f"{kind.__name__}OverRanks", (BatchNormOverRanks, kind), {})


def over_ranks(norm: _BatchNorm, group: ProcessGroup) -> None:
    """Make a BatchNorm take its statistics over the samples of all ranks of the group, in place."""
    norm.__class__ = _class_over_ranks(type(norm))
    cast(BatchNormOverRanks, norm)._group = group
