"""Optimisers by name: which parameters decay, and by what rule."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from stretto.engine.optim.build import build_optimizer
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement
from stretto.job.optimiser import Optimiser


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2), nn.Linear(2, 2)).double()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    net[3].requires_grad_(False)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 3, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def split(net: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    every = list(net.parameters())
    return [p for p in every if p.dim() > 1], [p for p in every if p.dim() == 1]


def test_matrices_decay_and_vectors_do_not():
    net = model()
    optimizer = build_optimizer(net.named_parameters(), Optimiser(weight_decay=0.3))
    assert isinstance(optimizer, torch.optim.AdamW)
    matrices, vectors = split(net)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]
    assert [[id(p) for p in g["params"]] for g in optimizer.param_groups] == [
        [id(p) for p in matrices],
        [id(p) for p in vectors],
    ]


def test_no_decay_patterns_exempt_matrices():
    net = model()
    optimizer = build_optimizer(
        net.named_parameters(), Optimiser(name="sgd", weight_decay=0.3, no_decay=("2.*", "[3-9].weight"))
    )
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(net[0].weight)]


def test_fragments_decay_by_the_shape_of_the_plain_tensor():
    """Which is no longer that of a flat shard; biases of experts are stacked."""
    shapes = {"w": (4, 3), "norm": (4,), "experts.up": (2, 4, 3), "experts.up_bias": (2, 4)}
    fragments = [
        ParameterFragment(
            name=n,
            parameter=nn.Parameter(torch.zeros(2)),
            placed=ShardPlacement.unsharded(n, s).part(s, 0, 2),
        )
        for n, s in shapes.items()
    ]
    for name in ("adamw", "sgd", "lamb", "adafactor", "muon"):
        groups = build_optimizer(fragments, Optimiser(name=name, weight_decay=0.3)).param_groups
        decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
        assert [f.name for f in fragments if id(f.parameter) in decayed] == ["w", "experts.up"], name


def test_a_rank_with_vectors_only_has_one_group():
    optimizer = build_optimizer(nn.LayerNorm(4).named_parameters(), Optimiser(weight_decay=0.3))
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0]


def test_adamw_is_torchs():
    config = Optimiser(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    net, plain = model(), model()
    matrices, vectors = split(plain)
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6, foreach=False, fused=False)
    trained = train(net, build_optimizer(net.named_parameters(), config))
    for a, b in zip(trained, train(plain, adamw), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_without_decay_is_torchs(momentum: float):
    config = Optimiser(name="sgd", lr=0.01, momentum=momentum, weight_decay=0.0)
    net, plain = model(), model()
    trained = train(net, build_optimizer(net.named_parameters(), config))
    torch_trained = train(plain, torch.optim.SGD(plain.parameters(), lr=0.01, momentum=momentum))
    for a, b in zip(trained, torch_trained, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_decay_of_sgd_stays_out_of_its_momentum(momentum: float):
    """Loshchilov and Hutter 2019, algorithm 1, written out: w <- (1 - lr decay) w - lr m."""
    lr, decay = 0.01, 0.3
    config = Optimiser(name="sgd", lr=lr, momentum=momentum, weight_decay=decay)
    net, plain = model(), model()
    trained = train(net, build_optimizer(net.named_parameters(), config))

    torch.manual_seed(1)
    plain[3].requires_grad_(False)
    moments = [torch.zeros_like(p) for p in plain.parameters()]
    for _ in range(4):
        plain.zero_grad()
        plain(torch.randn(5, 3, dtype=torch.float64)).square().sum().backward()
        with torch.no_grad():
            for p, m in zip(plain.parameters(), moments, strict=True):
                if p.grad is not None:
                    m.mul_(momentum).add_(p.grad)
                    p.mul_(1.0 - lr * decay if p.dim() > 1 else 1.0).sub_(lr * m)
    for a, b in zip(trained, plain.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-15)


def test_frozen_parameters_do_not_decay():
    for name in ("sgd", "adamw", "lamb", "adafactor", "muon"):
        net = model()
        before = net[3].weight.clone()
        train(net, build_optimizer(net.named_parameters(), Optimiser(name=name, lr=0.1, weight_decay=0.5)))
        assert torch.equal(net[3].weight, before), name


def test_the_decay_is_in_the_groups_after_a_step():
    net = model()
    optimizer = build_optimizer(net.named_parameters(), Optimiser(name="sgd", lr=0.1, weight_decay=0.5))
    train(net, optimizer, 1)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0.0]  # as a checkpoint saves them


@pytest.mark.parametrize(
    "config",
    [
        Optimiser(name="lamb"),
        Optimiser(name="adafactor"),
        Optimiser(name="muon"),
        Optimiser(betas=(0.9, 0.95), states="bfloat16"),
    ],
)
def test_gradients_are_not_held_after_an_update(config: Optimiser) -> None:
    """Or their copies in the masters' type, which take as much memory as the masters."""
    matrix = nn.Parameter(torch.zeros(4, 4))
    name = "blocks.0.mlp.up.weight"
    optimizer = build_optimizer([(name, matrix)], config)
    matrix.grad = torch.ones(4, 4)
    gradient = weakref.ref(matrix.grad)
    optimizer.step()
    assert matrix.any()
    matrix.grad = None
    assert gradient() is None
