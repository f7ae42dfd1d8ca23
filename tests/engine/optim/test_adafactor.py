"""Adafactor against torch's."""

from __future__ import annotations

import pytest
import torch
from splits import SHAPES, set_gradients, unsplit, values
from torch import nn

from stretto.engine.optim.base import decays, stack_depth
from stretto.engine.optim.build import build_optimizer
from stretto.engine.optim.states import state_tensors
from stretto.job.optimiser import Optimiser

EPS = torch.finfo(torch.float32).eps  # torch's own in float32


@pytest.mark.parametrize(
    "lr", [0.01, 0.7]
)  # of the second the root of the step is the smaller from step 3 on
@pytest.mark.parametrize("factor", [1.0, 1e-5])  # of the weights: below the smallest scale
def test_adafactor_is_torchs_of_each_expert(lr: float, factor: float):
    start = {name: tensor * factor for name, tensor in values(0).items()}
    fragments = unsplit(start)
    torch_parameters: dict[str, list[nn.Parameter]] = {}
    groups = {0.3: list[nn.Parameter](), 0.0: list[nn.Parameter]()}
    for name, tensor in start.items():
        members = list(tensor) if stack_depth(name, tensor.shape) else [tensor]
        torch_parameters[name] = [nn.Parameter(member.clone()) for member in members]
        groups[0.3 if decays(name, tensor.shape) else 0.0] += torch_parameters[name]
    reference = torch.optim.Adafactor(
        [{"params": p, "weight_decay": d} for d, p in groups.items()], lr=lr, eps=(EPS, 1e-3)
    )
    optimizer = build_optimizer(fragments, Optimiser(name="adafactor", lr=lr, weight_decay=0.3))
    for step in range(5):
        gradients = values(10 + step)
        set_gradients(fragments, gradients)
        for name, members in torch_parameters.items():
            parts = list(gradients[name]) if len(members) > 1 else [gradients[name]]
            for member, part in zip(members, parts, strict=True):
                member.grad = part.clone()
        optimizer.step()
        reference.step()
    for fragment in fragments:
        wanted = torch.stack(list(torch_parameters[fragment.name])).view(SHAPES[fragment.name])
        torch.testing.assert_close(fragment.parameter, wanted, rtol=1e-11, atol=1e-13 * factor)


def test_adafactor_states_are_rows_and_columns():
    fragments = unsplit(values(0))
    optimizer = build_optimizer(fragments, Optimiser(name="adafactor"))
    set_gradients(fragments, values(1))
    optimizer.step()
    shapes = {
        f.name: {k: tuple(t.shape) for k, (t, _) in state_tensors(optimizer, f).items()} for f in fragments
    }
    assert shapes["embed.tok.weight"] == {"row_var": (11,), "col_var": (6,)}
    assert shapes["blocks.0.mlp.experts.up"] == {"row_var": (4, 5), "col_var": (4, 6)}
    assert shapes["blocks.0.mlp.experts.up_bias"] == {"variance": (4, 5)}
    assert shapes["blocks.0.norm1.weight"] == {"variance": (6,)}


def test_gradients_of_rounding_in_a_matrix_are_not_scaled_up():
    start = {"k.weight": torch.ones(4, 3, dtype=torch.float64)}
    gradient = torch.full((4, 3), 1e-17, dtype=torch.float64)
    gradient[0] = 0.0  # a row whose second moment is 0
    fragments = unsplit(start)
    optimizer = build_optimizer(fragments, Optimiser(name="adafactor", lr=0.01, weight_decay=0.0))
    set_gradients(fragments, {"k.weight": gradient})
    optimizer.step()
    assert (fragments[0].parameter - start["k.weight"]).abs().max() < 1e-11


def test_gradients_of_rounding_are_not_scaled_up():
    """Those of key biases are 0 but for rounding, and differ between layouts."""
    start = {"k.bias": torch.ones(4, dtype=torch.float64)}
    fragments = unsplit(start)
    optimizer = build_optimizer(fragments, Optimiser(name="adafactor", lr=0.01))
    set_gradients(fragments, {"k.bias": torch.full((4,), 1e-17, dtype=torch.float64)})
    optimizer.step()
    assert (fragments[0].parameter - start["k.bias"]).abs().max() < 1e-11
