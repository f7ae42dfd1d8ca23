"""Overlapped pairs as blocks: an order cut into steps."""

from __future__ import annotations

from itertools import pairwise

from stretto.schedule.action import Kind
from stretto.schedule.program import Program

Step = tuple[int, ...]  # places in a rank's order that are done as one

# between the two of a pair, what prepares the second has to come before both
_AHEAD = frozenset({Kind.RECV_F, Kind.RECV_B, Kind.UNSHARD, Kind.RELOAD, Kind.RECOMPUTE})


def steps_of(program: Program, rank: int, blocks: bool) -> list[Step]:
    """The places of a rank's order, in the order in which they are done.

    With `blocks` the two actions of a pair are one step. Of what stands between them, receives, gathers,
    reloads and repeated forwards come before the block, the rest after it.
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
        between = range(at + 1, then)
        steps += [(place,) for place in between if order[place].kind in _AHEAD]
        steps.append((at, then))
        steps += [(place,) for place in between if order[place].kind not in _AHEAD]
        at = then + 1
    return steps
