"""Parameters of a rank against those of the sharded modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from stretto.engine.models.build import build
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.parallelize import parallelize
from stretto.job.experts import ExpertShape
from stretto.job.job import Job
from stretto.job.parameters import count_parameters
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.counts.rank_parameters import Shares, elements_of, layer_elements

GPT = ModelShape(family="gpt", layers=2, hidden=32, heads=4, vocab=101, sequence=16)
LLAMA = ModelShape(
    family="llama", layers=2, hidden=32, heads=8, kv_heads=2, head_dim=6, ffn=24, vocab=101, sequence=16
)
EXPERTS = ExpertShape(experts=4, ffn=20, shared_ffn=8)


@dataclass
class PlacedMesh:
    """The coordinates of one rank of a layout, without processes."""

    layout: Layout
    rank: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    def size(self, axes: str) -> int:
        return self.layout.size(axes)

    def index(self, axes: str) -> int:
        return self.layout.index(self.rank, axes)

    def group(self, axes: str) -> Any:
        return None

    def split(self, axis: str, parts: int) -> Any:
        return (axis, parts)


def sharded_elements(shape: ModelShape, layout: Layout, rank: int, multiple: int) -> dict[str, int]:
    """Elements of each parameter of the sharded model."""
    with torch.device("meta"):
        model = build(shape)
    job = Job(shape=shape, layout=layout, vocab_multiple=multiple)
    mesh: Any = PlacedMesh(layout, rank)
    parallelize(model, sharding_plan(job), mesh)
    return {name: p.numel() for name, p in model.named_parameters()}


def model(family: str, experts: bool) -> ModelShape:
    base = GPT if family == "gpt" else LLAMA
    return replace(base, moe=EXPERTS if experts else None)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize(
    ("layout", "experts"),
    [
        (Layout(), False),
        (Layout(tp=2), False),
        (Layout(tp=4), False),
        (Layout(tp=2, dp=2, ep=2, expert_tp=2), True),
        (Layout(tp=2, dp=2, ep=4, expert_tp=1), True),
    ],
)
@pytest.mark.parametrize("multiple", [1, 8])
def test_elements_are_those_of_the_sharded_modules(
    family: str, layout: Layout, experts: bool, multiple: int
) -> None:
    shape = model(family, experts)
    shares = Shares(layout.tp, layout.ep, layout.size("expert_tp"), multiple)
    counted = elements_of(shape, range(shape.layers + 2), shares)
    for rank in range(layout.world):
        assert sharded_elements(shape, layout, rank, multiple) == counted


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_one_rank_without_padding_holds_the_plain_model(shape: ModelShape) -> None:
    counted = elements_of(shape, range(shape.layers + 2), Shares())
    assert sum(counted.values()) == count_parameters(shape).total


def test_a_tied_weight_is_held_by_both_ends_and_once_where_they_meet() -> None:
    first, last = (layer_elements(GPT, layer, Shares()) for layer in (0, GPT.layers + 1))
    assert first["embed.tok.weight"] == last["embed.tok.weight"] == 101 * 32
    both = elements_of(GPT, (0, GPT.layers + 1), Shares())
    assert sum(both.values()) == sum(first.values()) + sum(last.values()) - 101 * 32
