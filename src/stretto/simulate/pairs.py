"""Overlapped pairs as blocks: an order cut into steps."""

from __future__ import annotations

from itertools import pairwise

from stretto.schedule.action import Action, Kind
from stretto.schedule.program import Program

Step = tuple[int, ...]  # places in a rank's order that are done as one


def steps_of(program: Program, rank: int, blocks: bool) -> list[Step]:
    """The places of a rank's order, in the order in which they are done.

    With `blocks` the two actions of a pair are one step. Of what stands between them, what follows from the
    first comes after the block: sending or moving its results, releasing parameters. The rest, such as the
    receive of the second's input, comes before it.
    """
    order = program.orders[rank]
    if not (blocks and program.pairs):
        return [(at,) for at in range(len(order))]
    steps: list[Step] = []
    compute = [at for at, action in enumerate(order) if action.kind.is_compute]
    second = {
        first: then for first, then in pairwise(compute) if (order[first], order[then]) in program.pairs
    }
    at = 0
    while at < len(order):
        then = second.get(at)
        if then is None:
            steps.append((at,))
            at += 1
            continue
        between = [(place, _follows(order[at], order[place])) for place in range(at + 1, then)]
        steps += [(place,) for place, after in between if not after]
        steps.append((at, then))
        steps += [(place,) for place, after in between if after]
        at = then + 1
    return steps


def _follows(first: Action, between: Action) -> bool:
    """Whether an action between the two of a pair needs the first to be over."""
    same = (between.stage, between.microbatch) == (first.stage, first.microbatch)
    return same or between.kind is Kind.RESHARD
