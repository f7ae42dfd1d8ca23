"""Check that one microbatch is in flight at a time."""

from __future__ import annotations

from stretto.program.action import COMPUTE, MEMORY_SAVING, ActionKind
from stretto.program.program import Program


def in_turn(program: Program) -> bool:
    """True if a single rank runs forward and backward of each microbatch, of one stage, before it begins the
    next, with nothing else between the two.
    """
    if program.ranks != 1 or program.versions:
        return False
    (order,) = program.orders
    done = [action for action in order if action.kind in COMPUTE or action.kind in MEMORY_SAVING]
    turns = zip(done[::2], done[1::2], strict=False)
    return len(done) == 2 * program.microbatches and all(
        (first.kind, second.kind) == (ActionKind.F, ActionKind.B)
        and (first.stage, first.microbatch) == (second.stage, second.microbatch)
        for first, second in turns
    )
