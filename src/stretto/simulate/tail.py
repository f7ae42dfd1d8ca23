"""What a synchronous step does with its gradients: reductions, then the optimiser after all ranks."""

from __future__ import annotations

from dataclasses import replace

from stretto.schedule.action import Action, Kind
from stretto.simulate.prices import Prices
from stretto.simulate.timeline import Event, Timeline


def finish(line: Timeline, prices: Prices) -> Timeline:
    """`line` with the reductions and the update of a step whose weights do not change within it."""
    program = line.program
    if not program.trains or not (any(prices.reduce) or any(prices.update)):
        return line
    if any(action.kind is Kind.UPDATE for order in program.orders for action in order):
        return line  # done where they stand
    tail: list[Event] = []
    if any(prices.reduce):
        for rank in range(program.ranks):
            tail += _reductions(line, prices, rank)
    if any(prices.update):
        barrier = max(max((e.end for e in tail), default=0.0), line.makespan)
        for rank in range(program.ranks):
            tail += _updates(prices, rank, barrier)
    return replace(line, tail=tuple(tail))


def _reductions(line: Timeline, prices: Prices, rank: int) -> list[Event]:
    """One after another, each from its REDUCE_GRAD on, or all after the rank's last action.

    Those that stand in the order get their times there; the others are returned.
    """
    order, starts, ends = line.program.orders[rank], line.starts[rank], line.ends[rank]
    wanted: list[tuple[float, int, int | None]] = []  # from when, stage, place in the order
    if line.program.lowered:
        wanted += [(starts[at], a.stage, at) for at, a in enumerate(order) if a.kind is Kind.REDUCE_GRAD]
    else:
        last = {a.stage: at for at, a in enumerate(order) if a.kind in (Kind.B, Kind.W)}
        wanted += [(ends[at], stage, None) for stage, at in sorted(last.items(), key=lambda item: item[1])]
    free = 0.0
    if not prices.costs.reduce_overlaps:
        free = max((end for end, a in zip(ends, order, strict=True) if a.kind.is_compute), default=0.0)
    found: list[Event] = []
    for ready, stage, at in wanted:
        cost = prices.reduce[stage]
        # what takes no time waits for no other that runs beside
        start = max(ready, free) if cost or not prices.costs.reduce_overlaps else ready
        end = start + cost
        free = max(free, end)
        if at is None:
            found.append(Event(rank, Action(stage, Kind.REDUCE_GRAD), start, end))
        else:
            starts[at], ends[at] = start, end
    return found


def _updates(prices: Prices, rank: int, start: float) -> list[Event]:
    """The optimiser on the rank's stages, one after another."""
    found: list[Event] = []
    for stage in prices.program.stages_of(rank):
        end = start + prices.update[stage]
        found.append(Event(rank, Action(stage, Kind.UPDATE), start, end))
        start = end
    return found
