"""Nets made at random: their backward in two halves equals the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from halves import (
    Of,
    check_equal,
    double,
    lin,
    x,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from example_counts import scaled


@pytest.fixture(autouse=True)
def _double() -> Any:
    with double():
        yield


STEPS = [
    *("linear", "weight", "bias", "scale", "norm", "add"),
    *("multiply", "tanh", "view", "inplace", "attend", "mix"),
]


@st.composite
def nets(draw: st.DrawFn) -> nn.Module:
    """Chains of operations on [3, 4] in which weights and activations are used again at random."""
    layers = [lin() for _ in range(draw(st.integers(1, 3)))]
    scales = [nn.Parameter(torch.randn(4)) for _ in range(2)]
    norm = nn.LayerNorm(4)
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(STEPS),
                st.integers(0, 7),
                st.integers(0, 7),
            ),
            min_size=1,
            max_size=9,
        )
    )
    outputs = draw(st.integers(1, 3))

    def run(m: Any, *xs: Tensor) -> Any:
        values = [*xs, m.scales[0] * torch.ones(3, 4)]
        for kind, i, j in steps:
            t, o = values[-1 - i % len(values)], values[-1 - j % len(values)]
            layer, scale = m.layers[j % len(m.layers)], m.scales[j % 2]
            values.append(_step(kind, t, o, layer, scale, m.norm))
        return tuple(values[-outputs:])

    frozen_at = draw(st.integers(0, 5))
    net = Of(run, layers=nn.ModuleList(layers), norm=norm)
    net.scales = nn.ParameterList(scales)
    for at, p in enumerate(net.parameters()):
        p.requires_grad_(at != frozen_at)
    return net


def _step(kind: str, t: Tensor, o: Tensor, layer: nn.Linear, scale: Tensor, norm: nn.Module) -> Tensor:
    match kind:
        case "linear":
            return layer(t)
        case "weight":
            return t @ layer.weight
        case "bias":
            return t + layer.bias
        case "scale":
            return t * scale.exp()
        case "norm":
            return norm(t)
        case "add":
            return t + o
        case "multiply":
            return t * o.tanh()
        case "tanh":
            return t.tanh()
        case "view":
            return t.reshape(4, 3).transpose(0, 1).flip(0)
        case "inplace":
            h = t.clone()
            h[:, 1:3] += layer.bias[1:3]
            return h
        case "attend":
            return F.scaled_dot_product_attention(t[None], o[None], layer(o)[None])[0]
        case _:
            return torch.cat([t[:, :2], F.linear(o, layer.weight[:2], scale[:2])], 1)


@settings(max_examples=scaled(150), deadline=None, suppress_health_check=list(HealthCheck))  # pyright: ignore[reportArgumentType]
@given(nets(), st.integers(1, 2))
def test_random_nets_split_into_i_and_w(net: nn.Module, inputs: int) -> None:
    check_equal(net, *(x(3, 4) for _ in range(inputs)))
