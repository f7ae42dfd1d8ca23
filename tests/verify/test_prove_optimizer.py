"""The updates of references beside those of the optimisers that they judge: two versions of each rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stretto.engine.optim.build import build_optimizer
from stretto.job.optimiser import Optimiser
from stretto.verify.optimizer import ReferenceOptimizer

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.tok.weight": (11, 6),
    "blocks.0.norm1.weight": (6,),
    "blocks.0.attn.qkv.weight": (16, 6),
    "blocks.0.attn.proj.weight": (6, 8),
    "blocks.0.attn.relative": (2, 4),
    "blocks.0.mlp.router.gate.weight": (4, 6),
    "blocks.0.mlp.experts.up": (4, 5, 6),
    "blocks.0.mlp.experts.up_bias": (4, 5),
}
RULES = {
    "adamw": Optimiser(lr=0.01, betas=(0.7, 0.9), weight_decay=0.3, no_decay=("*proj*",)),
    "sgd": Optimiser(name="sgd", lr=0.1, momentum=0.8, weight_decay=0.3),
    "sgd without momentum or decay": Optimiser(name="sgd", lr=0.1, weight_decay=0.0),
    "lamb": Optimiser(name="lamb", lr=0.1, betas=(0.7, 0.9), eps=1e-6, weight_decay=0.3),
    "adafactor": Optimiser(name="adafactor", lr=0.05, weight_decay=0.3),
    "muon": Optimiser(name="muon", lr=0.1, weight_decay=0.3),
    "muon of another momentum": Optimiser(name="muon", lr=0.1, momentum=0.8),
}


def values(seed: int) -> dict[str, Tensor]:
    """A tensor of each shape; the members of stacks are of other sizes, so that they cannot share a norm."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}
    for name in drawn:
        if ".experts." in name:
            for member, size in zip(drawn[name], (1.0, 3.0, 0.2, 7.0), strict=True):
                member.mul_(size)
    return drawn


@pytest.mark.parametrize("how", RULES.values(), ids=RULES.keys())
def test_two_versions_of_each_rule_agree(how: Optimiser) -> None:
    """Over several updates at rates that change, one of them without a gradient of some parameter."""
    parameters, reference_parameters = (
        [(n, nn.Parameter(t)) for n, t in values(0).items()] for _ in range(2)
    )
    judged, reference = build_optimizer(parameters, how), ReferenceOptimizer(reference_parameters, how)
    for number in range(4):
        gradients, rate = values(10 + number), how.lr / (number + 1)
        for name, parameter in (*parameters, *reference_parameters):
            missing = number == 1 and name == "blocks.0.attn.proj.weight"
            parameter.grad = None if missing else gradients[name].clone()
        for group in judged.param_groups:
            group["lr"] = rate
        judged.step()
        reference.step(rate)
        assert all(parameter.grad is None for _, parameter in reference_parameters)
    for (name, parameter), (_, other) in zip(parameters, reference_parameters, strict=True):
        assert (parameter - values(0)[name]).abs().max() > 1e-3
        assert torch.allclose(parameter, other, rtol=1e-11, atol=1e-12), name
