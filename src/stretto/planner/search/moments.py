"""When the ranks of a schedule are full: how many microbatches each of their stages holds then.

A moment is one of a real step: whatever a rank holds then is a lower bound on its peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from stretto.errors import StrettoError
from stretto.planner.search.task import Order
from stretto.program import schedule
from stretto.program.action import Action, Kind
from stretto.program.program import Program
from stretto.program.schedules.traits import is_searched

# what a microbatch between I and W holds beside one in flight: less of it, or much more where blocks are
# computed again
_WEIGHTS = 0.5, 8.0
_DEEP = 64  # ranks whose programs are so dear that a looser bound is cheaper
_SAMPLE, _MANY = 2, 16  # ranks, and microbatches that are more than usual ones hold


@dataclass(frozen=True)
class Moment:
    """A rank as it begins a backward.

    Attributes:
        flights: of each of its stages, microbatches that wait for their backward, this one among them.
        waiting: of each, microbatches between I and W.
        at: which of its stages goes backward.
    """

    flights: tuple[int, ...]
    waiting: tuple[int, ...]
    at: int


def few(order: Order, pp: int, microbatches: int) -> int:
    """A number of microbatches that fill a schedule's ranks nearly as much: with more, they hold no less. One
    for many batches, so that few programs are made; all of them where two ranks hold their whole batch.
    """
    if _holds_all(order, microbatches):
        return microbatches
    times = 1 if pp >= _DEEP else 2
    return min(microbatches, times * max(pp, dict(order.options).get("group") or 1))


@lru_cache(maxsize=4096)
def moments(order: Order, pp: int, microbatches: int) -> tuple[tuple[Moment, ...], ...]:
    """For each rank the fullest moments at which each of its stages goes backward, the fullest of all first,
    and with the most that waits; empty where the schedule cannot be made for so many, or is searched for.
    """
    if is_searched(order.name):
        return ()
    try:
        program = schedule(order.name, pp, microbatches, **dict(order.options))
    except StrettoError:
        return ()  # which the rules refuse
    return tuple(_of_rank(program, rank) for rank in range(pp))


@lru_cache(maxsize=4096)
def _holds_all(order: Order, microbatches: int) -> bool:
    """Whether each of two ranks holds the whole batch at once."""
    options = tuple((name, value) for name, value in order.options if name != "group")
    found = moments(Order(order.name, options), _SAMPLE, min(_MANY, microbatches))
    return bool(found) and all({*own[0].flights} == {min(_MANY, microbatches)} for own in found)


def _of_rank(program: Program, rank: int) -> tuple[Moment, ...]:
    place = {stage: at for at, stage in enumerate(program.stages_of(rank))}
    order: Sequence[Action] = program.orders[rank]
    split = {a.stage for a in order if a.kind is Kind.W}
    flights, waiting = [0] * len(place), [0] * len(place)
    best = dict[tuple[int, float], tuple[float, Moment]]()
    for stage, kind, _ in order:
        at = place[stage]
        if kind is Kind.F:
            flights[at] += 1
        elif kind is Kind.B or kind is Kind.I:
            for weight in _WEIGHTS:
                held = sum(flights) + weight * sum(waiting)
                known = best.get((at, weight))
                if known is None or held > known[0]:
                    best[at, weight] = held, Moment(tuple(flights), tuple(waiting), at)
            flights[at] -= 1
            waiting[at] += kind is Kind.I and stage in split
        elif kind is Kind.W:
            waiting[at] -= 1
    return tuple({moment: None for _, moment in sorted(best.values(), key=lambda one: -one[0])})
