"""Grades `tensor`: column and row parallel linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch
from torch import nn

from stretto.engine.parallel.traffic import traffic
from stretto.errors import counted
from stretto.learn.checks import Check, at_most, proved, shaped
from stretto.learn.models import random_blocks, square_loss, train_step
from stretto.prove import Split, prove

RANKS = 2
TEMPLATE = '''import torch
import torch.distributed as dist
from torch import Tensor, nn


class ColumnLinear(nn.Module):
    """This rank's output features of a linear layer: [batch, in] to [batch, out / n].

    Args:
        linear: the plain layer, with the same values on every rank.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class RowLinear(nn.Module):
    """This rank's input features of a linear layer: [batch, in / n] to [batch, out], summed over the ranks.

    Args:
        linear: the plain layer, with the same values on every rank.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError
'''


def checks(reader: Mapping[str, Any], random: Random) -> Iterator[Check]:
    """Compare shapes, then all of a training step with one process, then count messages and bytes."""
    width, rows = random.randint(5, 9), random.randint(3, 6)
    hidden = RANKS * random.randint(6, 10)
    batch = torch.randn(rows, width).double(), torch.randn(rows, width).double()

    def parallel(model: Any) -> nn.Module:
        for block in model:
            block.up, block.down = reader["ColumnLinear"](block.up), reader["RowLinear"](block.down)
        return model

    model: Any = parallel(random_blocks(2, width, hidden))
    up, down = model[0].up, model[0].down
    yield shaped("shape of ColumnLinear.weight", up.weight, [hidden // RANKS, width])
    yield shaped("shape of RowLinear.weight", down.weight, [width, hidden // RANKS])
    yield shaped("shape of ColumnLinear's output", up(batch[0]), [rows, hidden // RANKS])
    gather = {"*.up.*": Split(0), "*.down.weight": Split(1)}
    for blocks in (1, 2):  # a gradient that is not reduced is exactly a summand in one block alone
        report = prove(
            lambda count=blocks: random_blocks(count, width, hidden),
            parallel,
            batch,
            train_step,
            loss=square_loss,
            reduction="same",
            gather=gather,
            timeout=15.0,
        )
        yield proved(f"a training step of {counted(blocks, 'block')} is that of one process", report)

    with traffic() as sent:
        square_loss(model, batch).backward()
    yield at_most(
        "messages: two per block",
        sum(sent.calls.values()),
        4,
        "{actual} messages for two blocks, {limit} are enough: f in the backward and g in the forward",
    )
    yield at_most(
        "bytes: those of two all-reduces per block",
        sent.total,
        4 * 2 * (RANKS - 1) / RANKS * rows * width * 8,
        "{actual} bytes leave a rank, {limit} are enough: reduce [batch, width], not the hidden features",
    )
