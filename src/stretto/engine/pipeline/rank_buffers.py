"""Tensors that are alive on a rank between the actions of a step, and the buffer of each received message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import Work

from stretto.engine.parallel.tensor.linear import AccumulatesOwnGradients, DeferredGradient
from stretto.program.action import Action, ActionKind

if TYPE_CHECKING:
    from stretto.engine.pipeline.walk import GraphSplit

Bundle = tuple[Tensor, ...]  # tensors that one stage passes to the next, in one direction
# inputs, targets and gradients of the loss, for each microbatch of a step
Batch = tuple[Sequence[Any], Sequence[Any], Sequence[Tensor | None]]
Call = Callable[[], None]


@dataclass(frozen=True)
class Boundary:
    """Shape and dtype of one tensor between two stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def has_gradient(self) -> bool:
        """True if the tensor has a gradient, which is sent back."""
        return self.dtype.is_floating_point or self.dtype.is_complex


Boundaries = tuple[Boundary, ...]


class StageBuffers:
    """Inputs of the next actions of one stage of this rank, by microbatch."""

    def __init__(self, module: nn.Module, microbatches: int) -> None:
        self.module = module
        self.x: list[Any] = [None] * microbatches  # inputs; their gradients accumulate in .grad
        self.y: list[Any] = [None] * microbatches  # outputs not yet sent or used, detached
        self.root: list[Any] = [None] * microbatches  # start of the backward, for each floating-point output
        self.dx: list[Any] = [None] * microbatches  # input gradients not yet sent or used
        self.weight_work: list[Any] = [None] * microbatches  # deferred work, between I and W
        self.queue: list[DeferredGradient] = []  # deferred weight gradients of this stage's layers
        self.walk: GraphSplit | None = None  # for stages without layers that can defer

    def split_backward(self, queue: list[DeferredGradient]) -> None:
        """Make the stage's linear layers defer their weight gradients into `queue`; the backward of a stage
        without such layers is split by walking its graph.
        """
        self.queue = queue
        layers = [layer for layer in self.module.modules() if isinstance(layer, AccumulatesOwnGradients)]
        for layer in layers:
            layer.queue = queue
        if not layers:
            from stretto.engine.pipeline.walk import GraphSplit

            self.walk = GraphSplit(self.module.parameters())


class RankBuffers:
    """The live tensors of one rank, by microbatch, in slots of a ring buffer.

    Args:
        modules: stages of the rank.
        ring: number of slots, which is the number of microbatches after which a slot is reused.

    Attributes:
        inputs, targets, scales: current batches; `scales` are the gradients of losses.
        losses: losses of the last stage, detached.
        outputs: outputs of the last stage, without a loss.
        receives, sends: messages in flight.
    """

    def __init__(self, modules: Mapping[int, nn.Module], ring: int) -> None:
        self.ring = ring
        self.stages = {s: StageBuffers(module, ring) for s, module in modules.items()}
        self.inputs: list[Any] = [None] * ring
        self.targets: list[Any] = [None] * ring
        self.scales: list[Tensor | None] = [None] * ring
        self.losses: list[Any] = [None] * ring
        self.outputs: list[Any] = [None] * ring
        self.receives = dict[Action, Any]()
        self.sends = dict[Action, tuple[list[Work], Any]]()

    def place(self, action: Action) -> int:
        """Return the slot of the action's microbatch."""
        return microbatch_of(action) % self.ring

    def key(self, action: Action) -> Action:
        """Return the key of an action's message in `receives` and `sends`: its microbatch is the slot."""
        return Action(action.stage, action.kind, self.place(action))

    def set_batch(self, at: int, microbatches: int, batch: Batch) -> None:
        """Store a batch in slots from `at`; a rank without the first or last stage need not have its
        parts.
        """
        for slots, values in zip((self.inputs, self.targets, self.scales), batch, strict=True):
            if len(values) == microbatches:
                slots[at : at + microbatches] = values

    def clear_batch(self, at: int, microbatches: int) -> None:
        """Drop a batch, so that its tensors do not outlive their step."""
        for slots in (self.inputs, self.targets, self.scales):
            slots[at : at + microbatches] = [None] * microbatches


def assign_slots(order: Iterable[Action]) -> dict[Action, int]:
    """Allocate buffers for receives, like registers: an index for each, by stage and direction, reused after
    the message's last use.

    A received tensor lives until the last backward action (B or W) of its microbatch on that stage; in
    forward-only programs, until its F.
    """
    order = list(order)
    ends = dict[tuple[int, int | None], int]()
    for at, action in enumerate(order):
        if action.kind.is_compute:
            ends[action.stage, action.microbatch] = at
    free = dict[tuple[int, ActionKind], list[int]]()
    created = dict[tuple[int, ActionKind], int]()
    to_free = dict[int, list[tuple[tuple[int, ActionKind], int]]]()
    slots = dict[Action, int]()
    for at, action in enumerate(order):
        if action.kind in (ActionKind.RECV_F, ActionKind.RECV_B):
            pool = (action.stage, action.kind)
            spare = free.setdefault(pool, [])
            slot = spare.pop() if spare else created.get(pool, 0)
            if slot == created.get(pool, 0):
                created[pool] = slot + 1
            slots[action] = slot
            to_free.setdefault(ends[action.stage, action.microbatch], []).append((pool, slot))
        for pool, slot in to_free.pop(at, ()):
            free.setdefault(pool, []).append(slot)
    return slots


def same_memory(a: object, b: Tensor) -> bool:
    """True if two tensors share a storage."""
    return isinstance(a, Tensor) and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def microbatch_of(action: Action) -> int:
    """Return the microbatch of an action that has one."""
    assert action.microbatch is not None
    return action.microbatch
