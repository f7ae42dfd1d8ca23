"""The time limit of a search, in seconds of wall-clock time."""

from __future__ import annotations

from math import inf
from time import perf_counter


class Deadline:
    """A limit that begins when it is made; None: no limit."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = inf if seconds is None else seconds
        self._start = perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return perf_counter() - self._start

    @property
    def spent(self) -> float:
        """The share of the limit that is over; 0 where there is no limit."""
        return self.elapsed / self.seconds

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the limit is over."""
        return share * self.seconds - self.elapsed
