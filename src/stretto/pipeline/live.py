"""What is alive on a rank between the actions of a step, and which buffer each received message goes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import Work

from stretto.parallel.linear import ParallelLinear
from stretto.schedule.action import Action, Kind

Deferred = list[tuple[ParallelLinear, Tensor, Tensor]]


@dataclass(frozen=True)
class Boundary:
    """Shape and type of an activation between two stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StageLive:
    """One stage of this rank: by microbatch, what its next actions need."""

    def __init__(self, module: nn.Module, microbatches: int) -> None:
        self.module = module
        self.x: list[Any] = [None] * microbatches  # input; its gradient gathers in x.grad
        self.y: list[Any] = [None] * microbatches  # output on its way out, detached
        self.root: list[Any] = [None] * microbatches  # where backward starts
        self.dx: list[Any] = [None] * microbatches  # input gradient on its way out
        self.deferred: list[Deferred] = [[] for _ in range(microbatches)]  # weight gradients between I and W
        self.queue: Deferred = []  # where this stage's layers put them

    def split_backward(self, queue: Deferred) -> None:
        """From now on the stage's linear layers defer their weight gradients, into `queue`."""
        self.queue = queue
        for layer in self.module.modules():
            if isinstance(layer, ParallelLinear):
                layer.queue = self.queue


@dataclass
class Live:
    """One rank in one step."""

    stages: dict[int, StageLive]
    losses: list[Any]  # of the last stage, detached, by microbatch
    outputs: list[Any]  # of the last stage where there is no loss
    inputs: Sequence[Any] = ()
    targets: Sequence[Any] = ()
    scale: Tensor | None = None  # gradient of the loss
    receives: dict[Action, Work] = field(default_factory=dict[Action, Work])
    sends: dict[Action, tuple[Work, Tensor]] = field(default_factory=dict[Action, tuple[Work, Tensor]])

    def clear(self) -> None:
        """Drop the batch, so that nothing of it outlives the step."""
        self.inputs, self.targets = (), ()


def assign_slots(order: Iterable[Action]) -> dict[Action, int]:
    """A buffer number for every receive of one rank, by stage and direction, reused once the message is dead.

    A received tensor lives until the last backward action (B, or W) of its microbatch on that stage, in
    forward-only programs until its F.
    """
    order = list(order)
    ends = dict[tuple[int, int | None], int]()
    for at, action in enumerate(order):
        if action.kind.is_compute:
            ends[action.stage, action.microbatch] = at
    free = dict[tuple[int, Kind], list[int]]()
    made = dict[tuple[int, Kind], int]()
    held = dict[int, list[tuple[tuple[int, Kind], int]]]()
    slots = dict[Action, int]()
    for at, action in enumerate(order):
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            pool = (action.stage, action.kind)
            spare = free.setdefault(pool, [])
            slot = spare.pop() if spare else made.get(pool, 0)
            if slot == made.get(pool, 0):
                made[pool] = slot + 1
            slots[action] = slot
            held.setdefault(ends[action.stage, action.microbatch], []).append((pool, slot))
        for pool, slot in held.pop(at, ()):
            free.setdefault(pool, []).append(slot)
    return slots


Call = Callable[[], None]
