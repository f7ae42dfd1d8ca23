"""What one rank says to others in a layer, for one microbatch: exact bytes, by axis, kind and action."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stretto.cost.activations import Computing
from stretto.cost.shape import ModelShape
from stretto.cost.time.collectives import Collective

Phase = Literal["F", "R", "I", "W"]  # forward, the forward again, input gradient, weight gradient


@dataclass(frozen=True)
class Message:
    """A collective of one rank.

    Attributes:
        axis: the group: "tp", "cp", "ep", "expert_tp".
        size: bytes, as `collective_seconds` counts them.
        phase: the action that it belongs to.
        count: how often.
        beside: runs beside the layer's own computation, as a ring's next keys and values do.
    """

    axis: str
    kind: Collective
    size: int
    phase: Phase
    count: int = 1
    beside: bool = False


def block_traffic(shape: ModelShape, how: Computing) -> tuple[Message, ...]:
    """Of one block, recomputation included as `how.recompute` says."""
    if how.tp == 1:
        return ()
    whole = how.element * how.tokens * shape.hidden
    if how.sequence_parallel:
        forward = [Message("tp", "all-gather", whole, "F", 2), Message("tp", "reduce-scatter", whole, "F", 2)]
        back = [
            Message("tp", "all-gather", whole, "I", 2),
            Message("tp", "reduce-scatter", whole, "I", 2),
            Message("tp", "all-gather", whole, "W", 2),
        ]
    else:
        forward = [Message("tp", "all-reduce", whole, "F", 2)]
        back = [Message("tp", "all-reduce", whole, "I", 2)]
    again = (
        [Message(m.axis, m.kind, m.size, "R", m.count) for m in forward] if how.recompute == "full" else []
    )
    return (*forward, *again, *back)


def embedding_traffic(shape: ModelShape, how: Computing) -> tuple[Message, ...]:
    """Of the embedding: the parts of a vocabulary that is split over tp, summed."""
    if how.tp == 1:
        return ()
    kind: Collective = "reduce-scatter" if how.sequence_parallel else "all-reduce"
    size = how.element * how.tokens * shape.hidden
    back = (Message("tp", "all-gather", size, "I"),) if how.sequence_parallel else ()
    return (Message("tp", kind, size, "F"), *back)


def head_traffic(shape: ModelShape, how: Computing) -> tuple[Message, ...]:
    """Of the last norm, the logits and the loss."""
    if how.tp == 1:
        return ()
    size = how.element * how.tokens * shape.hidden
    gathered = (Message("tp", "all-gather", size, "F"),) if how.sequence_parallel else ()
    kind: Collective = "reduce-scatter" if how.sequence_parallel else "all-reduce"
    return (*gathered, Message("tp", "all-reduce", 4 * how.tokens, "F", 3), Message("tp", kind, size, "I"))
