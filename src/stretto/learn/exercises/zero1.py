"""Grades `zero1`: a sharded optimizer: ZeRO-1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.engine.parallel.control import gather_json
from stretto.engine.parallel.traffic import traffic
from stretto.learn.checks import Check, at_most, proved, split
from stretto.learn.models import square_loss
from stretto.prove import prove

RANKS = 3
TEMPLATE = '''import torch
import torch.distributed as dist
from torch import Tensor


class ShardedOptimizer:
    """An optimizer of which each rank holds the states of a shard.

    Args:
        parameters: all parameters of the model, with the same values on every rank.
        make_optimizer: builds torch.optim.AdamW of a list of tensors.
    """

    def __init__(self, parameters, make_optimizer) -> None:
        raise NotImplementedError

    def step(self) -> None:
        """Update the shard with the averaged `grad` of its parameters, and gather all weights."""
        raise NotImplementedError
'''


class _Facade(torch.optim.Optimizer):
    """Makes an optimizer of torch of the reader's, so that the proof can watch it."""

    def __init__(self, parameters: list[nn.Parameter], inner: Any) -> None:
        super().__init__(parameters, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        self.inner.step()


def checks(reader: Mapping[str, Any], random: Random) -> Iterator[Check]:
    """Compare weights with those of one process, then count states and bytes."""
    width, blocks = random.randint(5, 9), random.randint(2, 5)
    batch = torch.randn(2 * RANKS, width), torch.randn(2 * RANKS, 1)
    rate = random.uniform(1e-3, 1e-2)
    inner = list[torch.optim.Optimizer]()

    def plain() -> nn.Module:
        layers = [layer for _ in range(blocks) for layer in (nn.Linear(width, width), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(width, 1))

    def make_optimizer(tensors: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(tensors, lr=rate)

    def recorded(tensors: list[Tensor]) -> torch.optim.Optimizer:
        inner.append(make_optimizer(tensors))
        return inner[-1]

    def parallel(model: nn.Module) -> Any:
        parameters = list(model.parameters())
        return model, _Facade(parameters, reader["ShardedOptimizer"](parameters, recorded))

    sent = list[int]()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, local: Any) -> Tensor:
        loss = square_loss(model, local)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad = None if parameter.grad is None else parameter.grad / RANKS
        with traffic() as counted:
            optimizer.step()
        sent.append(counted.total)
        optimizer.zero_grad()
        return loss

    report = prove(
        plain,
        parallel,
        batch,
        step,
        loss=square_loss,
        optimizer=make_optimizer,  # pyright: ignore[reportArgumentType]
        share=lambda batch, rank: split(batch, RANKS, rank),
        steps=3,
        timeout=15.0,
    )
    check = proved("weights after three steps are those of one process", report)
    if check.problem is not None:
        hint = "see whether the updated values of every shard are copied into the parameters of every rank"
        check = check._replace(problem=f"{check.problem}; {hint}")
    yield check

    sizes = [parameter.numel() for parameter in plain().parameters()]
    stored = sum(
        state.numel() for each in inner for states in each.state.values() for state in states.values()
    )
    steps = sum(len(each.state) for each in inner)  # AdamW counts the steps of each tensor
    yield at_most(
        "states: 1/n of them on each rank",
        (stored - steps) / 2,
        sum(sizes) / RANKS + max(sizes),
        "it holds states of {actual} elements of "
        f"{sum(sizes)}, at most {{limit}} are its share: build the inner optimizer on the shard alone",
    )
    total: list[int] = gather_json(sent[-1])
    yield at_most(
        "bytes: the bound of an all-gather",
        sum(total) / RANKS,
        (RANKS - 1) / RANKS * 8 * (sum(sizes) + RANKS * RANKS),  # the shards may be padded
        "{actual} bytes leave a rank on average, and (n-1)/n S are {limit}: send each weight once",
    )
