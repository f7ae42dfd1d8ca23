"""Which of the candidates that fit comes first, where their times differ by less than is measurable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.planner.memory.fits import Fit
from stretto.planner.search.ranking import NOISE
from stretto.planner.search.task import Candidate, Task

ROOM = 2  # tenths of the device's memory; who has more left is no better off


@dataclass(frozen=True)
class Found:
    """A candidate that fits, with its exact time and memory."""

    candidate: Candidate
    seconds: float
    fit: Fit

    @property
    def room(self) -> int:
        """Tenths of the device that are left, up to `ROOM`; negative where it may not fit."""
        if self.fit.verdict != "fits":
            return -1
        if self.fit.capacity == float("inf"):
            return ROOM
        return min(ROOM, int(10 * self.fit.slack / self.fit.capacity))

    @property
    def preferred(self) -> tuple[int, tuple[int, ...], float]:
        """The least is the best of those that are equally fast: most room where it is short, then the simpler
        layout, with fewer axes, a usual schedule, less recomputation.
        """
        return -self.room, self.candidate.simplicity, self.seconds


def best_of_family(family: Sequence[Found]) -> Found:
    """Of variants of one layout: the best of those as fast as the fastest that fits surely, if any does."""
    fastest = min(family, key=lambda one: one.seconds)
    return min((one for one in family if one.seconds <= fastest.seconds * (1 + NOISE)), key=_preferred)


def cannot_win(candidate: Candidate, family: Sequence[Found]) -> bool:
    """Whether a candidate slower than all of its family will not stand for it: one of them is as simple and
    has all the room that counts.
    """
    return any(one.room == ROOM and one.candidate.simplicity <= candidate.simplicity for one in family)


def in_order(found: Sequence[Found], task: Task) -> list[Found]:
    """The ranking: by the objective, but those within the noise of the first by what is preferred."""

    def cost(one: Found) -> float:
        world = one.candidate.place.layout.world if task.objective == "tokens_per_dollar" else 1
        return one.seconds * world

    by_cost = sorted(found, key=cost)
    if not by_cost:
        return []
    least = cost(by_cost[0])
    ties = [one for one in by_cost if cost(one) <= least * (1 + NOISE)]
    return sorted(ties, key=_preferred) + by_cost[len(ties) :]


def _preferred(one: Found) -> tuple[int, tuple[int, ...], float]:
    return one.preferred
