"""Linear layers between a part of the model that is split along the sequence and one that is split by
features (Korthikanti et al. 2022, section 4.2.2).

Of the gathered input only this rank's shard is kept; the backward gathers it again while it computes the
input gradient, and reduces that while it computes the weight gradient.

Ranks gather and scatter pieces, [t, b, s/t, ...], and a linear layer treats every token alike: so the product
is computed in the order of the pieces. Where true token order is required, the narrower side of the product
is reordered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.engine.parallel.collectives import (
    Pending,
    cut,
    join,
    start_gather,
    start_regather,
    start_scatter_sum,
)
from stretto.engine.parallel.tensor.linear import ParallelLinear, Product, operands


class SequenceLinear(ParallelLinear):
    """A split linear layer whose input or output is split along the sequence, dimension 1.

    Attributes:
        group: the tensor-parallel ranks.
        ordered: whether the side with all tokens has them as samples [b, s, ...]; else as the ranks' pieces,
            one after the other, [t b, s/t, ...], which saves copies where b > 1. Layers between two such
            layers must then treat each token independently.
    """

    group: ProcessGroup
    ordered: bool

    @property
    def narrow_output(self) -> bool:
        """Whether it is cheaper to put outputs in order, twice (y, dy), than inputs, three times (x, dx, and
        x for the weight gradient).
        """
        rows, columns = self.weight.shape
        return 2 * rows < 3 * columns


def _pieces(x: Tensor, t: int) -> Tensor:
    """[t b, s/t, ...] as [t, b, s/t, ...]."""
    return x.unflatten(0, (t, -1))


# ---------------------------------------------------------------------- split by output features


class GatherLinear(SequenceLinear):
    """x [b, s/t, in] of every rank to its features of all tokens, [b, s, out/t] or [t b, s/t, out/t]."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: ProcessGroup, ordered: bool = True
    ) -> None:
        super().__init__(weight, bias, input_group=group)
        self.group, self.ordered = group, ordered

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s/t, in]."""
        return cast(Tensor, _Gathered.apply(x, self.weight, self.bias, self))

    def arranged(self, pieces: Tensor) -> Tensor:
        """Gathered input [t, b, s/t, in] in the order in which the product is taken."""
        return join(pieces, 1) if self.ordered and not self.narrow_output else pieces


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: GatherLinear) -> Tensor:
        x, weight, bias = operands(x, weight, bias)
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        pieces, work = start_gather(x, layer.group)
        work.wait()
        y = layer.multiply(layer.arranged(pieces), weight, bias)
        if not layer.ordered:
            return y.flatten(0, 1)
        return join(y, 1) if layer.narrow_output else y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        layer: GatherLinear = ctx.layer
        t, needs = layer.group.size(), ctx.needs_input_grad
        rest = _GatheredProduct(layer, x.detach(), grads[0]) if needs[1] or needs[2] else None
        if rest is not None and layer.queue is None:
            rest.start()
        dy: Tensor = grads[0]
        if not layer.ordered:
            dy = _pieces(dy, t)
        elif layer.narrow_output:
            dy = cut(dy, t, 1)
        dx, work = None, None
        if needs[0]:
            product = layer.input_gradient(dy, weight)
            dx, work = start_scatter_sum(product if product.dim() > 3 else cut(product, t, 1), layer.group)
        if rest is not None:
            rest.dy = dy
            if layer.queue is None:
                rest.finish()
            else:
                layer.queue.append(rest)
        if work is not None:
            work.wait()
        return dx, None, None, None


@dataclass
class _GatheredProduct:
    """The weight gradient of a product whose input is to be gathered again; a frozen weight needs none."""

    layer: GatherLinear
    x: Tensor
    dy: Tensor
    again: tuple[Tensor, Pending] | None = None

    def start(self) -> None:
        if self.layer.weight.requires_grad:
            self.again = start_regather(self.x, self.layer.group)

    def finish(self) -> None:
        x = self.x
        if self.again is not None:
            pieces, work = self.again
            work.wait()
            x = self.layer.arranged(pieces)
        self.layer.add_weight_gradient(x, self.dy)


# ---------------------------------------------------------------------- split by input features


class ScatterLinear(SequenceLinear):
    """x [b, s, in/t] or [t b, s/t, in/t] to this rank's tokens of the sum over the ranks, [b, s/t, out].

    The bias is added after the sum; its gradient is of this rank's tokens alone.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: ProcessGroup, ordered: bool = True
    ) -> None:
        super().__init__(weight, bias, output_group=group)
        self.group, self.ordered = group, ordered

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, in/t], or [t b, s/t, in/t] where not ordered."""
        y = cast(Tensor, _Scattered.apply(x, self.weight, self))
        return y if self.bias is None else y + self.bias

    def add_weight_gradient(self, x: Tensor, dy: Tensor) -> None:
        """Accumulate the weight's gradient. x as in `forward`, dy of all tokens in the product's order."""
        super().add_weight_gradient(self.arranged(x), dy)

    def arranged(self, x: Tensor) -> Tensor:
        """The input in the order in which the product is taken."""
        t = self.group.size()
        if not self.ordered:
            return _pieces(x, t)
        return x if self.narrow_output else cut(x, t, 1)


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: ScatterLinear) -> Tensor:
        x, weight, _ = operands(x, weight, None)
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        product = layer.multiply(layer.arranged(x), weight, None)
        y, work = start_scatter_sum(
            product if product.dim() > 3 else cut(product, layer.group.size(), 1), layer.group
        )
        work.wait()
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        layer: ScatterLinear = ctx.layer
        dy, work = start_gather(grads[0], layer.group)
        work.wait()
        if layer.ordered and layer.narrow_output:
            dy = join(dy, 1)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = layer.input_gradient(dy, weight)
            if dx.dim() > 3:
                dx = join(dx, 1) if layer.ordered else dx.flatten(0, 1)
        if ctx.needs_input_grad[1]:
            rest = Product(layer, x.detach(), dy)
            if layer.queue is None:
                rest.finish()
            else:
                layer.queue.append(rest)
        return dx, None, None
