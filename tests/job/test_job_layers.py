from __future__ import annotations

import pytest

from stretto.engine.models import build
from stretto.job.flops import forward_flops_per_token, layer_costs, layer_names
from stretto.job.presets import preset
from stretto.job.shape import ModelShape


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b"])
def test_layers_add_up_to_the_model(name: str):
    shape = preset(name)
    costs = layer_costs(shape, 1024)
    assert len(costs) == shape.layers + 2
    assert sum(costs) == pytest.approx(forward_flops_per_token(shape, 1024), rel=1e-12)
    assert costs[0] == 0
    assert costs[-1] == 2 * shape.hidden * shape.vocab
    assert len(set(costs[1:-1])) == 1


def test_one_cost_for_each_layer_of_the_model():
    shape = ModelShape(family="gpt", layers=3, hidden=8, heads=2, vocab=11, sequence=4)
    names = [name for name, _ in build(shape).layers()]
    assert layer_names(shape) == names
    assert len(layer_costs(shape, 4)) == len(names)
