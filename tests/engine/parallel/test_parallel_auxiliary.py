"""Losses of layers: added in the backward, counted once a microbatch."""

from __future__ import annotations

import pytest
import torch
from expert_layer import LLAMA, TIGHT, Case, close, data, plain_layer, plan_of, reference
from torch import Tensor

from stretto import Layout
from stretto.engine.parallel.expert.auxiliary import Auxiliary, bind_auxiliary
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import parallelize
from stretto.engine.parallel.recompute import recompute
from stretto.errors import StrettoError


def test_auxiliary_losses_without_a_receiver_are_an_error() -> None:
    mesh, layer = Mesh(Layout()), plain_layer(LLAMA)
    parallelize(layer, plan_of(Case(Layout())), mesh)
    x = data(Case(Layout()))[0][0]
    with pytest.raises(StrettoError, match="nothing to report them to") as caught:
        layer.mlp(x)
    assert "bind_auxiliary" in str(caught.value.hint)
    layer.eval()
    layer.mlp(x)  # in evaluation there are none


def test_losses_are_counted_once_a_microbatch() -> None:
    """Forwards without gradients, repeated ones, and evaluation add nothing; each microbatch has the scale
    of its own forward.
    """
    mesh, layer, auxiliary = Mesh(Layout()), plain_layer(LLAMA), Auxiliary()
    parallelize(layer, plan_of(Case(Layout())), mesh)
    bind_auxiliary(layer, auxiliary)
    x = data(Case(Layout()))[0][0].requires_grad_()
    weight = layer.mlp.router.gate.weight

    def gradient(scale: float) -> Tensor:
        weight.grad = None
        auxiliary.scale = scale
        y = layer.mlp(x)
        auxiliary.scale = torch.nan  # of a microbatch whose forward comes before this one's backward
        y.backward(torch.zeros_like(y))
        assert weight.grad is not None
        return weight.grad

    with torch.no_grad():
        layer.mlp(x)
    assert not auxiliary.losses.any()
    single, three = gradient(1.0).clone(), gradient(3.0)
    torch.testing.assert_close(three, 3 * single)
    wanted = reference(Case(Layout()))
    close(auxiliary.losses, 2 * wanted.losses, "both microbatches")
    close(auxiliary.loads["mlp"], 2 * wanted.load, "both microbatches")
    recompute(layer.mlp)
    gradient(1.0)
    close(auxiliary.losses, 3 * wanted.losses, "one that was repeated")
    layer.eval()
    layer.mlp(x).sum().backward()
    close(auxiliary.losses, 3 * wanted.losses, "evaluation")
    auxiliary.reset()
    assert not auxiliary.losses.any()
    assert not auxiliary.loads


def test_dropped_choices_are_counted() -> None:
    mesh, layer, auxiliary = Mesh(Layout()), plain_layer(TIGHT), Auxiliary()
    parallelize(layer, plan_of(Case(Layout(), TIGHT)), mesh)
    bind_auxiliary(layer, auxiliary)
    x = data(Case(Layout()))[0][0]
    for _ in range(2):
        layer.mlp(x).sum().backward()
    router = layer.mlp.router
    choice = router.choose(router.logits(x))
    within_capacity = router.keep(choice.experts, choice.weights)
    assert float(auxiliary.dropped) == 2 * int((~within_capacity).sum()) > 0
