"""Optimisers by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from stretto.engine.optim.adafactor import Adafactor
from stretto.engine.optim.adam import Lamb, NarrowAdamW
from stretto.engine.optim.base import decay_groups, is_block_matrix
from stretto.engine.optim.muon import Muon
from stretto.engine.parallel.fragment import ParameterFragment, unsharded_fragments
from stretto.spec.optimiser import Optimiser


class DecoupledSGD(torch.optim.SGD):
    """SGD whose weight decay stays out of the momentum, SGDW (Loshchilov and Hutter 2019, algorithm 1)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore
        """One update."""
        kept = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, kept, strict=True):
            moving = [p for p in group["params"] if p.grad is not None]
            if moving and decay:
                torch._foreach_mul_(moving, 1.0 - group["lr"] * decay)
            group["weight_decay"] = 0.0
        super().step()
        for group, decay in zip(self.param_groups, kept, strict=True):
            group["weight_decay"] = decay


def build_optimizer(
    parameters: Iterable[ParameterFragment] | Iterable[tuple[str, nn.Parameter]], how: Optimiser
) -> torch.optim.Optimizer:
    """The optimiser of this rank's fragments, or of one process's parameters by name.

    Weight decay leaves out vectors (norms and biases), experts' biases, and what `no_decay` names. Lamb,
    Adafactor and Muon look at whole tensors: their steps are collective over the fragments' holders. The
    states are read and loaded through `stretto.engine.optim.states`.
    """
    fragments = _fragments(parameters)
    groups = decay_groups(fragments, how.weight_decay, how.no_decay)
    if how.name == "lamb":
        return Lamb(groups, fragments, how.lr, how.betas, how.eps)
    if how.name == "adafactor":
        return Adafactor(groups, fragments, how.lr)
    if how.name == "muon":
        return _muon(fragments, how)
    if how.name == "adamw":
        if how.states == "bfloat16":
            return NarrowAdamW(groups, fragments, how.lr, how.betas, how.eps)
        return torch.optim.AdamW(groups, lr=how.lr, betas=how.betas, eps=how.eps, fused=True)
    if how.weight_decay:
        return DecoupledSGD(groups, lr=how.lr, momentum=how.momentum)
    return torch.optim.SGD(groups, lr=how.lr, momentum=how.momentum)


def _fragments(
    parameters: Iterable[ParameterFragment] | Iterable[tuple[str, nn.Parameter]],
) -> list[ParameterFragment]:
    fragments = list[ParameterFragment]()
    for parameter in parameters:
        fragments += (
            [parameter] if isinstance(parameter, ParameterFragment) else unsharded_fragments([parameter])
        )
    return fragments


def _muon(fragments: Sequence[ParameterFragment], how: Optimiser) -> Muon:
    by_muon = [f for f in fragments if is_block_matrix(f.name, f.placed.shape)]
    others = [f for f in fragments if not is_block_matrix(f.name, f.placed.shape)]
    rest = None
    if others:
        groups = decay_groups(others, how.weight_decay, how.no_decay)
        rest = torch.optim.AdamW(groups, lr=how.lr, betas=how.betas, eps=how.eps, fused=True)
    groups = decay_groups(by_muon, how.weight_decay, how.no_decay)
    return Muon(groups, by_muon, how.lr, how.usual_momentum, rest)
