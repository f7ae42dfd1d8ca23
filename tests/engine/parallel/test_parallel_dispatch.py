"""Tokens to experts on other ranks and back, in uneven numbers: none, all to one, all dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from ranks import on_ranks
from stretto import Layout
from stretto.engine.parallel.expert.dispatch import ExpertRanks, mix, plan
from stretto.engine.parallel.mesh import Mesh

EXPERTS, HIDDEN = 8, 5


def choices(rank: int, how: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Experts and weights [n, k] of one rank's tokens, and which choices are kept."""
    stream = torch.Generator().manual_seed(rank)
    n, k = (0 if how == "none here" and rank == 1 else 3 + 2 * rank), 1 if how == "one choice" else 3
    experts = torch.rand(n, EXPERTS, generator=stream).argsort(1)[:, :k]
    if how == "all to one":
        experts = torch.full((n, k), 5)
    weights = torch.rand(n, k, generator=stream, dtype=torch.float64)
    within_capacity = None
    if how == "some dropped":
        within_capacity = torch.rand(n, k, generator=stream) < 0.5
    if how == "all dropped":
        within_capacity = torch.zeros(n, k, dtype=torch.bool)
    return experts, weights, within_capacity


def tokens(rank: int, n: int) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(100 + rank)
    x, dy = (torch.randn(n, HIDDEN, generator=stream, dtype=torch.float64) for _ in range(2))
    return x, dy


def matrix(expert: int) -> Tensor:
    """Return an expert's output for a row."""
    stream = torch.Generator().manual_seed(200 + expert)
    return torch.randn(HIDDEN, HIDDEN, generator=stream, dtype=torch.float64)


def reference(x: Tensor, experts: Tensor, weights: Tensor, within_capacity: Tensor | None) -> Tensor:
    y = 0 * x + 0 * weights.sum()
    for token in range(len(x)):
        for choice in range(experts.shape[1]):
            if within_capacity is None or bool(within_capacity[token, choice]):
                row = x[token] @ matrix(int(experts[token, choice]))
                y = y.index_add(0, torch.tensor([token]), (weights[token, choice] * row)[None])
    return y


def close(computed: Tensor, plain: Tensor, label: str) -> None:
    torch.testing.assert_close(computed, plain, rtol=1e-12, atol=1e-13, msg=lambda text: f"{label}: {text}")


def check(mesh: Mesh, how: str) -> None:
    ranks, label = ExpertRanks.of(mesh), f"{mesh.layout}, {how}, rank {mesh.rank}"
    experts, weights, within_capacity = choices(mesh.rank, how)
    x, dy = tokens(mesh.rank, len(experts))
    x.requires_grad_()
    weights.requires_grad_()
    wanted = reference(x, experts, weights, within_capacity)
    dx, dw = torch.autograd.grad(wanted, (x, weights), dy)
    way = plan(experts, within_capacity, EXPERTS, ranks)
    rows = way.to_experts(x)
    assert len(rows) == way.groups.rows == len(way.groups.numbers), label
    first = ranks.ep_index * EXPERTS // ranks.ep
    parts = [
        rows[a:b] @ matrix(first + g) * (ranks.tp_index + 1) / sum(range(ranks.tp + 1))
        for g, a, b in way.groups.filled()
    ]  # parts of a sum over the ranks that hold slices
    y = way.from_experts(torch.cat([rows[:0], *parts]), weights)
    y.backward(dy)
    assert x.grad is not None
    assert weights.grad is not None
    close(y, wanted, label)
    close(x.grad, dx, label)
    close(weights.grad, dw, label)


LAYOUTS = [
    Layout(dp=4, ep=4),
    Layout(dp=4, ep=2),
    Layout(dp=4, expert_tp=4),
    Layout(dp=4, expert_tp=2, ep=2),
    Layout(tp=2, dp=2, ep=2, order="dp-tp-cp-ep-pp"),
    Layout(tp=2, dp=2, ep=2, order="ep-tp-cp-dp-pp"),
    Layout(dp=4, expert_tp=1),
]
WAYS = ["many", "one choice", "all to one", "some dropped", "all dropped", "none here"]


def every_way() -> None:
    for layout in LAYOUTS:
        mesh = Mesh(layout)
        for how in WAYS:
            check(mesh, how)
        mesh.close()


def test_there_and_back() -> None:
    on_ranks(4, every_way)


def test_one_rank_sorts_its_tokens() -> None:
    experts = torch.tensor([[2, 0], [1, 2], [0, 1]])
    way = plan(experts, torch.tensor([[True, True], [False, True], [True, True]]), 4, ExpertRanks())
    assert way.groups.counts == (2, 1, 2, 0)
    assert way.order.tolist() == [1, 4, 5, 0, 3]
    assert way.to_experts(torch.arange(3.0)[:, None]).flatten().tolist() == [0, 2, 2, 0, 1]


def test_mix_is_the_weighted_sum() -> None:
    copies = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    close(mix(copies, weights), (copies * weights[..., None]).sum(1), "mix")
    assert torch.autograd.gradcheck(mix, (copies, weights))


def test_mix_in_16_bits() -> None:
    """16-bit tensors stay 16-bit; gradients of the weights are summed in their own dtype."""
    copies, weights = torch.randn(4, 3, 5).bfloat16(), torch.rand(4, 3, requires_grad=True)
    mixed = mix(copies, weights)
    assert mixed.dtype is torch.bfloat16
    wanted = (copies.float() * weights[..., None]).sum(1)
    torch.testing.assert_close(mixed.float(), wanted, rtol=2e-2, atol=2e-2)
    mixed.sum().backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, copies.float().sum(-1))
