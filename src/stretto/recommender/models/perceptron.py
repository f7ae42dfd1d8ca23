"""Linear layers, with ReLU or without, with as few passes over memory as the device allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.engine.parallel.tensor.matmul import add_weight_gradient, input_gradient, linear_rectified
from stretto.engine.parallel.tensor.matmul import linear as product

_NARROW = 64  # inputs up to which the weight's gradient is formed on its side


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rectified: bool) -> Tensor:
        y = (linear_rectified if rectified else product)(x, weight, bias)
        ctx.rectified, ctx.biased = rectified, bias is not None
        ctx.save_for_backward(x, weight, *([y] if rectified else []))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        dy: Tensor = grads[0]
        x, weight, *rest = ctx.saved_tensors
        if ctx.rectified:
            dy = torch.ops.aten.threshold_backward(dy, rest[0], 0)
        needs = ctx.needs_input_grad
        dx = input_gradient(dy, weight) if needs[0] else None
        dw = _weight_gradient(dy, x) if needs[1] else None
        return dx, dw, dy.sum(0) if ctx.biased and needs[2] else None, None


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x; of few inputs as its transpose, where the libraries are three times as fast."""
    if x.shape[1] <= _NARROW < dy.shape[1]:
        return product(x.t(), dy.t(), None).t().contiguous()
    return add_weight_gradient(None, dy, x, dy.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias; x [b, in], weight [out, in]."""
    return _call(x, weight, bias, False)


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """max(0, x weight^T + bias); keeps its output for the backward, and nothing else of its own."""
    return _call(x, weight, bias, True)


def _call(x: Tensor, weight: Tensor, bias: Tensor | None, rectified: bool) -> Tensor:
    found: Any = _Linear.apply(x, weight, bias, rectified)
    return found
