"""List scheduling (Graham 1969): simulate orders in time, and let a rank do other work instead of waiting.

Every action depends on one other: F on the F of the previous stage, B or I on that of the next stage (at the
loss: on its F), W on its I. An action is ready when that one has ended, so the simulation only tracks which
action each end makes ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from stretto.program.action import Action, ActionKind

_HOLDS = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.I: 0, ActionKind.W: -1}

_Key = tuple[int, ActionKind, int | None]  # an action; a plain tuple is equal to it, and faster to create


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
    steps = [[_HOLDS[action.kind] for action in order] for order in orders]
    simulation = _Simulation(placement, orders, copies, backward)

    def admit(rank: int, at: int) -> bool:
        started, first_open = simulation.started[rank], simulation.first_open(rank)
        live, limit = simulation.live[rank] + 1, limits[rank]
        if at == first_open:
            return True
        if live > limit:
            return False
        changes = steps[rank]
        for earlier in range(first_open, at):
            if not started[earlier]:
                live += changes[earlier]
                if live > limit:
                    return False
        return True

    return simulation.run(admit)


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
    simulation = _Simulation(placement, preferences, copies, backward)

    def admit(rank: int, at: int) -> bool:
        stage = preferences[rank][at].stage
        return stage % simulation.depth != 0 or simulation.inside[stage] < in_flight

    return simulation.run(admit)


def replay(
    placement: Sequence[int], orders: Sequence[Sequence[Action]], copies: int = 1, backward: int = 2
) -> Scheduled:
    """Return given orders with their makespan.

    Args:
        placement: rank of each stage, copy after copy.
        orders: per rank, its compute actions in an order that completes.
        copies: copies of the weights.
        backward: duration of a B, in units of any other action.
    """
    simulation = _Simulation(placement, orders, copies, backward)
    simulation.in_order = True
    return simulation.run(lambda rank, at: True)


class _Simulation:
    """The running, ready and started actions of each rank."""

    def __init__(
        self, placement: Sequence[int], preferences: Sequence[Sequence[Action]], copies: int, backward: int
    ) -> None:
        self.placement = placement
        self.depth = len(placement) // copies
        self.preferences = preferences
        self.in_order = False  # start actions strictly in the order of preference
        self.cost = {ActionKind.F: 1, ActionKind.B: backward, ActionKind.I: 1, ActionKind.W: 1}
        self.started = [bytearray(len(order)) for order in preferences]
        self.live = [0 for _ in preferences]
        self.inside = dict.fromkeys(range(0, len(placement), self.depth), 0)  # microbatches, by first stage
        self._first_open = [0 for _ in preferences]
        self._positions: dict[_Key, int] = {
            action: at for order in preferences for at, action in enumerate(order)
        }
        self._ready: list[list[int]] = [[] for _ in preferences]
        self._running: list[Action | None] = [None for _ in preferences]
        # microbatches enter in order, one ready at a time
        self._entering = {
            stage: iter([a for a in preferences[placement[stage]] if a[:2] == (stage, ActionKind.F)])
            for stage in self.inside
        }
        for entering in self._entering.values():
            self._enable(next(entering, None))

    def first_open(self, rank: int) -> int:
        """Return the index of the rank's first action that has not started."""
        at, started = self._first_open[rank], self.started[rank]
        while at < len(started) and started[at]:
            at += 1
        self._first_open[rank] = at
        return at

    def run(self, admit: Callable[[int, int], bool]) -> Scheduled:
        """Run to the end; `admit(rank, index)` is True if a rank may start the forward at an index of its
        order.
        """
        orders: list[list[Action]] = [[] for _ in self.preferences]
        ends: list[tuple[int, int]] = []
        clock, touched = 0, set(range(len(orders)))
        while touched:
            for rank in touched:
                if self._running[rank] is None and (action := self._take(rank, admit)) is not None:
                    orders[rank].append(action)
                    heappush(ends, (clock + self.cost[action.kind], rank))
            touched = set[int]()
            if ends:
                clock = ends[0][0]
            while ends and ends[0][0] == clock:
                touched.update(self._end(heappop(ends)[1]))
        assert all(all(started) for started in self.started), "the given orders deadlock"
        return Scheduled(tuple(map(tuple, orders)), clock)

    def _take(self, rank: int, admit: Callable[[int, int], bool]) -> Action | None:
        """Start the rank's most preferred action that is ready and admitted, if any."""
        ready, preference = self._ready[rank], self.preferences[rank]
        if self.in_order and ready and ready[0] != self.first_open(rank):
            return None
        refused: list[int] = []
        chosen = None
        while ready:
            at = heappop(ready)
            if preference[at].kind is not ActionKind.F or admit(rank, at):
                self.started[rank][at] = 1
                chosen = self._running[rank] = preference[at]
                break
            refused.append(at)
        for at in refused:
            heappush(ready, at)
        if chosen is not None:
            self.live[rank] += _HOLDS[chosen.kind]
            if chosen.kind is ActionKind.F and chosen.stage in self.inside:
                self.inside[chosen.stage] += 1
                self._enable(next(self._entering[chosen.stage], None))
        return chosen

    def _end(self, rank: int) -> list[int]:
        """End the rank's running action; return the ranks that may now start an action, including itself."""
        action = self._running[rank]
        assert action is not None
        self._running[rank] = None
        stage, kind, i = action
        if kind is ActionKind.F:
            last = (stage + 1) % self.depth == 0
            follows = self._backward(stage, i) if last else (stage + 1, ActionKind.F, i)
            return [rank, *self._enable(follows)]
        if kind is ActionKind.W:
            return [rank]
        if kind is ActionKind.I:
            self._enable((stage, ActionKind.W, i))
        if stage in self.inside:
            self.inside[stage] -= 1
            return [rank]
        return [rank, *self._enable(self._backward(stage - 1, i))]

    def _backward(self, stage: int, microbatch: int | None) -> _Key:
        split = (stage, ActionKind.I, microbatch)
        return split if split in self._positions else (stage, ActionKind.B, microbatch)

    def _enable(self, name: _Key | None) -> list[int]:
        """Make an action ready; return its rank, if any."""
        if name is None:
            return []
        rank = self.placement[name[0]]
        heappush(self._ready[rank], self._positions[name])
        return [rank]
