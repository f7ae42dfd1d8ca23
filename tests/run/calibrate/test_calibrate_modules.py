"""Measured layers: bytes exactly, times of modules that sleep."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.errors import StrettoError
from stretto.planner.cutting.profile import SharedWeights
from stretto.run.calibrate.modules import profile_layers


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: float, back: float) -> Tensor:
        ctx.back = back
        time.sleep(ahead)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.back)
        return gradients[0], None, None


class Sleeper(nn.Module):
    def __init__(self, ahead: float, back: float) -> None:
        super().__init__()
        self.times, self.scale = (ahead, back), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(x * self.scale, *self.times)  # type: ignore[no-any-return]


def test_times_are_those_of_each_layer() -> None:
    seconds = [(0.02, 0.06), (0.08, 0.01)]
    profile = profile_layers([Sleeper(*each) for each in seconds], torch.randn(2), repeats=5)
    for layer, (ahead, back) in zip(profile.layers, seconds, strict=True):
        assert layer.forward == pytest.approx(ahead, abs=0.015)
        assert layer.backward == pytest.approx(back, abs=0.015)
    # asleep for the gradient of the input, which the first layer has none of
    assert profile.layers[0].weight == profile.layers[0].backward
    assert profile.layers[1].halves[1] < 0.008


def test_bytes_are_those_of_the_tensors() -> None:
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False), nn.Sigmoid()]
    profile = profile_layers(layers, torch.randn(32, 8), repeats=1)
    row = 32 * 4
    assert [layer.parameters for layer in profile.layers] == [4 * (8 * 16 + 16), 0, 4 * 16 * 4, 0]
    assert [layer.output for layer in profile.layers] == [16 * row, 16 * row, 4 * row, 4 * row]
    # the sample is the batch's; ReLU and sigmoid keep their outputs, and the linear behind finds it kept
    assert [layer.activations for layer in profile.layers] == [0, 16 * row, 0, 4 * row]
    assert [layer.input for layer in profile.layers] == [0, 0, 0, 0]
    two = profile_layers([nn.Identity(), nn.Linear(8, 8), nn.Linear(8, 8)], torch.randn(32, 8), repeats=1)
    assert [layer.activations for layer in two.layers] == [0, 0, 8 * row]
    assert two.layers[2].input == 8 * row


def test_the_loss_counts_to_the_last_layer() -> None:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        time.sleep(0.04)
        return (y - target).square().mean()

    profile = profile_layers([nn.Linear(4, 4), nn.Linear(4, 4)], torch.randn(2, 4), loss, torch.randn(2, 4))
    assert profile.layers[0].forward < 0.03 < profile.layers[1].forward
    assert profile.layers[1].output == 4  # one number


def test_shared_weights_are_detected() -> None:
    first, last = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    last.weight = first.weight
    profile = profile_layers([first, nn.Linear(4, 4), last], torch.randint(10, (3,)), repeats=1)
    assert profile.shared == (SharedWeights((0, 2), 160),)


def test_layers_may_pass_several_tensors() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x * y, y

    profile = profile_layers(
        [Both(), Both()], (torch.randn(4), torch.randn(4, dtype=torch.float32)), repeats=1
    )
    assert [layer.output for layer in profile.layers] == [32, 32]


def test_nothing_is_left_behind() -> None:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)]
    gradient = torch.ones(4, 4)
    layers[0].weight.grad = gradient
    state = {key: value.clone() for key, value in nn.Sequential(*layers).state_dict().items()}
    random = torch.get_rng_state()
    profile_layers(layers, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), repeats=1)
    assert torch.equal(torch.get_rng_state(), random)
    assert layers[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(4, 4))
    assert layers[1].weight.grad is None
    for key, value in nn.Sequential(*layers).state_dict().items():
        assert torch.equal(value, state[key]), key


def test_layers_that_do_not_fit_are_named() -> None:
    with pytest.raises(StrettoError, match=r"layer 1 \(Linear\) fails"):
        profile_layers([nn.Linear(4, 4), nn.Linear(5, 4)], torch.randn(2, 4))
    with pytest.raises(StrettoError, match="there are no layers"):
        profile_layers([], torch.randn(2, 4))
