"""Optimisers by name, with weight decay on matrices only."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from stretto.config.schema import OptimConfig, TrainConfig
from stretto.optim.rate import Rate


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser over this rank's parameters; weight decay leaves out vectors (norms and biases)."""
    named = list(named)
    groups = [
        {"params": [p for name, p in named if _decays(name, p)], "weight_decay": config.weight_decay},
        {"params": [p for name, p in named if not _decays(name, p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    if config.weight_decay:
        return _DecoupledSGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() > 1 and not name.endswith("bias")  # biases of experts are stacked


def build_rate(config: TrainConfig) -> Rate:
    """The learning rate of every step of the run."""
    rate = config.optim.rate
    return Rate(
        rate.schedule,
        config.optim.lr,
        config.train.steps,
        rate.warmup,
        rate.min_ratio,
        rate.decay_fraction,
        rate.decay,
    )


class _DecoupledSGD(torch.optim.SGD):
    """SGD whose weight decay stays out of the momentum, as in AdamW (Loshchilov and Hutter 2019,
    algorithm 1).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore
        kept = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, kept, strict=True):
            moving = [p for p in group["params"] if p.grad is not None]
            if moving and decay:
                torch._foreach_mul_(moving, 1.0 - group["lr"] * decay)
            group["weight_decay"] = 0.0
        super().step()
        for group, decay in zip(self.param_groups, kept, strict=True):
            group["weight_decay"] = decay
