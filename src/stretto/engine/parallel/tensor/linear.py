"""Linear layers split over tensor-parallel ranks, with gradients accumulated in place.

The weight gradient is added into `weight.grad` by one matrix product (no temporary, no second pass), while
the input gradient is being reduced over the tensor-parallel group. It can also be deferred: a stage whose
schedule splits the backward gives its layers a queue, which the W action processes. nn.Linear layers can be
converted to do the same (`adopt`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.engine.parallel.collectives import all_sum, start_sum
from stretto.engine.parallel.precision import gradient_dtype
from stretto.engine.parallel.tensor.matmul import add_weight_gradient, input_gradient, linear


def add_sum(grad: Tensor | None, dy: Tensor, dtype: torch.dtype) -> Tensor:
    """grad + the column sums of dy [n, out], in place where `grad` exists, else in `dtype`."""
    # on CPUs a sum in another type takes ten times as long; it is formed in float32 anyway, and rounded once
    total = dy.sum(0) if dy.is_cpu else dy.sum(0, dtype=dtype)
    return total.to(dtype) if grad is None else grad.add_(total)


class Products(Protocol):
    """The matrix products of a layer that replaces the plain ones; see `fp8`."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor: ...


class Deferred(Protocol):
    """A deferred weight gradient: `start` begins its communication, `finish` accumulates it."""

    def start(self) -> None: ...

    def finish(self) -> None: ...


def work_off(entries: list[Deferred]) -> None:
    """Accumulate deferred gradients in order, each started before its predecessor finishes, and each freed
    when it is done. Empties the list.
    """
    entries.reverse()
    entry = entries.pop() if entries else None
    if entry is not None:
        entry.start()
    while entry is not None:
        following = entries.pop() if entries else None
        if following is not None:
            following.start()
        entry.finish()
        entry = following


class Fused(nn.Module):
    """A layer that adds its weight gradients itself, outside autograd: at once, or later from `queue`.

    Attributes:
        queue: takes deferred gradients; None: they are accumulated at once.
        on_gradient: called with each parameter that has received a gradient.
    """

    queue: list[Deferred] | None = None
    on_gradient: Callable[[Tensor], None] | None = None

    @property
    def fused(self) -> list[nn.Parameter]:
        """Parameters whose gradients this layer accumulates itself, outside autograd."""
        raise NotImplementedError


@dataclass
class Product:
    """The deferred weight gradient of one product."""

    layer: FusedLinear
    x: Tensor
    dy: Tensor

    def start(self) -> None:
        pass

    def finish(self) -> None:
        self.layer.add_weight_gradient(self.x, self.dy)


def operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of a product in the dtype it is computed in: autocast's, else the weight's."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: FusedLinear) -> Tensor:
        ctx.layer = layer
        x, weight, bias = operands(x, weight, bias)
        y = layer.multiply(x, weight, bias)
        ctx.save_for_backward(x, weight)
        return y if layer.output_group is None else all_sum(y, layer.output_group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None]:
        dy: Tensor = grads[0]
        x, weight = ctx.saved_tensors
        layer: FusedLinear = ctx.layer
        dx, work = None, None
        needs = ctx.needs_input_grad
        if needs[0]:
            dx = layer.input_gradient(dy, weight)
            if layer.input_group is not None:
                work = start_sum(dx, layer.input_group)
        if not (needs[1] or needs[2]):
            pass
        elif layer.queue is None:
            layer.add_weight_gradient(x, dy)
        else:
            layer.queue.append(
                Product(layer, x.detach(), dy)
            )  # detached: its graph would keep everything before it alive
        if work is not None:
            work.wait()
        return dx, None, None, None


class FusedLinear(Fused):
    """A linear layer that adds its weight gradients itself.

    Attributes:
        input_group: sum the input's gradient over these ranks.
        output_group: sum the output over these ranks; the bias is then added after the sum.
        products: replaces the plain matrix products.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    input_group: ProcessGroup | None = None
    output_group: ProcessGroup | None = None
    products: Products | None = None

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x weight^T + bias."""
        return cast(Tensor, _LinearFunction.apply(x, self.weight, bias, self))

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x weight^T + bias, of factors already converted by `operands`."""
        run, kind = linear if self.products is None else self.products.forward, x.device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return run(x, weight, bias)
        return run(x, weight, bias)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """dy weight."""
        run = input_gradient if self.products is None else self.products.input_gradient
        return run(dy, weight)

    def add_weight_gradient(self, x: Tensor, dy: Tensor) -> None:
        """Accumulate this layer's weight and bias gradients. x [..., in], dy [..., out]."""
        if x.dim() != 2:
            x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        weight = self.weight
        bias = self.bias
        report = self.on_gradient
        if weight.requires_grad:
            weight.grad = add_weight_gradient(weight.grad, dy, x, gradient_dtype(weight))
            if report is not None:
                report(weight)
        if bias is not None and self.output_group is None and bias.requires_grad:
            bias.grad = add_sum(bias.grad, dy, gradient_dtype(bias))
            if report is not None:
                report(bias)

    @property
    def fused(self) -> list[nn.Parameter]:
        """Parameters whose gradients this layer accumulates itself, outside autograd."""
        parameters = [self.weight]
        return parameters if self.bias is None or self.output_group is not None else [*parameters, self.bias]


class ParallelLinear(FusedLinear):
    """A linear layer, whole or one rank's part of it.

    input_group: sum the input's gradient over these ranks (column-parallel: every rank holds some output rows
        and the input is replicated).
    output_group: sum the output over these ranks (row-parallel: every rank holds some input columns); the
        bias is added once, after the sum.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        input_group: ProcessGroup | None = None,
        output_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.input_group = input_group
        self.output_group = output_group

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], both local sizes."""
        bias = self.bias
        if self.output_group is None:
            return self.product(x, bias)
        y = self.product(x, None)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}"


class AdoptedLinear(FusedLinear, nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """An nn.Linear that can defer its weight gradient."""

    def forward(self, input: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self.product(input, self.bias)


def adopt(module: nn.Module) -> bool:
    """Convert the nn.Linear layers in `module` to AdoptedLinear in place; returns whether it did.

    Parameters, names and hooks stay; only the class changes, to a subclass of nn.Linear. Nothing is converted
    where linear layers hold less than half of the elements in weight matrices (walking the graph then defers
    more), where a part is compiled, or where a weight has gradient hooks, which would not be called.
    """
    parts = list(module.modules())
    linears = [p for p in parts if type(p) is nn.Linear or isinstance(p, FusedLinear)]
    weights = {id(p.weight): p.weight for p in linears}
    looked_up = {id(p.weight) for p in parts if isinstance(p, nn.Embedding)}
    others = [
        p for p in module.parameters() if p.dim() > 1 and id(p) not in weights and id(p) not in looked_up
    ]
    plain = [p for p in linears if type(p) is nn.Linear]
    if sum(w.numel() for w in weights.values()) <= sum(p.numel() for p in others):
        return False
    if any(_hooked(p) for layer in plain for p in layer.parameters()):
        return False
    if any(type(part).__name__ == "OptimizedModule" for part in parts):
        return False
    for layer in plain:
        layer.__class__ = AdoptedLinear
    return True


def _hooked(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
