"""Grades `ddp`: DDP's gradient reduction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.engine.parallel.traffic import traffic
from stretto.learn.checks import Check, at_most, proved, split
from stretto.prove import prove

RANKS = 3
TEMPLATE = '''import torch
import torch.distributed as dist
from torch import nn


def reduce_gradients(model: nn.Module, bucket_bytes: int) -> None:
    """Average `grad` of all parameters over all ranks of the default group, in place.

    Args:
        model: the copy of this rank, after its backward; `parameters()` yields a tied weight once.
        bucket_bytes: size of a bucket.
    """
    raise NotImplementedError
'''


class _TinyModel(nn.Module):
    """Word embeddings tied to the head, and a layer that only samples with word 0 use."""

    def __init__(self, vocabulary: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rare = nn.Linear(width, width)
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if (used := (x == 0).any(1)).any():
            h = h + used[:, None, None] * self.rare(h)
        return self.head(self.blocks(h).tanh() * self.scale)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def checks(reader: Mapping[str, Any], random: Random) -> Iterator[Check]:
    """Compare gradients and weights with those of one process, then count messages and bytes."""
    vocabulary, width = random.randint(11, 17), random.randint(5, 9)
    blocks = random.randint(4, 7)
    x = torch.randint(1, vocabulary, (2 * RANKS, 4))
    x[0, 0] = 0  # on rank 0
    batch = x, x.roll(-1, 1)
    bucket_bytes = random.randint(3, 4) * width * (width + 1) * 8  # a few layers in float64

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, local: Any) -> Tensor:
        loss = _loss(model, local)
        loss.backward()
        reader["reduce_gradients"](model, bucket_bytes)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    report = prove(
        lambda: _TinyModel(vocabulary, width, blocks),
        lambda model: model,
        batch,
        step,
        loss=_loss,
        share=lambda batch, rank: split(batch, RANKS, rank),
        timeout=15.0,
    )
    yield proved("gradients and weights are those of one process", report)

    model = _TinyModel(vocabulary, width, blocks).double()
    _loss(model, split(batch, RANKS, dist.get_rank())).backward()
    sizes = [each.numel() * 8 for each in model.parameters() if each.requires_grad]
    buckets, filled = 0, bucket_bytes
    for size in sizes:
        if filled + size > bucket_bytes:
            buckets, filled = buckets + 1, 0
        filled += size
    with traffic() as sent:
        reader["reduce_gradients"](model, bucket_bytes)
    yield at_most(
        "bytes: the bound of an all-reduce",
        sent.total,
        2 * (RANKS - 1) / RANKS * sum(sizes),
        "{actual} bytes leave a rank, and 2 (n-1)/n S are {limit}: is a gradient sent twice, or gathered?",
    )
    yield at_most(
        "messages: one per bucket",
        sum(sent.calls.values()),
        buckets,
        f"{{actual}} messages for {len(sizes)} parameters; buckets of {bucket_bytes} bytes make {{limit}}",
    )
