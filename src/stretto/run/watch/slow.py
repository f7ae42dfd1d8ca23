"""Find ranks that are slow: that need longer for their own work than ranks with the same work, or than
before.

Ranks wait for each other in every step, so that every rank's step takes as long as the slowest one's. They
differ in the time in which they do not wait. Only ranks with the same work are compared; a rank without such
peers, such as the only one of a pipeline stage, is compared with its own past, relative to how the other
ranks have changed since.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from stretto.engine.progress import PROGRESS

# the shortest window, in steps and in seconds: cores of shared machines are slow now and then
WINDOW, WINDOW_S = 16, 2.0
_LONGEST = 128  # most steps of a window
EVERY = 4  # steps from one judgement to the next: a slow rank is found within 20
SLOW, RECOVERED = 1.3, 1.15  # ratios of its time to the expected one
_CLEARLY, _OF_WINDOW = 1.15, 0.8  # a slow rank also exceeds this ratio in this part of the window
_PAST, _SHORTEST_PAST = 200, 20  # steps before the window that a rank without peers is compared with
_MANY = 8  # ranks of a group
_WARM_UP = 3  # steps that compile, allocate and connect


class BusyTime:
    """The time in which this rank's main thread was in a step and waited neither for another rank nor for a
    core: ranks may share cores, which the system gives to one after the other.
    """

    def __init__(self) -> None:
        self._carried = 0.0
        self._began = _Clocks(0.0, 0.0, 0.0, 0.0)
        self._schedule: int | None = None

    def begin(self) -> None:
        """A step begins."""
        self._began = self._now()

    def end(self) -> None:
        """A step ends; its time since the report counts to the next report."""
        self._carried += self._lap()

    def report(self) -> float:
        """Seconds since the last report."""
        busy, self._carried = self._carried + self._lap(), 0.0
        return busy

    def _lap(self) -> float:
        began = self._began
        self._began = now = self._now()
        busy = now.wall - began.wall - (now.waited - began.waited) - (now.queued - began.queued)
        # it may have waited for its core while it waited for a rank, which would count twice
        return max(now.core - began.core, busy)

    def _now(self) -> _Clocks:
        if self._schedule is None:
            try:
                self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # the system does not report how long threads wait for a core
                self._schedule = -1
        queued = 0.0 if self._schedule < 0 else int(os.pread(self._schedule, 64, 0).split()[1]) / 1e9
        return _Clocks(time.perf_counter(), time.thread_time(), PROGRESS.waited_s, queued)


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
        groups: groups of ranks that have the same work in every step.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups
        self._busy = deque[Sequence[float]](maxlen=_LONGEST + _PAST)
        self._seconds = deque[float](maxlen=_LONGEST)
        self._steps = 0
        self._before_slow = dict[int, Sequence[float]]()  # all ranks' medians from before a rank became slow
        self.slow: Mapping[int, float] = {}

    def add(self, busy: Sequence[float], seconds: float) -> Mapping[int, float]:
        """Count a step.

        Args:
            busy: busy seconds of each rank, 0 if not measured.
            seconds: duration of the step.

        Returns:
            The slow ranks, each with the ratio of its time to the expected one.
        """
        self._steps += 1
        if self._steps > _WARM_UP and all(seconds > 0 for seconds in busy):
            self._busy.append(busy)
            self._seconds.append(seconds)
            if self._steps % EVERY == 0 and (size := self._window()):
                self.slow = self._judge(size)
        return self.slow

    def _window(self) -> int:
        """Return the number of latest steps to judge; 0 while there are too few."""
        total = 0.0
        for size, seconds in enumerate(reversed(self._seconds), 1):
            total += seconds
            if size >= WINDOW and (total >= WINDOW_S or size == _LONGEST):
                return size
        return 0

    def _judge(self, size: int) -> dict[int, float]:
        steps = list(self._busy)
        window, past = steps[-size:], steps[:-size]
        slow = dict[int, float]()
        baseline = None
        if any(len(group) == 1 for group in self._groups) and len(past) >= _SHORTEST_PAST:
            baseline = [median(times) for times in zip(*past, strict=True)]
        for group in self._groups:
            for rank, ratios in self._ratios(group, window, baseline).items():
                # in most steps, not only on average: a few long steps are no slow rank
                is_slow = median(ratios) >= (RECOVERED if rank in self.slow else SLOW) and (
                    rank in self.slow or sum(r >= _CLEARLY for r in ratios) >= _OF_WINDOW * len(ratios)
                )
                if is_slow:
                    slow[rank] = round(median(ratios), 2)
                    if baseline is not None:
                        self._before_slow.setdefault(rank, baseline)
                else:
                    self._before_slow.pop(rank, None)
        return slow

    def _ratios(
        self, group: Sequence[int], window: Sequence[Sequence[float]], baseline: Sequence[float] | None
    ) -> dict[int, list[float]]:
        """Return each rank's time relative to the expected one, for every step of the window."""
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
        baseline = self._before_slow.get(rank, baseline)
        if baseline is None or len(baseline) == 1:
            return {}
        others = [other for other in range(len(baseline)) if other != rank]
        return {
            rank: [
                step[rank] / baseline[rank] / median(step[other] / baseline[other] for other in others)
                for step in window
            ]
        }


def slow_rank_changes(
    before: Mapping[int, float], now: Mapping[int, float], hosts: Sequence[str]
) -> list[str]:
    """Return one line per rank that became slow or has recovered."""
    lines = [
        f"rank {rank} on host {hosts[rank]} is slow: its own work takes {factor:.2f} times the usual time, "
        f"over the last {WINDOW} steps or more"
        for rank, factor in now.items()
        if rank not in before
    ]
    return lines + [
        f"rank {rank} on host {hosts[rank]} is as fast as usual again" for rank in before if rank not in now
    ]
