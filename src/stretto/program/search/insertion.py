"""Programs built by inserting one microbatch after another into the gaps that are left.

If memory is scarce a microbatch must go to the loss and back without waiting, since it holds activations
meanwhile. So all of its passes are placed at once: one after another into the first gaps that fit, its
forwards then as late as that allows, its W into later gaps; and it enters late enough to obey the limits.
Repeated for unequal times this yields building blocks like those that Qi et al. 2024, "Pipeline parallelism
with controllable memory", write by hand for equal times.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import fsum
from typing import NamedTuple

from stretto.program.search.problem import Orders, SchedulingProblem

_TRIES = 400  # entry times tried for one microbatch
_FINE = 12  # entry times per period, at least


class InsertionRule(NamedTuple):
    """How microbatches enter."""

    spacing: float  # minimum time between two entries, in periods
    late: bool  # forwards as late as the first input gradient allows


def insertion(problem: SchedulingProblem, entry: InsertionRule) -> Orders | None:
    """Return orders built by insertion, or None if a microbatch cannot be placed."""
    build = _Insertion(problem, entry)
    return build.run()


class _RankTimeline:
    """One rank's busy times and the lifetimes of its activations, each as sorted intervals."""

    def __init__(self, limit: int) -> None:
        self.busy: list[tuple[float, float, int]] = []  # start, end, operation
        self.holds: list[tuple[float, float]] = []
        self.limit = limit

    def first(self, ready: float, time: float) -> float:
        """Return the earliest start at or after `ready` of a gap of length `time`."""
        busy = self.busy
        at = max(0, bisect_left(busy, (ready,)) - 1)
        for start, end, _ in busy[at:]:
            if ready + time <= start:
                return ready
            ready = max(ready, end)
        return ready

    def last(self, due: float, time: float) -> float:
        """Return the latest start of a gap of length `time` that ends by `due`."""
        busy = self.busy
        for at in range(bisect_left(busy, (due,)) - 1, -1, -1):
            start, end, _ = busy[at]
            if end <= due - time:
                break
            due = min(due, start)
        return due - time

    def overfull(self, start: float, end: float) -> float | None:
        """Return when the number of activations first decreases, if one more in this interval exceeds the
        limit; else None.
        """
        others = [hold for hold in self.holds if hold[1] > start and hold[0] < end]
        if len(others) < self.limit:
            return None
        for moment in [start, *(begin for begin, _ in others if begin > start)]:
            if sum(begin <= moment < stop for begin, stop in others) >= self.limit:
                return min(stop for begin, stop in others if begin <= moment < stop)
        return None


class _Insertion:
    """The timelines of all ranks so far."""

    def __init__(self, problem: SchedulingProblem, entry: InsertionRule) -> None:
        self.problem, self.entry = problem, entry
        self.timelines = [_RankTimeline(limit) for limit in problem.limits]
        cost = problem.cost
        self.period = max(fsum(cost[op] for op in ops) for ops in problem.operations) or 1.0
        stages = range(problem.stages)
        self.chain = [3 * s for s in stages] + [3 * s + 1 for s in reversed(stages)]

    def run(self) -> Orders | None:
        enter = 0.0
        for _ in range(self.problem.microbatches):
            entered = self._place(enter)
            if entered is None:
                return None
            enter = entered + self.entry.spacing * self.period
        return [[op for _, _, op in timeline.busy] for timeline in self.timelines]

    def _place(self, enter: float) -> float | None:
        """Place the next microbatch at or after `enter`; return when it enters, or None if it does not
        fit.
        """
        for _ in range(_TRIES):
            # start of each pass of the chain
            cost = self.problem.cost
            delay = self.problem.delay
            rank_of = self.problem.rank_of
            clock, starts = enter, list[float]()
            for op in self.chain:
                clock = self.timelines[rank_of[op]].first(clock + delay[op], cost[op])
                starts.append(clock)
                clock += cost[op]
            if self.entry.late:
                for at in range(self.problem.stages - 1, -1, -1):
                    op = self.chain[at]
                    due = starts[at + 1] - delay[self.chain[at + 1]]
                    starts[at] = max(starts[at], self.timelines[rank_of[op]].last(due, cost[op]))
            added, wrong = self._add(starts)
            if wrong is None:
                return enter
            for rank, item in added:
                self.timelines[rank].busy.remove(item)
            enter += max(self.period / _FINE, wrong / 2)
        return None

    def _add(self, starts: list[float]) -> tuple[list[tuple[int, tuple[float, float, int]]], float | None]:
        """Insert the chain and its W; return what was inserted, and the time until memory is free if it
        exceeds a limit.
        """
        cost = self.problem.cost
        rank_of = self.problem.rank_of
        timelines = self.timelines
        added: list[tuple[int, tuple[float, float, int]]] = []

        def put(op: int, start: float) -> float:
            item = (start, start + cost[op], op)
            insort(timelines[rank_of[op]].busy, item)
            added.append((rank_of[op], item))
            return item[1]

        stages = self.problem.stages
        ends = [put(op, start) for op, start in zip(self.chain, starts, strict=True)]
        holds: list[tuple[int, tuple[float, float]]] = []
        for stage in range(stages - 1, -1, -1):
            timeline, end = timelines[rank_of[3 * stage]], ends[2 * stages - 1 - stage]
            if self.problem.split:
                weight = 3 * stage + 2
                end = put(weight, timeline.first(end, cost[weight]))
            start = starts[stage]
            down = timeline.overfull(start, end)
            if down is not None:
                for rank, hold in holds:
                    timelines[rank].holds.remove(hold)
                return added, down - start
            insort(timeline.holds, (start, end))
            holds.append((rank_of[3 * stage], (start, end)))
        return added, None
