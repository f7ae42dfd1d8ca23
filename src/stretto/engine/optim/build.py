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
from stretto.engine.optim.rate import Rate
from stretto.engine.optim.sgd import DecoupledSGD
from stretto.engine.parallel.fragment import Fragment, whole_fragments
from stretto.run.config.schema import OptimConfig, TrainConfig

MUON_MOMENTUM = 0.95  # where the job says none


def build_optimizer(
    parameters: Iterable[Fragment] | Iterable[tuple[str, nn.Parameter]], config: OptimConfig
) -> torch.optim.Optimizer:
    """The optimiser of this rank's fragments, or of parameters of one process by name.

    Weight decay leaves out vectors (norms and biases), biases of experts, and what `no_decay` names. Lamb,
    Adafactor and Muon look at whole tensors: their steps are collective over the fragments' holders. How to
    read and load the states: `stretto.engine.optim.states`.
    """
    fragments = _fragments(parameters)
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


def _fragments(parameters: Iterable[Fragment] | Iterable[tuple[str, nn.Parameter]]) -> list[Fragment]:
    found = list[Fragment]()
    for given in parameters:
        found += [given] if isinstance(given, Fragment) else whole_fragments([given])
    return found


def _muon(fragments: Sequence[Fragment], config: OptimConfig) -> Muon:
    by_muon = [f for f in fragments if is_block_matrix(f.name, f.placed.shape)]
    others = [f for f in fragments if not is_block_matrix(f.name, f.placed.shape)]
    rest = None
    if others:
        groups = decay_groups(others, config.weight_decay, config.no_decay)
        rest = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    groups = decay_groups(by_muon, config.weight_decay, config.no_decay)
    return Muon(groups, by_muon, config.lr, config.momentum or MUON_MOMENTUM, rest)


def build_rate(config: TrainConfig) -> Rate:
    """The learning rate of every step of the run."""
    rate = config.optim.rate
    return Rate(
        schedule=rate.schedule,
        peak=config.optim.lr,
        steps=config.train.steps,
        warmup=rate.warmup,
        min_ratio=rate.min_ratio,
        decay_fraction=rate.decay_fraction,
        decay=rate.decay,
    )
