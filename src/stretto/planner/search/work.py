"""The work of a search, counted in place of the time that it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import inf
from typing import Literal

Step = Literal[
    "layers", "layer memory", "bounds", "time bound", "memory bound", "program", "replay", "memory"
]

# Seconds of each step of a search on one core, and of each parallelism that it bounds or action of the
# program that it goes through: fitted to nine searches on an AMD EPYC 9004 with Python 3.11, of which each
# took 0.8 to 1.2 times its work; programs, since they became faster, to twenty on an EPYC 7003 that was 1.4
# times slower.
_SECONDS: dict[Step, tuple[float, float]] = {
    "layers": (2.5e-4, 0.0),
    "layer memory": (2.5e-4, 0.0),
    "bounds": (3e-4, 8e-6),
    "time bound": (1.4e-4, 0.0),
    "memory bound": (1e-4, 0.0),
    "program": (5e-4, 2.3e-7),
    "replay": (1.5e-3, 1.2e-6),
    "memory": (4e-3, 4e-6),
}


def seconds_of(step: Step, actions: int = 0) -> float:
    """Seconds that a step takes on an idle machine, by its number of actions."""
    each, per_action = _SECONDS[step]
    return each + per_action * actions


class SearchWork:
    """Counted work with a limit, in seconds of an idle core. A busy machine does the same work, and finds the
    same layouts, later.

    Attributes:
        counts, actions: number of steps of each kind, and of their actions.
    """

    def __init__(self) -> None:
        self.counts, self.actions = Counter[Step](), Counter[Step]()
        self.begin(inf)

    def begin(self, limit: float) -> None:
        """Begin a round of this many seconds."""
        self._limit, self._done = limit, 0.0

    @property
    def share(self) -> float:
        """The share of the round that is done; 0 without a limit."""
        return self._done / self._limit

    def remaining(self, share: float = 1.0) -> float:
        """Seconds of work until this share of the round is done."""
        return share * self._limit - self._done

    def add(self, step: Step, actions: int = 0) -> None:
        """Count a step that is about to be done."""
        self.counts[step] += 1
        self.actions[step] += actions
        self._done += seconds_of(step, actions)


def rounds(seconds: float | None) -> Iterator[float]:
    """Yield the seconds of each round of a search: a short one for the first rows, the rest of half a second,
    and then each as much as all before it. So a search with a larger limit does all that one with a smaller
    limit does.
    """
    if seconds is None:
        yield inf
        return
    yield _FIRST_ROUND / 8
    yield _FIRST_ROUND * 7 / 8
    done = _FIRST_ROUND
    while 2 * done <= seconds:
        yield done
        done *= 2


_FIRST_ROUND = 0.5
