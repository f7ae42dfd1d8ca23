"""Builds optimisers by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from stretto.engine.optim.adafactor import Adafactor
from stretto.engine.optim.adam import Lamb, NarrowAdamW
from stretto.engine.optim.base import decay_groups, is_block_matrix
from stretto.engine.optim.muon import Muon
from stretto.engine.optim.user_optimizer import build_user_optimizer
from stretto.engine.parallel.fragment import ParameterFragment, unsharded_fragments
from stretto.job.optimiser import Optimiser


class DecoupledSGD(torch.optim.SGD):
    """SGD with weight decay outside of the momentum, SGDW (Loshchilov and Hutter 2019, algorithm 1)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore
        """Run one update."""
        decays = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays, strict=True):
            moving = [p for p in group["params"] if p.grad is not None]
            if moving and decay:
                torch._foreach_mul_(moving, 1.0 - group["lr"] * decay)
            group["weight_decay"] = 0.0
        super().step()
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay


def build_optimizer(
    parameters: Iterable[ParameterFragment] | Iterable[tuple[str, nn.Parameter]], config: Optimiser
) -> torch.optim.Optimizer:
    """Return the optimiser of this rank's fragments, or of one process's parameters by name.

    Weight decay excludes vectors (norms and biases), experts' biases, and the names in `no_decay`. Lamb,
    Adafactor and Muon depend on full tensors: their steps are collective over the fragments' holders. The
    states are read and loaded through `stretto.engine.optim.states`.
    """
    fragments = list[ParameterFragment]()
    for parameter in parameters:
        if isinstance(parameter, ParameterFragment):
            fragments.append(parameter)
        else:
            fragments += unsharded_fragments([parameter])
    if config.user_defined:
        return build_user_optimizer(fragments, config)
    groups = decay_groups(fragments, config.weight_decay, config.no_decay)
    if config.name == "lamb":
        return Lamb(groups, fragments, config.lr, config.betas, config.eps)
    if config.name == "adafactor":
        return Adafactor(groups, fragments, config.lr)
    if config.name == "muon":
        return _muon(fragments, config)
    if config.name == "adamw":
        if config.states == "bfloat16":
            return NarrowAdamW(groups, fragments, config.lr, config.betas, config.eps)
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    if config.weight_decay:
        return DecoupledSGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)


def _muon(fragments: Sequence[ParameterFragment], config: Optimiser) -> Muon:
    by_muon = [f for f in fragments if is_block_matrix(f.name, f.placed.shape)]
    others = [f for f in fragments if not is_block_matrix(f.name, f.placed.shape)]
    other_optimizer = None
    if others:
        groups = decay_groups(others, config.weight_decay, config.no_decay)
        other_optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
    groups = decay_groups(by_muon, config.weight_decay, config.no_decay)
    return Muon(groups, by_muon, config.lr, config.effective_momentum, other_optimizer)
