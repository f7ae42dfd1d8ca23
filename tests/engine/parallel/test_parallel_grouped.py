"""Products of many experts at once: one call or a loop, the same values; gradients in place, groups without
rows untouched, now or later.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from stretto.engine.parallel.expert import grouped
from stretto.engine.parallel.expert.grouped import (
    GroupedLayer,
    Groups,
    grouped_input_gradient,
    grouped_linear,
    in_one_call,
)
from stretto.engine.parallel.tensor import matmul
from stretto.engine.parallel.tensor.linear import DeferredGradient

CPU = torch.device("cpu")


class Stack(GroupedLayer):
    """One stacked linear."""

    def __init__(self, experts: int, out: int, into: int, dtype: torch.dtype, biased: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Parameter(torch.randn(experts, out, into, dtype=dtype))
        self.up_bias = nn.Parameter(torch.randn(experts, out, dtype=dtype))
        self.biased = biased

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        return self.product(x, "up", "up_bias", groups, biased=self.biased)


def plain(layer: Stack, x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """The definition, by autograd."""
    parts = x.split(list(counts))
    shifts = layer.up_bias if layer.biased else torch.zeros_like(layer.up_bias)
    return torch.cat([functional.linear(p, w, b) for p, w, b in zip(parts, layer.up, shifts, strict=True)])


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    width=st.sampled_from([(8, 16), (3, 5)]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    later=st.booleans(),
)
def test_products_and_gradients(
    counts: list[int], width: tuple[int, int], dtype: torch.dtype, later: bool
) -> None:
    layer, groups = Stack(len(counts), *width, dtype), Groups(tuple(counts), CPU)
    x = torch.randn(groups.rows, width[1], dtype=dtype, requires_grad=True)
    dy = torch.randn(groups.rows, width[0], dtype=dtype)
    wanted = plain(layer, x, groups.counts)
    dx, dw, db = torch.autograd.grad(wanted, (x, layer.up, layer.up_bias), dy)
    reported, queue = list[Tensor](), list[DeferredGradient]()
    layer.on_gradient, layer.queue = reported.append, queue if later else None
    y = layer(x, groups)
    y.backward(dy)
    if later:
        assert layer.up.grad is None
        assert not reported
        for entry in queue:
            entry.start()
            entry.finish()
    assert reported == [layer.up, layer.up_bias], "told of each once, even where no row came"
    assert layer.up.grad is not None
    assert layer.up_bias.grad is not None
    assert x.grad is not None
    for computed, expected in ((y, wanted), (x.grad, dx), (layer.up.grad, dw), (layer.up_bias.grad, db)):
        torch.testing.assert_close(computed, expected)
    before = layer.up.grad.clone()
    layer(x, groups).backward(dy)
    if not later:
        torch.testing.assert_close(layer.up.grad, 2 * before)


def test_groups_without_rows_keep_their_gradients() -> None:
    """Not even a zero is added: a gradient that is not finite stays."""
    layer, groups = Stack(3, 8, 8, torch.float32), Groups((2, 0, 1), CPU)
    layer.up.grad = torch.zeros_like(layer.up)
    layer.up.grad[1] = torch.inf
    layer(torch.randn(3, 8), groups).sum().backward()
    assert bool(layer.up.grad[1].isposinf().all())
    assert bool(layer.up.grad[[0, 2]].isfinite().all())


def test_a_bias_added_by_another_rank_gets_its_gradient_here() -> None:
    layer, groups = Stack(2, 8, 8, torch.float64, biased=False), Groups((2, 1), CPU)
    x, dy = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    y = layer(x, groups)
    torch.testing.assert_close(y, plain(layer, x, groups.counts))
    y.backward(dy)
    assert layer.up_bias.grad is not None
    torch.testing.assert_close(layer.up_bias.grad, torch.stack([dy[:2].sum(0), dy[2:].sum(0)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_grouped_call_equals_the_loop(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(9, 16).to(dtype), torch.randn(4, 8, 16).to(dtype)
    bias, dy, groups = torch.randn(4, 8).to(dtype), torch.randn(9, 8).to(dtype), Groups((3, 0, 6, 0), CPU)
    exact = [t.double() for t in (x, weight, bias, dy)]
    sizes = [t.abs() for t in exact]  # of what is added up: bounds what rounding does

    def products(t: list[Tensor]) -> tuple[Tensor, Tensor]:
        return grouped_linear(t[0], t[1], t[2], groups), grouped_input_gradient(t[3], t[1], groups)

    for once in (True, False):
        assert grouped.in_one_call(x, *weight.shape) == once
        for computed, plain, size in zip(
            products([x, weight, bias, dy]), products(exact), products(sizes), strict=True
        ):
            assert computed.dtype is dtype
            assert bool(((computed.double() - plain).abs() <= 2 * torch.finfo(dtype).eps * size).all())
        monkeypatch.setattr(grouped, "in_one_call", lambda *_: False)


def test_when_the_grouped_call_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ONEDNN", True)
    x = torch.zeros(64, 16)
    assert in_one_call(x, 4, 8, 16)
    assert not in_one_call(x.double(), 4, 8, 16), "torch has none"
    assert not in_one_call(x, 4, 6, 16), "16 bytes"
    assert not in_one_call(x[:, :6], 4, 8, 6), "16 bytes"
    assert in_one_call(x.bfloat16(), 4, 8, 16)
    assert not in_one_call(x.bfloat16(), 4, 12, 16)
    assert not in_one_call(torch.zeros(4096, 256), 4, 1024, 256), "oneDNN is faster"
    assert in_one_call(torch.zeros(4096, 256).bfloat16(), 4, 1024, 256)


def test_autocast_keeps_gradients_in_full() -> None:
    layer, groups = Stack(2, 8, 16, torch.float32), Groups((3, 1), CPU)
    x = torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, groups)
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16
    assert x.grad is not None
    assert layer.up.grad is not None
    assert layer.up.grad.dtype is torch.float32
    rounded = x.detach().bfloat16().float()
    torch.testing.assert_close(layer.up.grad[0, 0], rounded[:3].sum(0), rtol=1e-2, atol=1e-2)
