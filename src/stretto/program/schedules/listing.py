"""List scheduling: play orders out in time, and let every rank do something else instead of waiting.

Every action follows from one other: F from the F of the stage before, B or I from that of the stage after
(at the loss: from its F), W from its I. So an action is ready when that one has ended, and one table of what
an end makes ready is all of the play.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from stretto.program.action import Action, Kind

_HOLDS = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}

_Name = tuple[int, Kind, int | None]  # an action; a plain tuple is found as its equal, and made faster


class Played(NamedTuple):
    """What a play gives."""

    orders: tuple[tuple[Action, ...], ...]  # one per rank
    makespan: int  # in units of one F


def tighten(
    placement: Sequence[int],
    orders: Sequence[Sequence[Action]],
    limits: Sequence[int],
    copies: int = 1,
    backward: int = 2,
) -> Played:
    """Orders in which ranks do later actions while they would wait, within a limit of activations.

    Whenever a rank is free it takes the first action of its given order that is ready. A forward is taken out
    of turn only if the rest of the given order, done after it, still keeps to the limit. What is left is then
    always part of an order that runs, so that the play cannot come to a standstill, and no rank ever holds
    more than its limit.

    Args:
        placement: rank of each stage, copy after copy.
        orders: per rank, its compute actions in an order that runs and keeps to the limits.
        limits: per rank, how many (stage, microbatch) activations it may hold.
        copies: of the weights.
        backward: how long a B lasts; everything else lasts one unit.
    """
    steps = [[_HOLDS[action.kind] for action in order] for order in orders]
    play = _Play(placement, orders, copies, backward)

    def admit(rank: int, at: int) -> bool:
        taken, front = play.taken[rank], play.front(rank)
        held, limit = play.held[rank] + 1, limits[rank]
        if at == front:
            return True
        if held > limit:
            return False
        mine = steps[rank]
        for earlier in range(front, at):
            if not taken[earlier]:
                held += mine[earlier]
                if held > limit:
                    return False
        return True

    return play.run(admit)


def greedy(
    placement: Sequence[int],
    wishes: Sequence[Sequence[Action]],
    in_flight: int,
    copies: int = 1,
    backward: int = 2,
) -> Played:
    """Orders in which every rank takes the first of its wishes that is ready.

    A microbatch enters its copy of the model when fewer than `in_flight` are between their first forward and
    the end of their last backward there.

    Args:
        placement: rank of each stage, copy after copy.
        wishes: per rank, its compute actions, the most urgent first; they need not run in that order.
        in_flight: how many microbatches may be in a copy at once, at least 1.
        copies: of the weights.
        backward: how long a B lasts; everything else lasts one unit.
    """
    play = _Play(placement, wishes, copies, backward)

    def admit(rank: int, at: int) -> bool:
        stage = wishes[rank][at].stage
        return stage % play.depth != 0 or play.inside[stage] < in_flight

    return play.run(admit)


def replay(
    placement: Sequence[int], orders: Sequence[Sequence[Action]], copies: int = 1, backward: int = 2
) -> Played:
    """Orders as they are, and how long they take.

    Args:
        placement: rank of each stage, copy after copy.
        orders: per rank, its compute actions in an order that runs.
        copies: of the weights.
        backward: how long a B lasts; everything else lasts one unit.
    """
    play = _Play(placement, orders, copies, backward)
    play.in_order = True
    return play.run(lambda rank, at: True)


class _Play:
    """The state of the play: what each rank does now, what it could do next, and what it has done."""

    def __init__(
        self, placement: Sequence[int], wishes: Sequence[Sequence[Action]], copies: int, backward: int
    ) -> None:
        self.placement = placement
        self.depth = len(placement) // copies
        self.wishes = wishes
        self.in_order = False  # take no wish before those that stand before it
        self.cost = {Kind.F: 1, Kind.B: backward, Kind.I: 1, Kind.W: 1}
        self.taken = [bytearray(len(wish)) for wish in wishes]
        self.held = [0 for _ in wishes]
        self.inside = dict.fromkeys(range(0, len(placement), self.depth), 0)  # microbatches, by first stage
        self._front = [0 for _ in wishes]
        self._where: dict[_Name, int] = {action: at for wish in wishes for at, action in enumerate(wish)}
        self._ready: list[list[int]] = [[] for _ in wishes]
        self._now: list[Action | None] = [None for _ in wishes]
        # microbatches enter in their order, one being ready at a time
        self._entering = {
            stage: iter([a for a in wishes[placement[stage]] if a[:2] == (stage, Kind.F)])
            for stage in self.inside
        }
        for entering in self._entering.values():
            self._enable(next(entering, None))

    def front(self, rank: int) -> int:
        """Where the first wish stands that has not been taken."""
        at, taken = self._front[rank], self.taken[rank]
        while at < len(taken) and taken[at]:
            at += 1
        self._front[rank] = at
        return at

    def run(self, admit: Callable[[int, int], bool]) -> Played:
        """Play to the end; `admit` says whether a rank may take the forward at an index of its wishes."""
        orders: list[list[Action]] = [[] for _ in self.wishes]
        ends: list[tuple[int, int]] = []
        clock, touched = 0, set(range(len(orders)))
        while touched:
            for rank in touched:
                if self._now[rank] is None and (action := self._take(rank, admit)) is not None:
                    orders[rank].append(action)
                    heappush(ends, (clock + self.cost[action.kind], rank))
            touched = set[int]()
            if ends:
                clock = ends[0][0]
            while ends and ends[0][0] == clock:
                touched.update(self._end(heappop(ends)[1]))
        assert all(all(taken) for taken in self.taken), "the orders given do not run"
        return Played(tuple(map(tuple, orders)), clock)

    def _take(self, rank: int, admit: Callable[[int, int], bool]) -> Action | None:
        """Start the rank's first wish that is ready and admitted, if there is one."""
        ready, wish = self._ready[rank], self.wishes[rank]
        if self.in_order and ready and ready[0] != self.front(rank):
            return None
        refused: list[int] = []
        found = None
        while ready:
            at = heappop(ready)
            if wish[at].kind is not Kind.F or admit(rank, at):
                self.taken[rank][at] = 1
                found = self._now[rank] = wish[at]
                break
            refused.append(at)
        for at in refused:
            heappush(ready, at)
        if found is not None:
            self.held[rank] += _HOLDS[found.kind]
            if found.kind is Kind.F and found.stage in self.inside:
                self.inside[found.stage] += 1
                self._enable(next(self._entering[found.stage], None))
        return found

    def _end(self, rank: int) -> list[int]:
        """End what the rank does; the ranks that have more to choose from now, itself among them."""
        action = self._now[rank]
        assert action is not None
        self._now[rank] = None
        stage, kind, i = action
        if kind is Kind.F:
            follows = self._backward(stage, i) if self._is_last(stage) else (stage + 1, Kind.F, i)
            return [rank, *self._enable(follows)]
        if kind is Kind.W:
            return [rank]
        if kind is Kind.I:
            self._enable((stage, Kind.W, i))
        if stage in self.inside:
            self.inside[stage] -= 1
            return [rank]
        return [rank, *self._enable(self._backward(stage - 1, i))]

    def _is_last(self, stage: int) -> bool:
        return (stage + 1) % self.depth == 0

    def _backward(self, stage: int, microbatch: int | None) -> _Name:
        split = (stage, Kind.I, microbatch)
        return split if split in self._where else (stage, Kind.B, microbatch)

    def _enable(self, name: _Name | None) -> list[int]:
        """Make an action ready; the rank that it is on."""
        if name is None:
            return []
        rank = self.placement[name[0]]
        heappush(self._ready[rank], self._where[name])
        return [rank]
