"""List scheduling (Graham 1969): simulate orders in time, and let a rank do other work instead of waiting.

Every action depends on one other: F on the F of the previous stage, B or I on that of the next stage (at the
loss: on its F), W on its I. An action is ready when that one has ended, so the simulation only tracks which
action each end makes ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate, compress, islice
from typing import NamedTuple

from stretto.program.action import Action, ActionKind

_HOLDS = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.I: 0, ActionKind.W: -1}


class Scheduled(NamedTuple):
    """Orders and their makespan."""

    orders: tuple[tuple[Action, ...], ...]  # one per rank
    makespan: int  # in units of one F


def tighten(
    placement: Sequence[int],
    orders: Sequence[Sequence[Action]],
    limits: Sequence[int],
    copies: int = 1,
    backward: int = 2,
) -> Scheduled:
    """Return orders in which ranks run later actions instead of waiting, within a limit of activations.

    Whenever a rank is free it takes the first action of its given order that is ready. A forward is taken
    early only if the remainder of the given order, run after it, still obeys the limit. The remainder is then
    always part of an order that completes, so no deadlock occurs, and no rank exceeds its limit.

    Args:
        placement: rank of each stage, copy after copy.
        orders: per rank, its compute actions in an order that completes and obeys the limits.
        limits: per rank, the number of (stage, microbatch) activations that it may hold.
        copies: copies of the weights.
        backward: duration of a B, in units of any other action.
    """
    return _simulate(placement, orders, copies, backward, limits=limits)


def greedy(
    placement: Sequence[int],
    preferences: Sequence[Sequence[Action]],
    in_flight: int,
    copies: int = 1,
    backward: int = 2,
) -> Scheduled:
    """Return orders in which every free rank starts its most preferred action that is ready.

    A microbatch enters its copy of the model when fewer than `in_flight` are between their first forward and
    the end of their last backward there.

    Args:
        placement: rank of each stage, copy after copy.
        preferences: per rank, its compute actions, the most urgent first; they need not complete in that
            order.
        in_flight: largest number of microbatches in a copy at once, at least 1.
        copies: copies of the weights.
        backward: duration of a B, in units of any other action.
    """
    return _simulate(placement, preferences, copies, backward, in_flight=in_flight)


def _simulate(
    placement: Sequence[int],
    preferences: Sequence[Sequence[Action]],
    copies: int,
    backward: int,
    limits: Sequence[int] | None = None,
    in_flight: int | None = None,
) -> Scheduled:
    """Run each rank's actions, which are named by their index in its order of preference, to the end."""
    F, B = ActionKind.F, ActionKind.B
    I, W = ActionKind.I, ActionKind.W
    forwards, others = ([list[int]() for _ in preferences] for _ in range(2))  # that are ready, as heaps
    # per stage, the index of each microbatch's F, B or I, and W
    at_forward, at_backward, weights = ([dict[int | None, int]() for _ in placement] for _ in range(3))
    indices_of = {F: at_forward, W: weights}
    for order in preferences:
        for at, (stage, kind, i) in enumerate(order):
            indices_of.get(kind, at_backward)[stage][i] = at
    # what the end of a stage's F, and of its B or I, makes ready: rank, heap, index of each microbatch's
    depth = len(placement) // copies
    after_forward = [
        (placement[stage], others[placement[stage]], at_backward[stage])
        if (stage + 1) % depth == 0
        else (placement[stage + 1], forwards[placement[stage + 1]], at_forward[stage + 1])
        for stage in range(len(placement))
    ]
    after_backward = [
        (placement[stage - 1], others[placement[stage - 1]], at_backward[stage - 1])
        for stage in range(len(placement))
    ]
    # microbatches enter in order, by first stage, each of the later ones when an earlier one has left
    entering = dict[int, Iterator[int]]()
    for stage in range(0, len(placement), depth):
        entering[stage] = iter(at_forward[stage].values())
        for at in islice(entering[stage], in_flight):
            heappush(forwards[placement[stage]], at)
    orders: list[list[Action]] = [[] for _ in preferences]
    changes = [[_HOLDS[action[1]] for action in order] for order in preferences]
    waiting = [bytearray(b"\1" * len(order)) for order in preferences]
    live, running = [0] * len(orders), bytearray(len(orders))
    ending: list[list[int]] = [[] for _ in range(backward + 1)]  # ranks, by time modulo its length
    clock, touched = 0, set(range(len(orders)))
    while True:
        ends = [ending[(clock + cost) % len(ending)] for cost in (1, backward)]
        for rank in touched:
            if running[rank]:
                continue
            ready = others[rank]
            # if a forward is not admitted, no later one is
            if (first := forwards[rank]) and not (ready and ready[0] < first[0]):
                at = first[0]
                if limits is None or _admits(changes[rank], waiting[rank], limits[rank] - live[rank], at):
                    ready = first
            if not ready:
                continue
            at = heappop(ready)
            running[rank], waiting[rank][at] = 1, 0
            action = preferences[rank][at]
            orders[rank].append(action)
            live[rank] += changes[rank][at]
            ends[action[1] is B].append(rank)
        if not any(running):
            break
        clock += 1
        ended, ending[clock % len(ending)] = ending[clock % len(ending)], []
        touched = set(ended)
        for rank in ended:
            running[rank] = 0
            stage, kind, i = orders[rank][-1]
            if kind is F:
                other, heap, indices = after_forward[stage]
            elif kind is W:
                continue
            else:
                if kind is I:
                    heappush(others[rank], weights[stage][i])
                if stage in entering:
                    if (at := next(entering[stage], None)) is not None:
                        heappush(forwards[rank], at)
                    continue
                other, heap, indices = after_backward[stage]
            heappush(heap, indices[i])
            touched.add(other)
    assert not any(map(any, waiting)), "the given orders deadlock"
    return Scheduled(tuple(map(tuple, orders)), clock)


def _admits(changes: Sequence[int], waiting: bytearray, room: int, at: int) -> bool:
    """True if the forward at an index of a rank's order may run before the earlier actions that still wait,
    with room for this many more activations.
    """
    first = waiting.find(1)
    if first == at:
        return True
    earlier = accumulate(compress(changes[first:at], waiting[first:at]))
    return 0 < room > max(earlier)
