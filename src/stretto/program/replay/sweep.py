"""The replay of a program whose order of events does not depend on its costs: one pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from stretto.program.replay.encode import Code


def sweep(code: Code, cost: Sequence[float], delay: Sequence[float]) -> tuple[list[float], list[float]]:
    """Start and end of every slot.

    A node starts when the one before it on its rank is over and its message is there; a message leaves once
    what makes it is over and, in a lowered program, its receive is posted.

    Args:
        code: of a program that completes.
        cost: time of a node, by class.
        delay: time of its message, by class.
    """
    starts = [0.0] * code.size
    ends = [0.0] * code.size
    if not code.transfers and not code.meetings:
        _plain(code, cost, delay, starts, ends)
        return starts, ends
    come: list[float] = []
    done = 0
    for at, slot, last in code.meetings:
        _posted(code=code, begin=done, end=at, cost=cost, delay=delay, starts=starts, ends=ends, come=come)
        starts[slot] = ends[slot] = max(ends[member] for member in last)
        done = at + 1
    _posted(
        code=code,
        begin=done,
        end=len(code.slots),
        cost=cost,
        delay=delay,
        starts=starts,
        ends=ends,
        come=come,
    )
    for slot, before in zip(code.transfers, code.transfers_before, strict=True):
        starts[slot] = ends[slot] = ends[before]
    for there, send, receive in zip(come, code.sends, code.receives, strict=True):
        ends[send] = ends[receive] = there
    return starts, ends


def _plain(
    code: Code, cost: Sequence[float], delay: Sequence[float], starts: list[float], ends: list[float]
) -> None:
    """Without sends and receives in the orders."""
    for slot, source, kind in zip(code.slots, code.sources, code.kinds, strict=True):
        start = ends[slot - 1]
        if source:
            there = ends[source] + delay[kind]
            if there > start:
                start = there
        starts[slot] = start
        ends[slot] = start + cost[kind]


def _posted(
    code: Code,
    begin: int,
    end: int,
    cost: Sequence[float],
    delay: Sequence[float],
    starts: list[float],
    ends: list[float],
    come: list[float],
) -> None:
    """Nodes `begin` to `end` of a lowered program; `come` gets when their messages are there."""
    nodes = zip(code.slots, code.befores, code.sources, code.posts, code.kinds, strict=True)
    for slot, before, source, posted, kind in islice(nodes, begin, end):
        start = ends[before]
        if source:
            there = ends[source]
            if ends[posted] > there:
                there = ends[posted]
            there += delay[kind]
            come.append(there)
            if there > start:
                start = there
        starts[slot] = start
        ends[slot] = start + cost[kind]
