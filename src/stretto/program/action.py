"""One step of one rank, and its text.

The text is that of torch.distributed.pipelining, so that files interchange: `2F0` is the forward of stage 2
for microbatch 0, `1SEND_F3` sends the result of `1F3`, `0REDUCE_GRAD` reduces the gradients of stage 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from itertools import chain, repeat
from typing import NamedTuple


class ActionKind(StrEnum):
    """What an action does."""

    F = "F"  # forward
    B = "B"  # full backward, I and W in one
    I = "I"  # input gradient
    W = "W"  # weight gradient
    UPDATE = "U"  # optimiser step of one stage
    SEND_F = "SEND_F"  # send the stage's output to the next stage
    RECV_F = "RECV_F"  # post the receive of the stage's input; the F that uses it waits
    SEND_B = "SEND_B"  # send the gradient of the stage's input to the previous stage
    RECV_B = "RECV_B"  # post the receive of the gradient of the stage's output; the B or I waits
    REDUCE_GRAD = "REDUCE_GRAD"  # reduce the stage's gradients over data parallel ranks
    REDUCE_TIED = "REDUCE_TIED"  # sum the gradients of parameters that several stages share
    UNSHARD = "UNSHARD"  # gather the stage's sharded parameters (ZeRO-3)
    RESHARD = "RESHARD"  # release them
    RECOMPUTE = "RECOMPUTE"  # repeat a forward that kept only its input, right before the backward needs it
    OFFLOAD = "OFFLOAD"  # move the activations of a microbatch to host memory
    RELOAD = "RELOAD"  # bring them back

    # Enum's hash is a Python call, and actions are dictionary keys millions of times
    __hash__ = str.__hash__

    @property
    def is_compute(self) -> bool:
        """True for F, B, I and W, the kinds that a schedule orders."""
        return self in COMPUTE

    @property
    def is_transfer(self) -> bool:
        return self in TRANSFER

    @property
    def has_microbatch(self) -> bool:
        """True if the action concerns one microbatch. `U` may name the last one whose gradient it applies."""
        return self in WITH_MICROBATCH


COMPUTE = frozenset({ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W})
TRANSFER = frozenset({ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.SEND_B, ActionKind.RECV_B})
MEMORY_SAVING = frozenset({ActionKind.RECOMPUTE, ActionKind.OFFLOAD, ActionKind.RELOAD})
WITH_MICROBATCH = COMPUTE | TRANSFER | MEMORY_SAVING


class Action(NamedTuple):
    """One step of one rank; `microbatch` is None if the action concerns the whole stage."""

    stage: int
    kind: ActionKind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


def actions(stage: int, kind: ActionKind, microbatches: int) -> list[Action]:
    """Return a stage's actions of a kind for microbatches 0 to `microbatches` - 1."""
    row = list(_block(stage, kind, 0))
    for start in range(_BLOCK, microbatches, _BLOCK):
        row += _block(stage, kind, start)
    del row[microbatches:]
    return row


def actions_and_none(stage: int, kind: ActionKind, microbatches: range) -> Iterator[Action | None]:
    """Yield a stage's actions of a kind for some microbatches, then None without end.

    An order that completes still completes, and holds no more activations, without some of its microbatches.
    So an order for many microbatches, without the Nones, also serves for fewer.
    """
    every = actions(stage, kind, microbatches.stop)
    return chain(every[microbatches.start :: microbatches.step], repeat(None))


_BLOCK = 16


@lru_cache(maxsize=16384)
def _block(stage: int, kind: ActionKind, start: int) -> tuple[Action, ...]:
    # programs share actions: to create one takes ten times as long as to place it in an order
    return tuple(map(Action, repeat(stage), repeat(kind), range(start, start + _BLOCK)))
