"""Samples are read before they are taken, and are the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from stretto.run.data.prefetch import Prefetcher


class Numbers:
    """Samples that are their own indices, and what was asked for by which thread."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad
        self.read: dict[int, threading.Event] = {}
        self.threads = dict[int, int]()
        self._lock = threading.Lock()

    def batch(self, indices: Sequence[int]) -> list[int]:
        if self.bad in indices:
            raise OSError("planted")
        self.threads[indices[0]] = threading.get_ident()
        self.event(indices[0]).set()
        return list(indices)

    def event(self, first: int) -> threading.Event:
        with self._lock:
            return self.read.setdefault(first, threading.Event())


def test_the_next_step_is_read_before_it_is_taken() -> None:
    numbers = Numbers()
    ahead = Prefetcher(numbers, 8)
    for microbatch in (0, 2):
        ahead.batch(range(microbatch, microbatch + 2))
    for first in (8, 10):
        assert numbers.event(first).wait(20), "nobody has taken it yet"
        assert numbers.threads[first] != threading.get_ident()
    count = len(numbers.threads)
    assert ahead.batch(range(8, 10)) == [8, 9]
    assert numbers.event(16).wait(20)
    assert len(numbers.threads) == count + 1, "what was read is not read again"
    ahead.close()


def test_any_samples_may_be_taken() -> None:
    numbers = Numbers()
    ahead = Prefetcher(numbers, 4)
    places = [0, 2, 4, 6, 100, 102, 104, 106, 3, 7, 11, 0, 2]
    assert [ahead.batch(range(at, at + 2)) for at in places] == [[at, at + 1] for at in places]
    assert len(ahead._pending) <= 4, "what was read for another position is dropped"
    ahead.close()


def test_an_error_is_raised_where_the_samples_are_taken() -> None:
    ahead = Prefetcher(Numbers(bad=5), 4)
    assert ahead.batch(range(2)) == [0, 1]
    with pytest.raises(OSError, match="planted"):
        ahead.batch(range(4, 6))
    ahead.close()
