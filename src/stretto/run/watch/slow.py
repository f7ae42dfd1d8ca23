"""Which rank is slow: it takes longer for its own work than ranks with the same work, or than it used to.

Ranks wait for each other in every step, so that all steps take as long as the slowest rank's. What tells them
apart is the time in which a rank does not wait. Only ranks with the same work compare; a rank that has none
beside it, such as the only one of a pipeline's stage, is compared with its own past, by how the others have
changed since.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from stretto.engine.progress import PROGRESS

WINDOW, LEAST_S = 16, 2.0  # steps and seconds: cores of machines that are shared are slow for moments
_LONGEST = 128  # steps of a window
EVERY = 4  # steps from one judgement to the next: a slow rank is found within 20
SLOW, RECOVERED = 1.3, 1.15  # times the usual
_CLEARLY, _OF_WINDOW = 1.15, 0.8  # and in such a part of a window so much longer
_PAST = 200  # steps before the window that a rank without peers is compared with
_LEAST_PAST = 20
_MANY = 8  # ranks of a group
_WARM_UP = 3  # steps that compile, allocate and connect


class BusyTime:
    """The time in which this rank's main thread was in a step and waited neither for another rank nor for its
    core: ranks may share cores, and the system lets one of them run now and the other then.
    """

    def __init__(self) -> None:
        self._carried = 0.0
        self._began = _Clocks(0.0, 0.0, 0.0, 0.0)
        self._schedule: int | None = None

    def begin(self) -> None:
        """A step begins."""
        self._began = self._now()

    def end(self) -> None:
        """A step has ended; what it did after its report belongs to the next one's."""
        self._carried += self._lap()

    def report(self) -> float:
        """Seconds since the last report."""
        busy, self._carried = self._carried + self._lap(), 0.0
        return busy

    def _lap(self) -> float:
        began = self._began
        self._began = now = self._now()
        rest = now.wall - began.wall - (now.waited - began.waited) - (now.queued - began.queued)
        # it may have waited for its core while it waited for a rank, which would count twice
        return max(now.core - began.core, rest)

    def _now(self) -> _Clocks:
        return _Clocks(time.perf_counter(), time.thread_time(), PROGRESS.waited_s, self._queued())

    def _queued(self) -> float:
        """Seconds that this thread has waited for a core; 0 where the system does not say."""
        if self._schedule is None:
            try:
                self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._schedule = -1
        if self._schedule < 0:
            return 0.0
        return int(os.pread(self._schedule, 64, 0).split()[1]) / 1e9


class _Clocks(NamedTuple):
    """Seconds on four clocks: the wall's, of work on a core, of waiting for ranks, of waiting for a core."""

    wall: float
    core: float
    waited: float
    queued: float


BUSY = BusyTime()  # of this process


class SlowRanks:
    """Judges the busy times of all ranks.

    Args:
        groups: the ranks, those together that have the same work in every step.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups
        self._busy = deque[Sequence[float]](maxlen=_LONGEST + _PAST)
        self._seconds = deque[float](maxlen=_LONGEST)
        self._steps = 0
        self._before_slow = dict[int, Sequence[float]]()  # the usual times when a rank became slow
        self.slow: Mapping[int, float] = {}

    def add(self, busy: Sequence[float], seconds: float) -> Mapping[int, float]:
        """Count a step.

        Args:
            busy: seconds of each rank; 0 where it was not measured.
            seconds: that the step took.

        Returns:
            The ranks that are slow, and how many times longer than usual they take.
        """
        self._steps += 1
        if self._steps > _WARM_UP and all(seconds > 0 for seconds in busy):
            self._busy.append(busy)
            self._seconds.append(seconds)
            if self._steps % EVERY == 0 and (size := self._window()):
                self.slow = self._judge(size)
        return self.slow

    def _window(self) -> int:
        """How many of the last steps are judged; 0 while there are too few."""
        total = 0.0
        for size, seconds in enumerate(reversed(self._seconds), 1):
            total += seconds
            if size >= WINDOW and (total >= LEAST_S or size == _LONGEST):
                return size
        return 0

    def _judge(self, size: int) -> dict[int, float]:
        steps = list(self._busy)
        window, slow = steps[-size:], dict[int, float]()
        usual = self._usual(steps[:-size]) if any(len(group) == 1 for group in self._groups) else None
        for group in self._groups:
            for rank, ratios in self._ratios(group, window, usual).items():
                if _is_slow(ratios, rank in self.slow):
                    slow[rank] = round(median(ratios), 2)
                    if usual is not None:
                        self._before_slow.setdefault(rank, usual)
                else:
                    self._before_slow.pop(rank, None)
        return slow

    def _usual(self, past: Sequence[Sequence[float]]) -> list[float] | None:
        """The median of each rank before the window; None while that is short."""
        return [median(times) for times in zip(*past, strict=True)] if len(past) >= _LEAST_PAST else None

    def _ratios(
        self, group: Sequence[int], window: Sequence[Sequence[float]], usual: Sequence[float] | None
    ) -> dict[int, list[float]]:
        """Of each rank of a group, in each step of the window, its time over what one would expect."""
        if len(group) > _MANY:  # the rank itself hardly moves the median
            medians = [median(step[rank] for rank in group) for step in window]
            return {rank: [step[rank] / m for step, m in zip(window, medians, strict=True)] for rank in group}
        if len(group) > 1:
            return {
                rank: [
                    step[rank] / median(step[other] for other in group if other != rank) for step in window
                ]
                for rank in group
            }
        (rank,) = group
        usual = self._before_slow.get(rank, usual)
        if usual is None or len(usual) == 1:
            return {}
        others = [other for other in range(len(usual)) if other != rank]
        return {
            rank: [
                step[rank] / usual[rank] / median(step[other] / usual[other] for other in others)
                for step in window
            ]
        }


def _is_slow(ratios: Sequence[float], before: bool) -> bool:
    """Whether a rank takes longer in most steps, not only on average: a few long steps are no slow rank."""
    if before:
        return median(ratios) >= RECOVERED
    return median(ratios) >= SLOW and sum(ratio >= _CLEARLY for ratio in ratios) >= _OF_WINDOW * len(ratios)


def slow_rank_changes(
    before: Mapping[int, float], now: Mapping[int, float], hosts: Sequence[str]
) -> list[str]:
    """What to tell of a change, one line a rank."""
    lines = [
        f"rank {rank} on host {hosts[rank]} is slow: its own work takes {factor:.2f} times the usual time, "
        f"over the last {WINDOW} steps or more"
        for rank, factor in now.items()
        if rank not in before
    ]
    return lines + [
        f"rank {rank} on host {hosts[rank]} is as fast as usual again" for rank in before if rank not in now
    ]
