from __future__ import annotations

from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.job.experts import ExpertShape
from stretto.job.parameters import block_shapes, expert_shapes
from stretto.job.presets import preset


@pytest.mark.parametrize(
    ("capacity", "tokens", "limit"),
    [(None, 64, None), (1.0, 64, 16), (1.25, 64, 20), (1.01, 64, 17), (0.001, 64, 1), (1.0, 1, 1)],
)
def test_capacity_is_rounded_up(capacity: float | None, tokens: int, limit: int | None):
    assert ExpertShape(experts=8, top_k=2, capacity=capacity).capacity_of(tokens) == limit


@pytest.mark.parametrize(
    ("change", "says", "hint"),
    [
        ({"experts": 0}, "experts is 0", "1 or more"),
        ({"top_k": 0}, "top_k is 0", "1 or more"),
        ({"top_k": 5}, "top_k is 5: there are 4 experts", "top_k: 4"),
        ({"ffn": 2.5}, "ffn is 2.5", "ffn"),
        ({"shared_ffn": -1}, "shared_ffn is -1", "0 or more"),
        ({"score": "sigmod"}, "score is sigmod", "'sigmoid'"),
        ({"drop": "prob"}, "drop is prob", "'probs'"),
        ({"balance": -0.1}, "balance is -0.1", "0"),
        ({"z": float("nan")}, "z is nan", "0"),
        ({"capacity": 0.0}, "capacity is 0.0", "1.25"),
    ],
)
def test_bad_experts_are_named(change: dict[str, Any], says: str, hint: str):
    with pytest.raises(StrettoError, match=says) as caught:
        ExpertShape(**{"experts": 4, **change})
    assert hint in (caught.value.hint or "")


def test_stacked_shapes_of_mixtral():
    stacked = {"mlp.experts.gate_up": (8, 28672, 4096), "mlp.experts.down": (8, 4096, 14336)}
    assert expert_shapes(preset("mixtral-8x7b")) == stacked
    assert expert_shapes(preset("llama3-8b")) == {}
    block = block_shapes(preset("mixtral-8x7b"))
    assert [name for name in block if name.startswith("mlp")] == ["mlp.router.gate.weight", *stacked]
