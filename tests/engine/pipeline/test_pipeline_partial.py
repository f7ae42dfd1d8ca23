"""Gradients that tensor-parallel ranks share in: summed in one go, and before the weights are updated."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import on_ranks
from stretto import Layout, schedule
from stretto.engine.parallel.collectives import copy_to, reduce_from
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import SharedSlice
from stretto.engine.parallel.traffic import traffic
from stretto.engine.pipeline import PartialGradient, Pipeline, ReplicatedWeights
from stretto.engine.pipeline.shared import sum_partial


def slices() -> None:
    """Whole tensors, rows, columns, two groups and two types: one sum for each group and type."""
    rank, world = dist.get_rank(), dist.group.WORLD
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    full, rows, columns = (nn.Parameter(torch.zeros(4, 3, dtype=torch.float64)) for _ in range(3))
    short = nn.Parameter(torch.zeros(5))
    for p in (full, rows, columns, short):
        p.grad = torch.full_like(p, 1.0 + rank)
    parts = [
        PartialGradient(full, SharedSlice(0, 0, 4, world)),
        PartialGradient(rows, SharedSlice(0, 1, 2, pairs)),
        PartialGradient(columns, SharedSlice(1, 2, 1, world)),
        PartialGradient(short, SharedSlice(0, 0, 5, world)),
    ]
    with traffic() as sent:
        sum_partial(parts)
    assert sent.calls == {"all-reduce": 3}
    paired = 3.0 if rank < 2 else 7.0
    for p, summed, value in (
        (full, torch.ones(4, 3, dtype=torch.bool), 10.0),
        (rows, torch.tensor([[0], [1], [1], [0]]).expand(4, 3).bool(), paired),
        (columns, torch.tensor([[0, 0, 1]]).expand(4, 3).bool(), 10.0),
        (short, torch.ones(5, dtype=torch.bool), 10.0),
    ):
        assert p.grad is not None
        assert torch.equal(p.grad, torch.full_like(p, 1.0 + rank).masked_fill(summed, value))
    sum_partial([])


class Features(nn.Module):
    """x w, of which each rank works out every other feature, so that each has a part of the gradient."""

    def __init__(self, weight: Tensor, mesh: Mesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.group = mesh.group("tp")
        self.mine = torch.arange(len(weight)) % mesh.size("tp") == mesh.index("tp")

    def forward(self, x: Tensor) -> Tensor:
        """[n, features] to the same."""
        return reduce_from((copy_to(x, self.group) @ self.weight) * self.mine, self.group)


def updated_within_the_step() -> None:
    """PipeDream on one pipeline rank is plain descent, one update a microbatch."""
    mesh, m = Mesh(Layout(tp=2)), 3
    stream = torch.Generator().manual_seed(1)
    start = torch.randn(4, 4, dtype=torch.float64, generator=stream)
    inputs = list(torch.randn(m, 2, 4, dtype=torch.float64, generator=stream))
    layer = Features(start, mesh)
    pipe = Pipeline(
        [layer],
        schedule("pipedream", 1, m),
        mesh,
        lambda y, t: ((y - t) ** 2).sum(),
        weights=ReplicatedWeights(optimizer=lambda p: torch.optim.SGD(p, lr=0.02)),
        partial=[PartialGradient(layer.weight, SharedSlice(0, 0, 4, mesh.group("tp")))],
    )
    weight = start.clone().requires_grad_()
    for _ in range(2):
        losses = pipe.step(inputs, inputs)
        for at, x in enumerate(inputs):
            loss = ((x @ weight - x) ** 2).sum()
            (grad,) = torch.autograd.grad(loss, weight)
            torch.testing.assert_close(losses[at], loss.detach(), rtol=1e-12, atol=1e-12)
            weight = (weight - 0.02 * grad).detach().requires_grad_()
        torch.testing.assert_close(layer.weight.detach(), weight.detach(), rtol=1e-12, atol=1e-12)
    pipe.close()
    mesh.close()


def test_partial_gradients_of_a_group_are_summed_at_once():
    on_ranks(4, slices)


def test_weights_updated_within_the_step_have_whole_gradients():
    on_ranks(2, updated_within_the_step)
