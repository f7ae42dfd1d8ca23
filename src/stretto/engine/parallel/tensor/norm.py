"""RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016) that keep their input and a number or two of
each row for the backward, also where weights stay in float32 beside inputs in 16 bits.

Torch composes RMSNorm of small operations on CPU, which keep the input and the normalised input, both in
float32: 8 bytes an element where the input has 2. Its LayerNorm adds weight gradients up in 16 bits there,
which loses percents over a thousand rows. On CUDA its kernels want weights in the input's type.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from stretto.engine.parallel.precision import HALVES


class LeanRMSNorm(nn.RMSNorm):
    """torch's RMSNorm over the last dimension, but for what it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden], in the input's type."""
        if x.is_cuda and not _mixed(x, self.weight):  # where torch's is one kernel, which keeps as little
            return super().forward(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return cast(Tensor, _RMSNorm.apply(x, self.weight, eps))


class LeanLayerNorm(nn.LayerNorm):
    """torch's LayerNorm over the last dimension, but where inputs on CPUs have 16 bits, or weights more."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden], in the input's type."""
        short = input.is_cpu and input.dtype in HALVES
        if short or _mixed(input, cast("Tensor | None", self.weight)):
            return cast(Tensor, _LayerNorm.apply(input, self.weight, self.bias, self.eps))
        return super().forward(input)


def lean_norms(model: nn.Module) -> None:
    """Let all norms over one dimension in `model` keep no more than they need; in place."""
    for module in model.modules():
        if type(module) is nn.RMSNorm and len(module.normalized_shape) == 1:
            module.__class__ = LeanRMSNorm
        if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
            module.__class__ = LeanLayerNorm


def _mixed(x: Tensor, weight: Tensor | None) -> bool:
    return weight is not None and weight.dtype != x.dtype


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _times(x: Tensor, factor: Tensor, original: Tensor) -> Tensor:
    """x * factor, in place where x is a copy of what was given."""
    return x * factor if x is original else x.mul_(factor)


# Gradients of weights are handed back as they are computed: autograd turns them into `parameter.grad_dtype`.


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        exact = x.to(_exact(x))
        scale = exact.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        y = _times(exact, scale, x)
        return (y if weight is None else y.mul_(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, None]:
        x, scale, weight = ctx.saved_tensors
        dy = grads[0].to(_exact(x))
        normal = x * scale
        product = dy * normal
        dweight = None
        if weight is not None and ctx.needs_input_grad[1]:
            dweight = product.flatten(0, -2).sum(0)
        if weight is not None:
            product.mul_(weight)
            dy = _times(dy, weight, grads[0])
        dx = normal.mul_(product.mean(-1, keepdim=True)).neg_().add_(dy).mul_(scale)
        return dx.to(x.dtype), dweight, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        if x.is_cpu:  # a kernel that takes mixed types
            scales, shifts = (None if t is None else t.to(_exact(x)) for t in (weight, bias))
            y, mean, scale = torch.native_layer_norm(x, x.shape[-1:], scales, shifts, eps)
        else:
            variance, mean = torch.var_mean(x.to(_exact(x)), -1, correction=0, keepdim=True)
            scale = variance.add_(eps).rsqrt_()
            y = (x - mean).mul_(scale)
            y = y if weight is None else y.mul_(weight)
            y = (y if bias is None else y.add_(bias)).to(x.dtype)
        ctx.save_for_backward(x, mean, scale, weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, mean, scale, weight = ctx.saved_tensors
        dy = grads[0].to(_exact(x))
        normal = (x - mean).mul_(scale)
        product = dy * normal
        dweight = dbias = None
        if ctx.needs_input_grad[1]:
            dweight = product.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[2]:
            dbias = dy.flatten(0, -2).sum(0)
        if weight is not None:
            product.mul_(weight)
            dy = _times(dy, weight, grads[0])
        dx = normal.mul_(product.mean(-1, keepdim=True)).neg_().add_(dy)
        return dx.sub_(dy.mean(-1, keepdim=True)).mul_(scale).to(x.dtype), dweight, dbias, None
