"""List scheduling: merge each rank's forwards and backwards into one order by playing them out in time."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.schedule.action import Action, Kind

_COST = {Kind.F: 1, Kind.B: 2}


def list_schedule(
    placement: Sequence[int],
    forwards: Sequence[Sequence[Action]],
    backwards: Sequence[Sequence[Action]],
    limits: Sequence[int],
) -> list[tuple[Action, ...]]:
    """One order per rank that keeps each rank's sequence of forwards and of backwards, and completes.

    At every moment the action that can start first is taken, a forward before a backward on a tie; a rank
    whose activations held have reached its limit takes backwards only. B takes twice as long as F. Should the
    limits leave nothing to do, the least advanced rank goes over its limit.

    Args:
        placement: rank of each stage.
        forwards, backwards: per rank, its F and its B actions in their order.
        limits: per rank, how many microbatch-stages it may hold (forwards done minus backwards done).
    """
    play = _Play(placement, forwards, backwards, limits)
    for _ in range(2 * sum(map(len, forwards))):
        play.step()
    return [tuple(order) for order in play.orders]


class _Play:
    """The state of the play: what has finished when, and how far each rank is."""

    def __init__(
        self,
        placement: Sequence[int],
        forwards: Sequence[Sequence[Action]],
        backwards: Sequence[Sequence[Action]],
        limits: Sequence[int],
    ) -> None:
        self.placement = placement
        self.sequences = (forwards, backwards)
        self.limits = limits
        ranks = range(len(forwards))
        self.orders: list[list[Action]] = [[] for _ in ranks]
        self._done = ([0 for _ in ranks], [0 for _ in ranks])
        self._clock = [0 for _ in ranks]
        self._finish: dict[Action, int] = {}
        self._next: list[tuple[int, int] | None] = [self._choose(rank) for rank in ranks]

    def step(self) -> None:
        """Take one action, and think again for the ranks that it concerns."""
        options = [(found, rank) for rank, found in enumerate(self._next) if found is not None]
        if options:
            (start, which), rank = min(options)
        else:
            start, which, rank = self._over_limit()
        action = self.sequences[which][rank][self._done[which][rank]]
        self._done[which][rank] += 1
        self._clock[rank] = self._finish[action] = start + _COST[action.kind]
        self.orders[rank].append(action)
        concerned = {rank}
        neighbour = action.stage + (1 if action.kind is Kind.F else -1)
        if 0 <= neighbour < len(self.placement):
            concerned.add(self.placement[neighbour])
        for other in concerned:
            self._next[other] = self._choose(other)

    def _choose(self, rank: int) -> tuple[int, int] | None:
        """Start time and kind (0 forward, 1 backward) of what the rank can do next."""
        full = self._done[0][rank] - self._done[1][rank] >= self.limits[rank]
        found = [
            (at, which)
            for which in (0, 1)
            if not (full and which == 0) and (at := self._ready(rank, which)) >= 0
        ]
        return min(found) if found else None

    def _ready(self, rank: int, which: int) -> int:
        """When the rank's next forward or backward can start; -1 while that is not known."""
        at, sequence = self._done[which][rank], self.sequences[which][rank]
        if at == len(sequence):
            return -1
        stage, kind, microbatch = sequence[at]
        needs: list[Action] = []
        if kind is Kind.F:
            if stage > 0:
                needs.append(Action(stage - 1, Kind.F, microbatch))
        else:
            needs.append(Action(stage, Kind.F, microbatch))
            if stage < len(self.placement) - 1:
                needs.append(Action(stage + 1, Kind.B, microbatch))
        times = [self._finish.get(need, -1) for need in needs]
        return -1 if -1 in times else max([self._clock[rank], *times])

    def _over_limit(self) -> tuple[int, int, int]:
        """The forward of the least advanced rank that has one ready.

        There always is one while forwards are left, since every rank takes forwards in an order in which they
        are produced; with all forwards done, backwards follow their own.
        """
        ready = [(self._done[0][rank], rank) for rank in range(len(self._clock)) if self._ready(rank, 0) >= 0]
        assert ready, "the sequences themselves depend on one another in a circle"
        _, rank = min(ready)
        return self._ready(rank, 0), 0, rank
