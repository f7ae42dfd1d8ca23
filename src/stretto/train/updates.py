"""Updates of the weights within a step: which microbatches each takes in, what a token is worth in it."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.schedule.action import Kind
from stretto.schedule.program import Program


def update_of(program: Program) -> list[int]:
    """For each microbatch, the number of the update that applies its gradient; all 0 for a synchronous
    program, whose one update follows it.
    """
    found = [0] * program.microbatches
    if not program.versions:
        return found
    last = program.depth - 1  # the stages agree: an update is the same microbatches everywhere
    updates = 0
    for stage, kind, i in program.orders[program.placement[last]]:
        if stage != last:
            continue
        if kind is Kind.UPDATE:
            updates += 1
        elif kind in (Kind.B, Kind.W) and i is not None:
            found[i] = updates
    return found


def scales(updates: Sequence[int], tokens: Sequence[float]) -> list[float]:
    """What the loss of each microbatch is multiplied by: 1 over the tokens of its update.

    Args:
        updates: of each microbatch, as `update_of` has them.
        tokens: of each microbatch, those that count, over all replicas.
    """
    whole: dict[int, float] = {}
    for update, count in zip(updates, tokens, strict=True):
        whole[update] = whole.get(update, 0.0) + count
    # where nothing counts there is no gradient either
    return [1.0 / (whole[update] or 1.0) for update in updates]
