"""Replay a program against costs."""

from __future__ import annotations

from dataclasses import replace
from math import fsum

from stretto.program.action import Action, ActionKind
from stretto.program.checks.check import check
from stretto.program.program import Program, ScheduleError
from stretto.program.replay.costs import OVERLAPPED, Costs, Prices
from stretto.program.replay.events import Events
from stretto.program.replay.sweep import KINDS, CompiledProgram, encode, sweep
from stretto.program.replay.timeline import Event, Timeline


def finish(timeline: Timeline, prices: Prices) -> Timeline:
    """Return the timeline with reductions and update at the end of a synchronous step."""
    program = timeline.program
    if not program.trains or not (any(prices.reduce) or any(prices.update)):
        return timeline
    if any(action.kind is ActionKind.UPDATE for order in program.orders for action in order):
        return timeline  # reductions and updates are in the orders
    tail: list[Event] = []
    if any(prices.reduce):
        for rank in range(program.ranks):
            tail += _reductions(timeline, prices, rank)
    if any(prices.update):
        barrier = max(max((e.end for e in tail), default=0.0), timeline.makespan)
        for rank in range(program.ranks):
            # the optimiser on the rank's stages, one after another
            start = barrier
            for stage in prices.program.stages_of(rank):
                end = start + prices.update[stage]
                tail.append(Event(rank, Action(stage, ActionKind.UPDATE), start, end))
                start = end
    return replace(timeline, tail=tuple(tail))


def _reductions(timeline: Timeline, prices: Prices, rank: int) -> list[Event]:
    """Time a rank's reductions, in sequence: each from its REDUCE_GRAD on, or all after its last action.

    Those in the order get their times there; the others are returned as events.
    """
    order = timeline.program.orders[rank]
    starts = timeline.starts[rank]
    ends = timeline.ends[rank]
    reductions: list[tuple[float, int, int | None]] = []  # earliest start, stage, index in the order
    if timeline.program.lowered:
        reductions += [
            (starts[at], a.stage, at) for at, a in enumerate(order) if a.kind is ActionKind.REDUCE_GRAD
        ]
    else:
        last = {a.stage: at for at, a in enumerate(order) if a.kind in (ActionKind.B, ActionKind.W)}
        by_place = sorted(last.items(), key=lambda item: item[1])
        reductions += [(ends[at], stage, None) for stage, at in by_place]
    free = 0.0
    if not prices.costs.reduce_overlaps:
        free = max((end for end, a in zip(ends, order, strict=True) if a.kind.is_compute), default=0.0)
    events: list[Event] = []
    for ready, stage, at in reductions:
        cost = prices.reduce[stage]
        # a reduction that takes no time does not queue behind others
        start = max(ready, free) if cost or not prices.costs.reduce_overlaps else ready
        end = start + cost
        free = max(free, end)
        if at is None:
            events.append(Event(rank, Action(stage, ActionKind.REDUCE_GRAD), start, end))
        else:
            starts[at], ends[at] = start, end
    return events


def simulate(program: Program, costs: Costs | None = None) -> Timeline:
    """Return when every action of `program` starts and ends if each rank starts its next action as soon as it
    can.

    Before lowering, a transfer starts when the result exists; in a lowered program, when it has been sent and
    its receive is posted (rendezvous). `Costs` defines what else takes time and which resources it occupies.
    Ranks that reduce tied parameters wait for one another; that reduction takes no time.

    Raises:
        ScheduleError: the program deadlocks; the message names ranks and actions.
        StrettoError: the costs do not fit the program.
    """
    costs = costs or Costs()
    prices = Prices(program, costs)
    code = encode(program)
    if not code.complete:
        check(program)  # raises with the reason
        raise ScheduleError(f"program {program.name!r} deadlocks")
    work = [0.0] * program.ranks
    for (stage, kind), count in code.counts.items():
        work[program.placement[stage]] += count * prices.times(stage).get(kind, 0.0)
    if costs.pair is not None:
        for pair in program.pairs:
            alone = fsum(prices.times(action.stage)[action.kind] for action in pair)
            work[program.placement[pair[0].stage]] += (costs.pair - 1.0) * alone
    if _by_events(code, prices):
        replay_ = Events(program, prices, {kind for _, kind in code.counts})
        replay_.run()
        if replay_.stuck:
            # the program completes, but not with blocking sends or pairs as blocks
            waits = "; ".join(
                f"rank {rank} waits at {action}" for rank, action in sorted(replay_.stuck.items())
            )
            raise ScheduleError(
                f"program {program.name!r} deadlocks with these costs: {waits}",
                hint="with blocking sends, post receives earlier (a larger lookahead)"
                if replay_.costs.blocking
                else "a pair that runs as one block needs both inputs at its start; leave out pair",
            )
        timeline = Timeline(
            program=program,
            starts=tuple(replay_.starts),
            ends=tuple(replay_.ends),
            work=tuple(work),
            transfers=code.messages,
            costs=costs,
            arrivals=replay_.arrivals,
            queued=replay_.queued,
        )
    else:
        timeline = _swept(program, code, prices, work)
    return finish(timeline, prices)


def _swept(program: Program, code: CompiledProgram, prices: Prices, work: list[float]) -> Timeline:
    """Replay in one pass."""
    kinds = len(KINDS)
    cost, delay = [0.0] * (program.stages * kinds), [0.0] * (program.stages * kinds)
    for stage in range(program.stages):
        for kind, time in prices.times(stage).items():
            cost[stage * kinds + KINDS[kind]] = time
        if (route := prices.forward[stage]) is not None:
            delay[stage * kinds + KINDS[ActionKind.F]] = route.delay
        if (route := prices.backward[stage]) is not None:
            for kind in (ActionKind.B, ActionKind.I):
                delay[stage * kinds + KINDS[kind]] = route.delay
    starts, ends = sweep(code, cost, delay)
    spans = [
        (first + 1, first + 1 + len(order)) for first, order in zip(code.first, program.orders, strict=True)
    ]
    return Timeline(
        program=program,
        starts=tuple(starts[begin:end] for begin, end in spans),
        ends=tuple(ends[begin:end] for begin, end in spans),
        work=tuple(work),
        transfers=code.messages,
        costs=prices.costs,
    )


def _by_events(code: CompiledProgram, prices: Prices) -> bool:
    """True if the costs require the discrete-event replay."""
    program, costs = prices.program, prices.costs
    present = {kind for _, kind in code.counts}
    return (
        costs.blocking
        or (costs.contention and any(r and r.occupied for r in prices.forward + prices.backward))
        or (costs.pair is not None and bool(program.pairs))
        or any(kind in present and any(prices.overlapped[kind]) for kind in OVERLAPPED)
        or (ActionKind.UPDATE in present and any(prices.reduce))
    )
