"""Grades `sequence`: sequence parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.engine.parallel.traffic import traffic
from stretto.learn.checks import Check, at_most, proved, saved_bytes, shaped, split
from stretto.learn.models import random_blocks, square_loss
from stretto.prove import Split, prove

RANKS = 2
TEMPLATE = '''import torch
import torch.distributed as dist
from torch import Tensor, nn


class SequenceBlock(nn.Module):
    """This rank's part of a block: [batch, s / n, width] to the same.

    Args:
        block: the plain block, x + down(gelu(up(norm(x)))), with the same values on every rank.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def finish_gradients(model: nn.Sequential) -> None:
    """Sum those gradients over the ranks that are of this rank's positions alone.

    Args:
        model: SequenceBlocks, after the backward.
    """
    raise NotImplementedError
'''


def checks(reader: Mapping[str, Any], random: Random) -> Iterator[Check]:
    """Compare a training step with one process, then count saved activations and bytes."""
    width, rows = random.randint(5, 8), random.randint(2, 4)
    positions = RANKS * random.randint(3, 5)
    hidden = 4 * RANKS * random.randint(2, 4)
    batch = torch.randn(2, rows, positions, width).double().unbind()
    local = split(batch, RANKS, dist.get_rank(), dim=1)

    def parallel(model: Any) -> nn.Module:
        return nn.Sequential(*map(reader["SequenceBlock"], model))

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        loss = square_loss(model, batch) / RANKS  # a summand of the mean
        loss.backward()
        reader["finish_gradients"](model)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model: Any = parallel(random_blocks(1, width, hidden))
    yield shaped("shape of a block's output", model(local[0]), [rows, positions // RANKS, width])
    for count in (1, 2):
        report = prove(
            lambda count=count: random_blocks(count, width, hidden),
            parallel,
            batch,
            step,
            loss=square_loss,
            share=lambda batch, rank: split(batch, RANKS, rank, dim=1),
            reduction="sum",
            gather={"*.up.*": Split(0), "*.down.weight": Split(1)},
            names=lambda name: name,
            timeout=15.0,
        )
        yield proved(f"a training step of {count} block{'s' * (count > 1)} is that of one process", report)

    plain = random_blocks(1, width, hidden)
    yield at_most(
        "activations: 1/n, and one gathered input",
        saved_bytes(model, lambda: model(local[0])),
        saved_bytes(plain, lambda: plain(batch[0])) / RANKS + batch[0].nbytes * (1 - 1 / RANKS),
        "a block saves {actual} bytes for its backward, {limit} are enough: does the norm see all positions?",
    )
    with traffic() as sent:
        square_loss(model, local).backward()
    yield at_most(
        "bytes: those of tensor parallelism, or a gather more",
        sent.total,
        5 * (RANKS - 1) / RANKS * batch[0].nbytes,
        "{actual} bytes leave a rank for a block, {limit} are enough: an all-reduce sends twice what the "
        "reduce-scatter does",
    )
