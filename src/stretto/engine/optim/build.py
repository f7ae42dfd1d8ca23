"""Optimisers by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from stretto.engine.optim.adafactor import Adafactor
from stretto.engine.optim.adamw import NarrowAdamW
from stretto.engine.optim.base import decay_groups, is_block_matrix
from stretto.engine.optim.lamb import Lamb
from stretto.engine.optim.muon import Muon
from stretto.engine.optim.sgd import DecoupledSGD
from stretto.engine.parallel.fragment import Fragment, whole_fragments
from stretto.spec.optimiser import Optimiser


def build_optimizer(
    parameters: Iterable[Fragment] | Iterable[tuple[str, nn.Parameter]], how: Optimiser
) -> torch.optim.Optimizer:
    """The optimiser of this rank's fragments, or of parameters of one process by name.

    Weight decay leaves out vectors (norms and biases), biases of experts, and what `no_decay` names. Lamb,
    Adafactor and Muon look at whole tensors: their steps are collective over the fragments' holders. How to
    read and load the states: `stretto.engine.optim.states`.
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


def _fragments(parameters: Iterable[Fragment] | Iterable[tuple[str, nn.Parameter]]) -> list[Fragment]:
    fragments = list[Fragment]()
    for parameter in parameters:
        fragments += [parameter] if isinstance(parameter, Fragment) else whole_fragments([parameter])
    return fragments


def _muon(fragments: Sequence[Fragment], how: Optimiser) -> Muon:
    by_muon = [f for f in fragments if is_block_matrix(f.name, f.placed.shape)]
    others = [f for f in fragments if not is_block_matrix(f.name, f.placed.shape)]
    rest = None
    if others:
        groups = decay_groups(others, how.weight_decay, how.no_decay)
        rest = torch.optim.AdamW(groups, lr=how.lr, betas=how.betas, eps=how.eps, fused=True)
    groups = decay_groups(by_muon, how.weight_decay, how.no_decay)
    return Muon(groups, by_muon, how.lr, how.usual_momentum, rest)
