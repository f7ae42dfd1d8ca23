"""Grouped matrix products, such as those of many experts, with gradients accumulated in place.

Rows are sorted by group, and every group has its matrix. Torch has one call for all groups; if it does not
apply (float64, rows that are not multiples of 16 bytes) or is slower (products so large that oneDNN beats
MKL, see `engine.parallel.tensor.matmul`), each group with rows is a separate product.
`benchmarks/experts.py` measures both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.engine.device import compute_capability, moved, on_accelerator
from stretto.engine.parallel.precision import HALVES, gradient_dtype
from stretto.engine.parallel.tensor import matmul
from stretto.engine.parallel.tensor.linear import AccumulatesOwnGradients, add_sum

ALIGNED = 16  # required alignment of rows, bytes


@dataclass(frozen=True)
class Groups:
    """The groups of sorted rows: `counts[i]` rows of group i, known on the host."""

    counts: tuple[int, ...]
    device: torch.device

    @property
    def rows(self) -> int:
        """Number of rows of all groups."""
        return sum(self.counts)

    @cached_property
    def ends(self) -> Tensor:
        """The end of each group, int32, on the rows' device."""
        return moved(torch.tensor(list(accumulate(self.counts)), dtype=torch.int32), self.device)

    @cached_property
    def numbers(self) -> Tensor:
        """The group of each row, int64, on the rows' device."""
        each = torch.arange(len(self.counts), device=self.device)
        return each.repeat_interleave(moved(torch.tensor(self.counts), self.device), output_size=self.rows)

    def filled(self) -> Iterator[tuple[int, int, int]]:
        """Yield (group, first row, row after the last) for every group that has rows."""
        start = 0
        for group, count in enumerate(self.counts):
            if count:
                yield group, start, start + count
            start += count


@cache
def _has_kernel(device: torch.device) -> bool:
    """True if a CUDA device has torch's grouped kernel; otherwise torch loops and synchronises with the
    device.
    """
    return compute_capability(device) >= (8, 0)


def in_one_call(x: Tensor, groups: int, out: int, into: int) -> bool:
    """True if one call of torch computes the products of x's rows with matrices [groups, out, into]."""
    step = ALIGNED // x.element_size()
    if out % step or into % step:
        return False
    if on_accelerator(x.device):
        return x.dtype is torch.bfloat16 and _has_kernel(x.device)
    large = matmul.ONEDNN and len(x) * out * into >= groups * matmul.SMALL
    return x.dtype in HALVES or (x.dtype is torch.float32 and not large)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    """Return x weight[g]^T + bias[g] for the rows of every group g. Not differentiable.

    Args:
        x: rows [n, in], sorted by group.
        weight, bias: [groups, out, in] and [groups, out].
    """
    if in_one_call(x, *weight.shape):
        y = functional.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)
        return y if bias is None else y.add_(bias[groups.numbers])
    return _stack(
        [matmul.linear(x[a:b], weight[g], None if bias is None else bias[g]) for g, a, b in groups.filled()],
        x.new_empty(0, weight.shape[1]),
    )


def grouped_input_gradient(dy: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Return dy weight[g] for the rows of every group g; dy is [n, out]."""
    if in_one_call(dy, *weight.shape):
        return functional.grouped_mm(dy, weight, offs=groups.ends)
    return _stack(
        [matmul.input_gradient(dy[a:b], weight[g]) for g, a, b in groups.filled()],
        dy.new_empty(0, weight.shape[2]),
    )


def add_grouped_weight_gradient(grad: Tensor, dy: Tensor, x: Tensor, groups: Groups) -> None:
    """Add dy^T x of every group's rows to grad [groups, out, in], in place; groups without rows do not
    change.
    """
    if on_accelerator(x.device) and in_one_call(x, *grad.shape):
        products = functional.grouped_mm(dy.t(), x, offs=groups.ends)
        for group, count in enumerate(groups.counts):
            if not count:  # the kernel leaves these undefined
                products[group].zero_()
        grad.add_(products)
        return
    for g, a, b in groups.filled():
        matmul.add_weight_gradient(grad[g], dy[a:b], x[a:b], grad.dtype)


def _stack(parts: Sequence[Tensor], none: Tensor) -> Tensor:
    if not parts:
        return none
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One product of a layer: names of its parameters, groups of rows, and whether it adds the bias."""

    layer: GroupedLayer
    weight: str
    bias: str | None
    groups: Groups
    biased: bool

    def parameter(self, name: str) -> nn.Parameter:
        return cast(nn.Parameter, getattr(self.layer, name))


@dataclass
class _Product:
    """The deferred weight gradient of one product."""

    call: _Call
    x: Tensor | None  # None if the weight is frozen and the bias is not
    dy: Tensor

    def start(self) -> None:
        pass

    def finish(self) -> None:
        self.call.layer.add_weight_gradient(self.call, self.x, self.dy)


class _GroupedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        ctx.call = call
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        added = bias.to(dtype) if bias is not None and call.biased else None
        with torch.autocast(kind, enabled=False):
            return grouped_linear(x, weight, added, call.groups)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None]:
        dy: Tensor = grads[0].contiguous()
        x, weight = ctx.saved_tensors
        call: _Call = ctx.call
        needs = ctx.needs_input_grad
        dx = grouped_input_gradient(dy, weight, call.groups) if needs[0] else None
        if not (needs[1] or needs[2]):
            pass
        elif call.layer.queue is None:
            call.layer.add_weight_gradient(call, x, dy)
        else:
            call.layer.queue.append(_Product(call, None if x is None else x.detach(), dy))
        return dx, None, None, None


class GroupedLayer(AccumulatesOwnGradients):
    """A layer of stacked matrices that accumulates their gradients itself. No child has parameters."""

    def product(
        self, x: Tensor, weight: str, bias: str | None, groups: Groups, *, biased: bool = True
    ) -> Tensor:
        """Return x weight[g]^T + bias[g] for the rows of every group g, [n, in] to [n, out].

        Args:
            weight, bias: names of parameters [groups, out, in] and [groups, out].
            biased: False if another rank, whose output is summed with this rank's, adds the bias; its
                gradient, which is the same on both, is still computed.
        """
        call = _Call(layer=self, weight=weight, bias=bias, groups=groups, biased=biased)
        shift = None if bias is None else call.parameter(bias)
        return cast(Tensor, _GroupedFunction.apply(x, call.parameter(weight), shift, call))

    def add_weight_gradient(self, call: _Call, x: Tensor | None, dy: Tensor) -> None:
        """Accumulate a product's weight and bias gradients. `on_gradient` is called even without rows, since
        gradient buckets count the calls.
        """
        weight = call.parameter(call.weight)
        if x is not None and weight.requires_grad:
            add_grouped_weight_gradient(_gradient(weight), dy, x, call.groups)
            self._report(weight)
        bias = None if call.bias is None else call.parameter(call.bias)
        if bias is not None and bias.requires_grad:
            grad = _gradient(bias)
            for g, a, b in call.groups.filled():
                add_sum(grad[g], dy[a:b], grad.dtype)
            self._report(bias)

    def _report(self, parameter: nn.Parameter) -> None:
        if self.on_gradient is not None:
            self.on_gradient(parameter)

    @property
    def fused(self) -> list[nn.Parameter]:
        """Parameters whose gradients this layer accumulates itself, outside autograd."""
        return list(self.parameters(recurse=False))


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    return parameter.grad
