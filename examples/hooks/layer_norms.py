"""Logs the norm of every parameter's gradient, before clipping, of a language model under any layout."""

from __future__ import annotations

from math import sqrt

import torch
import torch.distributed as dist

from stretto.run.train.hooks import HookedRun
from stretto.run.train.language_task import LanguageTask

EVERY = 2  # steps


def before_update(run: HookedRun) -> None:
    """Sum the squares over the ranks that hold one copy of a parameter, and gather those of all stages."""
    assert isinstance(run.task, LanguageTask)
    if run.step % EVERY:
        return
    squares = dict[str, float]()
    for fragment in run.task.model.fragments:
        gradient = fragment.parameter.grad if fragment.gradient is None else fragment.gradient
        square = torch.zeros((), dtype=torch.float64, device=run.task.device)
        for piece in fragment.counted.pieces:
            if piece.owned and gradient is not None:
                square += piece.of_local(gradient).double().square().sum()
        if fragment.holders is not None:  # each of them has this fragment, in the same order
            dist.all_reduce(square, group=fragment.holders)
        squares[fragment.name] = float(square)
    ranks: list[dict[str, float]] = [{}] * run.world
    dist.all_gather_object(ranks, squares)  # on every rank, as every collective
    scale = run.task.model.loss_factor  # of float16
    names = dict.fromkeys(name for rank in ranks for name in rank)
    # a tied weight counts in one of its stages
    norms = {name: max(sqrt(rank.get(name, 0.0)) for rank in ranks) / scale for name in names}
    run.log({f"grad_norm/{name}": norm for name, norm in norms.items()})
