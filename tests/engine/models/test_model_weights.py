from __future__ import annotations

import pytest
import torch
from model_shapes import SHAPES

from stretto.engine.models import build
from stretto.engine.models.weights import load_weights, weights_of
from stretto.errors import StrettoError


@pytest.mark.parametrize("name", SHAPES)
def test_copies_a_model(name: str):
    one, other = build(SHAPES[name]), build(SHAPES[name])
    load_weights(other, weights_of(one))
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert torch.equal(one(ids), other(ids))


def test_a_tied_head_is_there_once():
    assert "head.out.weight" not in weights_of(build(SHAPES["gpt"]))
    assert "head.out.weight" in weights_of(build(SHAPES["gpt-untied"]))


def test_another_model_is_refused_whole():
    model = build(SHAPES["gpt"])
    before = {name: weight.clone() for name, weight in weights_of(model).items()}
    good = {name: torch.zeros_like(weight) for name, weight in before.items()}
    bad = [
        ({k: v for k, v in good.items() if k != "head.norm.bias"}, "'head.norm.bias' is missing"),
        ({**good, "head.norm.gain": torch.ones(1)}, "'head.norm.gain' has no place"),
        ({**good, "head.norm.bias": torch.zeros(3)}, r"'head.norm.bias' is \[3\], but \[32\]"),
    ]
    for weights, says in bad:
        with pytest.raises(StrettoError, match=says):
            load_weights(model, weights)
        assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())
