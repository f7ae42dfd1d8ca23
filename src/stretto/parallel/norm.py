"""RMSNorm (Zhang & Sennrich 2019) that keeps its input and one number a row for the backward.

Torch composes it of small operations on CPU, which keep the input and the normalised input, both in float32:
8 bytes an element where the input has 2.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn


class LeanRMSNorm(nn.RMSNorm):
    """torch's RMSNorm over the last dimension, but for what it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        if x.is_cuda:  # where torch's is one kernel, which keeps as little
            return super().forward(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return cast(Tensor, _RMSNorm.apply(x, self.weight, eps))


def lean_norms(model: nn.Module) -> None:
    """Let all nn.RMSNorm over one dimension in `model` keep no more than they need; in place."""
    for module in model.modules():
        if type(module) is nn.RMSNorm and len(module.normalized_shape) == 1:
            module.__class__ = LeanRMSNorm


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        exact = x.to(_exact(x))
        scale = exact.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        y = exact * scale
        return (y if weight is None else y.mul_(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, None]:
        x, scale, weight = ctx.saved_tensors
        dy = grads[0].to(_exact(x))
        normal = x * scale
        product = dy * normal
        dweight = None
        if weight is not None and ctx.needs_input_grad[1]:
            dweight = product.flatten(0, -2).sum(0).to(weight.dtype)
        if weight is not None:
            product.mul_(weight)
            dy = dy * weight
        dx = normal.mul_(product.mean(-1, keepdim=True)).neg_().add_(dy).mul_(scale)
        return dx.to(x.dtype), dweight, None
