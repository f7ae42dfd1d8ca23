"""RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016) that save only their input and one or two
numbers per row, also with float32 weights and 16-bit inputs.

On CPUs, torch composes RMSNorm of small operations, which save the input and the normalised input, both in
float32: 8 bytes per element for an input of 2. Its LayerNorm accumulates weight gradients in 16 bits there,
with an error of several percent over a thousand rows. On CUDA its kernels require weights in the input's
dtype.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from stretto.engine.device import has_cuda_kernels
from stretto.engine.parallel.precision import HALVES


class MemoryEfficientRMSNorm(nn.RMSNorm):
    """nn.RMSNorm over the last dimension, which saves less for the backward."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., hidden], in the input's type."""
        if has_cuda_kernels(x.device) and not _mixed(x, self.weight):  # one kernel, which saves as little
            return super().forward(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return cast(Tensor, _RMSNorm.apply(x, self.weight, eps))


class MemoryEfficientLayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last dimension, with exact weight gradients of 16-bit inputs on CPUs, and weights
    that may be wider than the input.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [..., hidden], in the input's type."""
        short = input.is_cpu and input.dtype in HALVES
        if short or _mixed(input, cast("Tensor | None", self.weight)):
            return cast(Tensor, _LayerNorm.apply(input, self.weight, self.bias, self.eps))
        return super().forward(input)


def use_memory_efficient_norms(model: nn.Module) -> None:
    """Convert all norms over one dimension in `model` to memory-efficient ones, in place."""
    for module in model.modules():
        if type(module) is nn.RMSNorm and len(module.normalized_shape) == 1:
            module.__class__ = MemoryEfficientRMSNorm
        if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
            module.__class__ = MemoryEfficientLayerNorm


def _mixed(x: Tensor, weight: Tensor | None) -> bool:
    return weight is not None and weight.dtype != x.dtype


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _times(x: Tensor, factor: Tensor, original: Tensor) -> Tensor:
    """Return x * factor, in place unless x is the caller's tensor `original`."""
    return x * factor if x is original else x.mul_(factor)


# Weight gradients are returned in the dtype they are computed in: autograd converts to
# `parameter.grad_dtype`.


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
        if x.is_cpu:  # its kernel accepts mixed types
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
