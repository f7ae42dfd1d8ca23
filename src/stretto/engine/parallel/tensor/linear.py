"""Linear layers split over tensor-parallel ranks, with gradients accumulated in place.

The weight gradient is added into `weight.grad` by one matrix product (no temporary, no second pass), while
the input gradient is being reduced over the tensor-parallel group. It can also be deferred: a stage whose
schedule splits the backward gives its layers a queue, which the W action processes. nn.Linear layers can be
converted to do the same (`convert_linears`).

Under sequence parallelism (Korthikanti et al. 2022, section 4.2.2), `GatherLinear` and `ScatterLinear` are at
the boundaries between parts of the model that are split along the sequence and by features. Only this rank's
shard of the gathered input is saved; the backward gathers it again while it computes the input gradient, and
reduces that while it computes the weight gradient. Ranks gather and scatter pieces, [t, b, s/t, ...], and a
linear layer treats every token alike, so the product is computed in the order of the pieces. If the tokens'
true order is required, the narrower side of the product is reordered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.engine.parallel.collectives import (
    Pending,
    all_sum,
    copy_to,
    cut,
    gather_from,
    join,
    start_gather,
    start_regather,
    start_scatter_sum,
    start_sum,
)
from stretto.engine.parallel.precision import gradient_dtype
from stretto.engine.parallel.tensor.matmul import add_weight_gradient, input_gradient, linear


def add_sum(grad: Tensor | None, dy: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grad + the column sums of dy [n, out]: in place if `grad` exists, else a new tensor of
    `dtype`.
    """
    # on CPUs a sum into another type takes ten times as long, and the plain one accumulates in float32 anyway
    total = dy.sum(0) if dy.is_cpu else dy.sum(0, dtype=dtype)
    return total.to(dtype) if grad is None else grad.add_(total)


class LayerProducts(Protocol):
    """Matrix products that replace a layer's plain ones; see `fp8`."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor: ...


class DeferredGradient(Protocol):
    """A deferred weight gradient: `start` begins its communication, `finish` adds it to `weight.grad`."""

    def start(self) -> None: ...

    def finish(self) -> None: ...


def run_deferred(entries: list[DeferredGradient]) -> None:
    """Finish deferred gradients in order, starting each before its predecessor finishes, and freeing each
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


class AccumulatesOwnGradients(nn.Module):
    """A layer that accumulates its weight gradients itself, outside autograd: immediately, or later from
    `queue`.

    Attributes:
        queue: the queue of deferred gradients, or None if they are accumulated immediately.
        on_gradient: called with each parameter that has received a gradient.
    """

    queue: list[DeferredGradient] | None = None
    on_gradient: Callable[[Tensor], None] | None = None

    @property
    def fused(self) -> list[nn.Parameter]:
        """Parameters whose gradients this layer accumulates itself, outside autograd."""
        raise NotImplementedError


@dataclass
class WeightProduct:
    """The deferred weight gradient of one product."""

    layer: FusedLinear
    x: Tensor | None  # None if the weight is frozen and the bias is not
    dy: Tensor

    def start(self) -> None:
        pass

    def finish(self) -> None:
        self.layer.add_weight_gradient(self.x, self.dy)


def operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the factors of a product in the dtype in which it is computed: autocast's, else the weight's."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: FusedLinear) -> Tensor:
        ctx.layer = layer
        x, weight, bias = operands(x, weight, bias)
        y = layer.multiply(x, weight, bias)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
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
            # detached: x's graph would keep everything before it alive
            layer.queue.append(WeightProduct(layer, None if x is None else x.detach(), dy))
        if work is not None:
            work.wait()
        return dx, None, None, None


class FusedLinear(AccumulatesOwnGradients):
    """A linear layer, or one rank's part of it, that accumulates its weight gradients itself.

    Attributes:
        input_group: ranks over which the input's gradient is summed (column-parallel: every rank holds some
            output rows, and the input is replicated).
        output_group: ranks over which the output is summed (row-parallel: every rank holds some input
            columns); the bias is added once, after the sum.
        products: replacement of the plain matrix products, if any.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    input_group: ProcessGroup | None = None
    output_group: ProcessGroup | None = None
    products: LayerProducts | None = None

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x weight^T + bias."""
        return cast(Tensor, _LinearFunction.apply(x, self.weight, bias, self))

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x weight^T + bias for factors that `operands` has converted."""
        run, kind = linear if self.products is None else self.products.forward, x.device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return run(x, weight, bias)
        return run(x, weight, bias)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return dy weight."""
        run = input_gradient if self.products is None else self.products.input_gradient
        return run(dy, weight)

    def add_weight_gradient(self, x: Tensor | None, dy: Tensor) -> None:
        """Accumulate weight and bias gradients from x [..., in] (None for a frozen weight) and dy [...,
        out].
        """
        if dy.dim() != 2:
            x, dy = None if x is None else x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        bias = self.bias
        report = self.on_gradient
        if x is not None and self.weight.requires_grad:
            self.accumulate(x, dy)
            self.report()
        if bias is not None and self.output_group is None and bias.requires_grad:
            bias.grad = add_sum(bias.grad, dy, gradient_dtype(bias))
            if report is not None:
                report(bias)

    def accumulate(self, x: Tensor, dy: Tensor) -> None:
        """Accumulate the weight gradient of some tokens, x [n, in] and dy [n, out]; `report` follows the
        last.
        """
        weight = self.weight
        weight.grad = add_weight_gradient(weight.grad, dy, x, gradient_dtype(weight))

    def report(self) -> None:
        """Report that the weight has received its gradient of a microbatch."""
        if self.on_gradient is not None:
            self.on_gradient(self.weight)

    @property
    def fused(self) -> list[nn.Parameter]:
        """Parameters whose gradients this layer accumulates itself, outside autograd."""
        parameters = [self.weight]
        return parameters if self.bias is None or self.output_group is not None else [*parameters, self.bias]


class ParallelLinear(FusedLinear):
    """A `FusedLinear` of existing parameters."""

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
        """Map x [..., in] to [..., out], both local sizes."""
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
        """Map x [..., in] to [..., out]."""
        return self.product(input, self.bias)


def convert_linears(module: nn.Module) -> bool:
    """Convert the nn.Linear layers in `module` to AdoptedLinear in place; return True if it did.

    Parameters, names and hooks do not change, only the class, to a subclass of nn.Linear. Nothing is
    converted if linear layers hold at most half of the elements in weight matrices (walking the graph then
    defers more), if a part is compiled, or if a weight has gradient hooks, which would not be called.
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
    if any(
        bool(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))
        for layer in plain
        for p in layer.parameters()
    ):
        return False
    if any(type(part).__name__ == "OptimizedModule" for part in parts):
        return False
    for layer in plain:
        layer.__class__ = AdoptedLinear
    return True


class SequenceLinear(ParallelLinear):
    """A split linear layer whose input or output is split along the sequence, dimension 1.

    Attributes:
        group: the tensor-parallel ranks.
        ordered: on the side with all tokens, these are samples [b, s, ...]; otherwise the concatenated pieces
            of the ranks, [t b, s/t, ...], which saves copies if b > 1. Everything between two such layers
            must then treat each token independently.
    """

    group: ProcessGroup
    ordered: bool

    @property
    def narrow_output(self) -> bool:
        """True if reordering outputs, twice (y, dy), is cheaper than inputs, three times (x, dx, and x for
        the weight gradient).
        """
        rows, columns = self.weight.shape
        return 2 * rows < 3 * columns


def _pieces(x: Tensor, t: int) -> Tensor:
    """View [t b, s/t, ...] as [t, b, s/t, ...]."""
    return x.unflatten(0, (t, -1))


class GatherLinear(SequenceLinear):
    """Linear split by output features: maps every rank's x [b, s/t, in] to this rank's features of all
    tokens, [b, s, out/t] or, if not `ordered`, [t b, s/t, out/t].
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: ProcessGroup, ordered: bool = True
    ) -> None:
        super().__init__(weight, bias, input_group=group)
        self.group, self.ordered = group, ordered

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x [b, s/t, in]."""
        return cast(Tensor, _Gathered.apply(x, self.weight, self.bias, self))

    def arranged(self, pieces: Tensor) -> Tensor:
        """Return the gathered input [t, b, s/t, in] in the order in which the product is computed."""
        return join(pieces, 1) if self.ordered and not self.narrow_output else pieces


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: GatherLinear) -> Tensor:
        x, weight, bias = operands(x, weight, bias)
        ctx.layer = layer
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
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
        weight_product = None
        if needs[1] or needs[2]:
            weight_product = _GatheredProduct(layer, None if x is None else x.detach(), grads[0])
        if weight_product is not None and layer.queue is None:
            weight_product.start()
        dy: Tensor = grads[0]
        if not layer.ordered:
            dy = _pieces(dy, t)
        elif layer.narrow_output:
            dy = cut(dy, t, 1)
        dx, work = None, None
        if needs[0]:
            product = layer.input_gradient(dy, weight)
            dx, work = start_scatter_sum(product if product.dim() > 3 else cut(product, t, 1), layer.group)
        if weight_product is not None:
            weight_product.dy = dy
            if layer.queue is None:
                weight_product.finish()
            else:
                layer.queue.append(weight_product)
        if work is not None:
            work.wait()
        return dx, None, None, None


@dataclass
class _GatheredProduct:
    """The deferred weight gradient of a product whose input must be gathered again, unless the weight is
    frozen.
    """

    layer: GatherLinear
    x: Tensor | None
    dy: Tensor
    gathering: tuple[Tensor, Pending] | None = None

    def start(self) -> None:
        if self.x is not None:
            self.gathering = start_regather(self.x, self.layer.group)

    def finish(self) -> None:
        x = self.x
        if self.gathering is not None:
            pieces, work = self.gathering
            work.wait()
            x = self.layer.arranged(pieces)
        self.layer.add_weight_gradient(x, self.dy)


class ToHeads(nn.Module):
    """Provides an input to the features of every rank: x [b, s, n], or with `sequence` the gathered x
    [b, s/t, n].
    """

    def __init__(self, group: ProcessGroup, sequence: bool) -> None:
        super().__init__()
        self.group, self.sequence = group, sequence

    def forward(self, x: Tensor) -> Tensor:
        """Return [b, s, n]."""
        return gather_from(x, self.group, 1) if self.sequence else copy_to(x, self.group)


class ScatterLinear(SequenceLinear):
    """Linear split by input features: maps x [b, s, in/t] or, if not `ordered`, [t b, s/t, in/t], to this
    rank's tokens of the sum over the ranks, [b, s/t, out]. The bias is added after the sum; its gradient
    covers only this rank's tokens.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: ProcessGroup, ordered: bool = True
    ) -> None:
        super().__init__(weight, bias, output_group=group)
        self.group, self.ordered = group, ordered

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x [b, s, in/t], or [t b, s/t, in/t] if not `ordered`."""
        y = cast(Tensor, _Scattered.apply(x, self.weight, self))
        return y if self.bias is None else y + self.bias

    def add_weight_gradient(self, x: Tensor | None, dy: Tensor) -> None:
        """Accumulate the weight gradient; x as in `forward`, dy of all tokens in the product's order."""
        super().add_weight_gradient(None if x is None else self.arranged(x), dy)

    def arranged(self, x: Tensor) -> Tensor:
        """Return the input in the order in which the product is computed."""
        t = self.group.size()
        if not self.ordered:
            return _pieces(x, t)
        return x if self.narrow_output else cut(x, t, 1)


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: ScatterLinear) -> Tensor:
        x, weight, _ = operands(x, weight, None)
        ctx.layer = layer
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
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
            weight_product = WeightProduct(layer, x.detach(), dy)
            if layer.queue is None:
                weight_product.finish()
            else:
                layer.queue.append(weight_product)
        return dx, None, None
