"""Replay a program against costs."""

from __future__ import annotations

from stretto.schedule.action import Kind
from stretto.schedule.check import check
from stretto.schedule.program import Program
from stretto.schedule.structure import ScheduleError
from stretto.simulate.costs import Costs
from stretto.simulate.encode import KINDS, Code, encode
from stretto.simulate.events import Events
from stretto.simulate.prices import BESIDE, Prices
from stretto.simulate.sweep import sweep
from stretto.simulate.tail import finish
from stretto.simulate.timeline import Timeline


def simulate(program: Program, costs: Costs | None = None) -> Timeline:
    """When every action of `program` starts and ends, each rank working through its order without a pause.

    Before lowering, a transfer starts when the result is there; in a lowered program when it has been sent
    and its receive is posted (rendezvous). Otherwise `Costs` says what takes time and what it keeps busy.
    Ranks that reduce tied parameters wait for one another; that reduction takes no time.

    Raises:
        ScheduleError: the program comes to a standstill; names ranks and actions.
        StrettoError: the costs do not fit the program.
    """
    costs = costs or Costs()
    prices = Prices(program, costs)
    code = encode(program)
    if not code.complete:
        check(program)  # says why
        raise ScheduleError(f"program {program.name!r} comes to a standstill")
    work = [0.0] * program.ranks
    for (stage, kind), count in code.counts.items():
        work[program.placement[stage]] += count * prices.times(stage).get(kind, 0.0)
    if costs.pair is not None:
        for pair in program.pairs:
            alone = sum(prices.times(action.stage)[action.kind] for action in pair)
            work[program.placement[pair[0].stage]] += (costs.pair - 1.0) * alone
    if _by_events(code, prices):
        play = Events(program, prices)
        play.run()
        if play.stuck:
            raise _standstill(program, play)
        line = Timeline(
            *(program, tuple(play.starts), tuple(play.ends), tuple(work), code.messages),
            costs=costs,
            arrivals=play.arrivals,
            queued=play.links.queued,
        )
    else:
        line = _swept(program, code, prices, work)
    return finish(line, prices)


def _swept(program: Program, code: Code, prices: Prices, work: list[float]) -> Timeline:
    """The replay in one pass."""
    kinds = len(KINDS)
    cost, delay = [0.0] * (program.stages * kinds), [0.0] * (program.stages * kinds)
    for stage in range(program.stages):
        for kind, time in prices.times(stage).items():
            cost[stage * kinds + KINDS[kind]] = time
        if (route := prices.forward[stage]) is not None:
            delay[stage * kinds + KINDS[Kind.F]] = route.delay
        if (route := prices.backward[stage]) is not None:
            for kind in (Kind.B, Kind.I):
                delay[stage * kinds + KINDS[kind]] = route.delay
    starts, ends = sweep(code, cost, delay)
    spans = [
        (first + 1, first + 1 + len(order)) for first, order in zip(code.first, program.orders, strict=True)
    ]
    return Timeline(
        program,
        tuple(starts[begin:end] for begin, end in spans),
        tuple(ends[begin:end] for begin, end in spans),
        tuple(work),
        code.messages,
        costs=prices.costs,
    )


def _by_events(code: Code, prices: Prices) -> bool:
    """Whether anything asks for the replay event by event."""
    program, costs = prices.program, prices.costs
    present = {kind for _, kind in code.counts}
    return (
        costs.blocking
        or (costs.contention and any(r and r.occupied for r in prices.forward + prices.backward))
        or (costs.pair is not None and bool(program.pairs))
        or any(kind in present and any(prices.beside[kind]) for kind in BESIDE)
        or (Kind.UPDATE in present and any(prices.reduce))
    )


def _standstill(program: Program, play: Events) -> ScheduleError:
    """A program that completes by itself, but not with these costs' blocking sends or blocks."""
    where = "; ".join(f"rank {rank} stands at {action}" for rank, action in sorted(play.stuck.items()))
    return ScheduleError(
        f"program {program.name!r} comes to a standstill with these costs: {where}",
        hint="with blocking sends, post receives earlier (a larger lookahead)"
        if play.costs.blocking
        else "a pair that runs as one block needs both inputs at its start; leave out pair",
    )
