"""Linear layers with one side split along the sequence beside nn.Linear, on real ranks in float64."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import on_ranks
from stretto.engine.parallel.tensor.linear import GatherLinear, ParallelLinear, ScatterLinear
from stretto.engine.parallel.traffic import traffic


def close(computed: Tensor | None, plain: Tensor | None, label: str) -> None:
    assert (computed is None) == (plain is None), label
    if computed is not None and plain is not None:
        torch.testing.assert_close(
            computed, plain, rtol=1e-13, atol=1e-13, msg=lambda text: f"{label}: {text}"
        )


def part(x: Tensor, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].detach().clone()


def tokens(x: Tensor, ordered: bool) -> Tensor:
    """All tokens [b, s, ...] as samples, or as the ranks' pieces one after the other."""
    return x if ordered else torch.cat(x.chunk(dist.get_world_size(), 1))


def both(
    gathers: bool, sizes: tuple[int, int], samples: int, ordered: bool, later: bool, frozen: Collection[str]
) -> None:
    """Two microbatches through a plain layer and its split one."""
    label = f"gathers {gathers}, {sizes}, b {samples}, ordered {ordered}, later {later}, frozen {frozen}"
    torch.manual_seed(3)
    rows, columns = sizes
    plain = nn.Linear(columns, rows, dtype=torch.float64)
    split = 0 if gathers else 1
    weight = nn.Parameter(part(plain.weight, split))
    bias = nn.Parameter(part(plain.bias, 0) if gathers else plain.bias.detach().clone())
    layer = (GatherLinear if gathers else ScatterLinear)(weight, bias, dist.group.WORLD, ordered)
    layer.queue = [] if later else None
    for module in (plain, layer):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen)
    for _ in range(2):
        x = torch.randn(samples, 8, columns, dtype=torch.float64)
        dy = torch.randn(samples, 8, rows, dtype=torch.float64)
        there = x.clone().requires_grad_("x" not in frozen)
        here = part(x, 1) if gathers else tokens(part(x, -1), ordered)
        here.requires_grad_("x" not in frozen)
        y, output = plain(there), layer(here)
        close(output, tokens(part(y, -1), ordered) if gathers else part(y, 1), f"{label}: output")
        if y.requires_grad:
            y.backward(dy)
            output.backward(tokens(part(dy, -1), ordered) if gathers else part(dy, 1))
        dx = there.grad
        if dx is not None:
            dx = part(dx, 1) if gathers else tokens(part(dx, -1), ordered)
        close(here.grad, dx, f"{label}: input gradient")
    if later:
        assert weight.grad is None, "the weight gradient was to wait"
    with torch.no_grad():
        for entry in layer.queue or []:
            entry.start()
            entry.finish()
    grad = plain.weight.grad
    close(weight.grad, None if grad is None else part(grad, split), f"{label}: weight gradient")
    grad = bias.grad
    if not gathers and grad is not None:
        dist.all_reduce(grad)  # each rank has that of its tokens
    full = plain.bias.grad
    close(grad, part(full, 0) if gathers and full is not None else full, f"{label}: bias gradient")


def what_is_sent(later: bool) -> None:
    """One gather, one reduction, and one gather again unless the weight is frozen."""
    n, group = dist.get_world_size(), dist.group.WORLD
    layer = GatherLinear(nn.Parameter(torch.ones(3, 4)), None, group)
    layer.queue = [] if later else None
    x = torch.ones(2, 3, 4, requires_grad=True)
    with traffic() as sent:
        layer(x).sum().backward()
    moved = 2 * 3 * 4 * 4 * (n - 1)
    volumes = {"all-gather": moved, "reduce-scatter": moved}
    assert dict(sent.bytes) == (volumes if later else volumes | {"re-gather": moved})
    with traffic() as sent:
        for entry in layer.queue or []:
            entry.start()
            entry.finish()
    assert dict(sent.bytes) == ({"re-gather": moved} if later else {})
    layer.weight.requires_grad_(False)
    with traffic() as sent:
        layer(x).sum().backward()
    assert dict(sent.bytes) == volumes


def under_autocast() -> None:
    """Half as many bytes move, and sums are long."""
    n, group = dist.get_world_size(), dist.group.WORLD
    torch.manual_seed(4)
    layer = GatherLinear(nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6)), group, ordered=True)
    alike = ParallelLinear(layer.weight.detach().clone().requires_grad_(), layer.bias.detach().clone())
    full = torch.randn(2, 4 * n, 4)
    with torch.autocast("cpu", torch.bfloat16), traffic() as sent:
        y, there = layer(part(full, 1)), alike(full)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, there)
        y.sum().backward()
        there.sum().backward()
    assert sent.bytes["all-gather"] == 2 * 4 * 4 * 2 * (n - 1)
    assert layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(layer.weight.grad, alike.weight.grad)


def every_case() -> None:
    for gathers, sizes, samples, ordered, later in product(
        (True, False), ((4, 16), (16, 4), (8, 8)), (1, 3), (True, False), (False, True)
    ):
        both(gathers, sizes, samples, ordered, later, frozen=())
    for frozen in ("x", "weight", "bias", "weight bias", "x weight", "x bias", "x weight bias"):
        for gathers, later in product((True, False), repeat=2):
            both(gathers, (8, 4), 2, True, later, frozen.split())
    for later in (False, True):
        what_is_sent(later)
    under_autocast()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gathering_and_scattering_layers_equal_the_plain_one(ranks):
    on_ranks(ranks, every_case)
