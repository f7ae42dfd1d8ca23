"""Split linear layers beside nn.Linear: outputs and every gradient, in float64 on real ranks."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import CountingGroup
from torch import Tensor, nn
from torch.nn.functional import linear

from ranks import on_ranks
from stretto.engine.parallel.tensor.linear import (
    DeferredGradient,
    ParallelLinear,
    WeightProduct,
    convert_linears,
    run_deferred,
)


def equal(computed: Tensor | None, plain: Tensor | None, label: str) -> None:
    assert (computed is None) == (plain is None), label
    if computed is not None and plain is not None:
        torch.testing.assert_close(
            computed, plain, rtol=1e-13, atol=1e-13, msg=lambda text: f"{label}: {text}"
        )


def plain_layer(rows: int, columns: int, bias: bool) -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(columns, rows, bias=bias, dtype=torch.float64)


def batches(columns: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Two microbatches: input and the gradient of the output."""
    torch.manual_seed(8)
    shape = (2, 3)
    return [tuple(torch.randn(*shape, n, dtype=torch.float64) for n in (columns, rows)) for _ in range(2)]  # type: ignore[misc]


def part(tensor: Tensor, dim: int) -> Tensor:
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].detach().contiguous()


def local(tensor: Tensor | None, dim: int | None) -> nn.Parameter | None:
    """This rank's part of a parameter; None as `dim` means all of it."""
    return (
        None
        if tensor is None
        else nn.Parameter(tensor.detach().clone() if dim is None else part(tensor, dim))
    )


def column(bias: bool, deferred: bool, frozen: Collection[str]) -> None:
    plain = plain_layer(8, 5, bias)
    layer = ParallelLinear(local(plain.weight, 0), local(plain.bias, 0), input_group=dist.group.WORLD)
    run(plain, layer, split_in=False, deferred=deferred, frozen=frozen)


def row(bias: bool, deferred: bool, frozen: Collection[str]) -> None:
    plain = plain_layer(5, 8, bias)
    layer = ParallelLinear(local(plain.weight, 1), local(plain.bias, None), output_group=dist.group.WORLD)
    run(plain, layer, split_in=True, deferred=deferred, frozen=frozen)


def run(
    plain: nn.Linear, layer: ParallelLinear, split_in: bool, deferred: bool, frozen: Collection[str]
) -> None:
    """Two microbatches through both; compare outputs and gradients."""
    if deferred:
        layer.queue = []
    for module in (plain, layer):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen)
    for x, dy in batches(plain.in_features, plain.out_features):
        there = x.clone().requires_grad_("x" not in frozen)
        here = (part(x, -1) if split_in else x.clone()).requires_grad_("x" not in frozen)
        y, output = plain(there), layer(here)
        equal(output, y if split_in else part(y, -1), "output")
        if y.requires_grad:
            y.backward(dy)
            output.backward(dy if split_in else part(dy, -1))
        grad = there.grad
        equal(here.grad, part(grad, -1) if split_in and grad is not None else grad, "input gradient")
    if layer.queue is not None:
        if "weight" not in frozen:
            assert layer.weight.grad is None, "the weight gradient was to wait"
            assert len(layer.queue) == 2
        for entry in layer.queue:
            entry.start()
            entry.finish()
    dim = 1 if split_in else 0
    grad = plain.weight.grad
    equal(layer.weight.grad, None if grad is None else part(grad, dim), "weight gradient")
    if plain.bias is not None:
        grad = plain.bias.grad
        equal(layer.bias.grad, grad if split_in or grad is None else part(grad, 0), "bias gradient")


def two_in_a_row() -> None:
    """Column, relu, row: the pair needs one sum forward and one backward."""
    up, down = plain_layer(8, 5, True), plain_layer(5, 8, True)
    first = CountingGroup(dist.group.WORLD)
    second = CountingGroup(dist.group.WORLD)
    layers = nn.Sequential(
        ParallelLinear(local(up.weight, 0), local(up.bias, 0), input_group=first),
        nn.ReLU(),
        ParallelLinear(local(down.weight, 1), local(down.bias, None), output_group=second),
    )
    (x, _), (_, dy) = batches(5, 5)
    there, here = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = down(up(there).relu())
    z = layers(here)
    equal(z, y, "output of the pair")
    y.backward(dy)
    z.backward(dy)
    equal(here.grad, there.grad, "input gradient of the pair")
    equal(layers[0].weight.grad, part(up.weight.grad, 0), "first weight gradient")
    equal(layers[2].weight.grad, part(down.weight.grad, 1), "second weight gradient")
    assert first.log == [("reduce", x.numel())]
    assert second.log == [("reduce", y.numel())]
    with torch.no_grad():
        equal(layers(x), y, "output without gradients")


def gradient_reports() -> None:
    """`fused` parameters are those whose gradients are reported by the layer itself."""
    plain = plain_layer(8, 8, True)
    heard: list[Any] = []
    for groups, fused in ((("input_group",), ["weight", "bias"]), (("output_group",), ["weight"])):
        split = 0 if groups == ("input_group",) else 1
        bias = local(plain.bias, 0 if split == 0 else None)
        layer = ParallelLinear(local(plain.weight, split), bias, **dict.fromkeys(groups, dist.group.WORLD))
        names = {id(p): name for name, p in layer.named_parameters()}
        heard.clear()
        layer.on_gradient = lambda p, names=names: heard.append(names[id(p)])
        x = torch.ones(2, layer.weight.shape[1], dtype=torch.float64)
        layer(x).sum().backward()
        assert heard == fused
        assert [names[id(p)] for p in layer.fused] == fused


def every_case() -> None:
    for layer in (column, row):
        for bias in (True, False):
            for deferred in (False, True):
                layer(bias, deferred, frozen=())
        for frozen in ("x", "weight", "bias", "weight bias", "x weight", "x bias", "x weight bias"):
            for deferred in (False, True):
                layer(True, deferred, frozen.split())
    two_in_a_row()
    gradient_reports()


@pytest.mark.parametrize("ranks", [2, 4])
def test_column_and_row_equal_the_plain_layer(ranks):
    on_ranks(ranks, every_case)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_one_rank_equals_the_plain_layer_for_any_number_of_dimensions(shape):
    plain = plain_layer(6, 4, True)
    layer = ParallelLinear(
        nn.Parameter(plain.weight.detach().clone()), nn.Parameter(plain.bias.detach().clone())
    )
    x = torch.randn(shape, dtype=torch.float64)
    here, there = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(2):
        layer(here).square().sum().backward()
        plain(there).square().sum().backward()
    equal(here.grad, there.grad, "input gradient")
    equal(layer.weight.grad, plain.weight.grad, "weight gradient")
    equal(layer.bias.grad, plain.bias.grad, "bias gradient")


def test_gradients_accumulate_in_the_existing_tensor():
    layer = ParallelLinear(nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3)))
    flat = torch.zeros(9)
    layer.weight.grad, layer.bias.grad = flat[:6].view(3, 2), flat[6:]
    x = torch.randn(5, 2)
    for _ in range(2):
        layer(x).sum().backward()
    torch.testing.assert_close(flat[:6].view(3, 2), 2 * x.sum(0).expand(3, 2))
    assert flat[6:].tolist() == [10.0] * 3


def test_under_autocast_products_are_16_bit_and_sums_float32():
    torch.manual_seed(0)
    layer = ParallelLinear(nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6)))
    x, dy = torch.randn(8, 4), torch.randn(8, 6)
    layer.weight.grad = torch.full((6, 4), 1000.0)  # 1000 + 0.3 is 1000 in bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.backward(dy.bfloat16())
    short = [t.bfloat16() for t in (x, layer.weight, layer.bias)]
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, linear(*short))
    assert layer.weight.grad.dtype == torch.float32
    product = (dy.bfloat16().t() @ short[0]).float()
    torch.testing.assert_close(layer.weight.grad - 1000.0, product, atol=1e-3, rtol=0)
    assert layer.bias.grad is not None


def test_repr_shows_local_sizes():
    assert "in_features=4, out_features=6" in repr(ParallelLinear(nn.Parameter(torch.zeros(6, 4)), None))


def test_adopted_torch_layers_defer_their_weight_gradients():
    model = nn.Sequential(
        nn.Embedding(50, 4), nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False)
    ).double()
    plain = copy.deepcopy(model)
    names, seen = list(model.state_dict()), []
    model[1].register_forward_hook(lambda *_: seen.append(True))
    assert convert_linears(model)
    assert isinstance(model[1], nn.Linear)
    assert list(model.state_dict()) == names
    queue: list = []
    for layer in (model[1], model[3]):
        layer.queue = queue
    x = torch.randint(50, (5,))
    for net in (model, plain):
        net(x).square().sum().backward()
    assert seen
    assert model[1].weight.grad is None
    torch.testing.assert_close(model[2].weight.grad, plain[2].weight.grad)
    assert len(queue) == 2
    with torch.no_grad():
        for entry in queue:
            entry.finish()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_modules_that_are_not_adopted():
    assert not convert_linears(
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.Linear(2, 2))
    )  # most products are not its
    assert not convert_linears(nn.Sequential(nn.LayerNorm(3)))
    hooked = nn.Linear(3, 3)
    hooked.weight.register_hook(lambda dw: 2 * dw)
    assert not convert_linears(hooked)
    assert type(hooked) is nn.Linear
    later = nn.Linear(3, 3)
    later.weight.register_post_accumulate_grad_hook(lambda p: None)
    assert not convert_linears(later)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("later", [True, False])
def test_on_gradient_is_called_once_for_each_gradient(bias: bool, later: bool):
    layer, reported = nn.Linear(3, 2, bias=bias), list[int]()
    assert convert_linears(layer)
    layer.on_gradient = lambda p: reported.append(id(p))
    layer.queue = [] if later else None
    layer(torch.ones(4, 3, requires_grad=True)).sum().backward()
    if layer.queue is not None:
        assert not reported
        for entry in layer.queue:
            entry.finish()
    assert reported == [id(p) for p in layer.parameters()]


def test_deferred_gradients_keep_no_graph_and_are_freed_one_by_one():
    """Else the input of a block that is made again would keep all that came before it until W."""
    first, second = (ParallelLinear(nn.Parameter(torch.randn(4, 4)), None) for _ in range(2))
    queue: list[DeferredGradient] = []
    first.queue = second.queue = queue
    x = torch.randn(3, 4, requires_grad=True)
    second(first(x).relu()).sum().backward()
    assert [entry.x.grad_fn for entry in queue] == [None, None]
    alive = [weakref.ref(entry) for entry in queue]
    left = list[int]()
    inner = WeightProduct.finish

    def finish(self: WeightProduct) -> None:
        left.append(sum(ref() is not None for ref in alive))
        inner(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightProduct, "finish", finish)
        run_deferred(queue)
    assert left == [2, 1]
    assert queue == []
    assert first.weight.grad is not None
    assert second.weight.grad is not None
