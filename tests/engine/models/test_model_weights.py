"""Initial values of a model's weights, and the check of weights by name and size."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from model_shapes import SHAPES

from stretto.engine.models import build, initial_values, initialise
from stretto.engine.models.weights import check_weights
from stretto.errors import StrettoError
from stretto.job.initial import Initial

GPT = SHAPES["gpt"]


def test_initial_values_are_independent_of_the_global_generator():
    model, other = build(GPT), build(GPT)
    torch.manual_seed(3)
    initialise(model, 5)
    torch.manual_seed(4)
    torch.rand(17)
    for name, parameter in reversed(list(other.named_parameters())):
        with torch.no_grad():
            parameter.copy_(initial_values(name, tuple(parameter.shape), 5, GPT))
    for name, weight in model.named_parameters():
        assert torch.equal(weight, other.get_parameter(name)), name


def test_initialising_leaves_the_global_generator_unchanged():
    model = build(SHAPES["llama"])
    before = torch.get_rng_state()
    initialise(model, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_initial_values_are_the_same_in_another_process():
    code = (
        "from stretto.engine.models import initial_values; from stretto.job.presets import preset;"
        "print(initial_values('blocks.3.attn.qkv.weight', (5, 4), 11, preset('gpt2')).double().sum().item())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    here = initial_values("blocks.3.attn.qkv.weight", (5, 4), 11, GPT).double().sum().item()
    assert float(printed) == here


def test_initial_values_differ_by_name_and_by_seed():
    first = initial_values("blocks.0.mlp.up.weight", (8, 8), 0, GPT)
    assert not torch.equal(first, initial_values("blocks.1.mlp.up.weight", (8, 8), 0, GPT))
    assert not torch.equal(first, initial_values("blocks.0.mlp.up.weight", (8, 8), 1, GPT))


@pytest.mark.parametrize("layers", [2, 50])
def test_standard_deviations_are_those_of_gpt2(layers: int):
    shape = replace(GPT, layers=layers)
    wide = initial_values("blocks.0.attn.qkv.weight", (300, 400), 0, shape)
    assert wide.dtype == torch.float32
    assert wide.std().item() == pytest.approx(0.02, rel=0.02)
    assert wide.mean().item() == pytest.approx(0, abs=3e-4)
    for name in ("blocks.1.attn.proj.weight", "blocks.1.mlp.down.weight"):
        narrow = initial_values(name, (300, 400), 0, shape)
        assert narrow.std().item() == pytest.approx(0.02 / (2 * layers) ** 0.5, rel=0.02)


def test_standard_deviations_are_chosen() -> None:
    initial = Initial(init_std=0.006, scaled_init=False)
    for name in ("blocks.1.attn.proj.weight", "blocks.0.attn.qkv.weight", "embed.tokens.weight"):
        values = initial_values(name, (300, 400), 0, GPT, initial)
        assert values.std().item() == pytest.approx(0.006, rel=0.02)
    scaled = initial_values(
        "blocks.1.attn.proj.weight", (300, 400), 0, GPT, replace(initial, scaled_init=True)
    )
    assert scaled.std().item() == pytest.approx(0.006 / (2 * GPT.layers) ** 0.5, rel=0.02)
    assert torch.equal(initial_values("final.bias", (3,), 0, GPT, initial), torch.zeros(3))


@pytest.mark.parametrize("name", ["gpt", "llama-one-kv-head"])
def test_norm_gains_are_one_and_biases_zero(name: str):
    model = build(SHAPES[name])
    initialise(model, 0)
    for path, weight in model.named_parameters():
        if path.endswith("bias"):
            assert (weight == 0).all(), path
        elif "norm" in path:
            assert (weight == 1).all(), path
        else:
            assert weight.std() > 0, path


def test_a_tied_head_is_not_a_separate_parameter():
    assert "head.out.weight" not in dict(build(SHAPES["gpt"]).named_parameters())
    assert "head.out.weight" in dict(build(SHAPES["gpt-untied"]).named_parameters())


def test_weights_of_another_model_are_refused():
    weights = dict(build(SHAPES["gpt"]).named_parameters())
    sizes = {name: tuple(weight.shape) for name, weight in weights.items()}
    check_weights(weights, sizes)
    missing = {name: weight for name, weight in weights.items() if name != "head.norm.bias"}
    for wrong, message in [
        (missing, "'head.norm.bias' is missing"),
        ({**weights, "head.norm.gain": torch.ones(1)}, "'head.norm.gain' has no place"),
        ({**weights, "head.norm.bias": torch.zeros(3)}, r"'head.norm.bias' is \[3\], but \[32\]"),
    ]:
        with pytest.raises(StrettoError, match=message):
            check_weights(wrong, sizes)
