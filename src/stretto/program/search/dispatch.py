"""List scheduling: ranks take the most urgent operation that is ready, within a limit of activations.

A forward is taken only if for each older microbatch, once those before it are finished, the rank still has
memory for all of its remaining forwards. As nothing of a younger microbatch can be freed before these, this
is both necessary and sufficient: the oldest microbatch can always continue, so no deadlock occurs. The
smallest limit is thus one microbatch through the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from math import fsum

from stretto.program.search.evaluate import Times
from stretto.program.search.problem import F, Orders, SchedulingProblem

_NEVER = float("inf")


def dispatch(problem: SchedulingProblem, urgency: Times, patience: float) -> Orders:
    """Return orders in which every rank, whenever it is free, takes its ready operation of smallest
    `urgency`.

    Args:
        urgency: priority by operation and microbatch; smaller goes first.
        patience: the rank waits for a more urgent operation if its input arrives before this fraction of the
            operation that it would take is done; 0 never waits, 1 never delays.
    """
    return _Dispatch(problem, urgency, patience).run()


class _Dispatch:
    """The completed operations of each rank, and the inputs that have arrived."""

    def __init__(self, problem: SchedulingProblem, urgency: Times, patience: float) -> None:
        self.problem = problem
        self.urgency = urgency
        self.patience = patience
        self.orders: Orders = [[] for _ in problem.limits]
        self.free = [0.0] * problem.ranks
        self.live = [0] * problem.ranks
        self.counts = [0] * (3 * problem.stages)
        self.arrivals: Times = [[] for _ in self.counts]
        self.arrivals[0] = [0.0] * problem.microbatches
        self.forwards = [[op for op in ops if op % 3 == F] for ops in problem.operations]
        all_actions = problem.microbatches * problem.stages // problem.ranks
        self.limited = [limit < all_actions for limit in problem.limits]

    def run(self) -> Orders:
        events = [(0.0, rank) for rank in range(self.problem.ranks)]
        cost = self.problem.cost
        follower = self.problem.follower
        delay = self.problem.delay
        release, split = self.problem.release, self.problem.split
        free = self.free
        counts = self.counts
        rank_of = self.problem.rank_of
        arrivals = self.arrivals
        while events:
            now, rank = heappop(events)
            if free[rank] > now:
                continue
            op = self._choose(rank, now)
            if op < 0:
                continue
            end = now + cost[op]
            self.orders[rank].append(op)
            counts[op] += 1
            free[rank] = end
            kind = op % 3
            if kind == F:
                self.live[rank] += 1
            elif kind == release:
                self.live[rank] -= 1
            if kind == 1 and split:
                arrivals[op + 1].append(end)
            after = follower[op]
            if after >= 0:
                comes = end + delay[after]
                arrivals[after].append(comes)
                if rank_of[after] != rank:
                    heappush(events, (comes, rank_of[after]))
            heappush(events, (end, rank))
        return self.orders

    def _choose(self, rank: int, now: float) -> int:
        """Return the operation to take, or -1 to wait."""
        counts = self.counts
        arrivals = self.arrivals
        urgency = self.urgency
        best, lowest = -1, _NEVER
        blocked = _NEVER
        freeing = -1
        freeing_least = _NEVER
        coming: list[tuple[float, float]] = []
        limited, release = self.limited[rank], self.problem.release
        for op in self.problem.operations[rank]:
            count = counts[op]
            ready = arrivals[op]
            if count >= len(ready):
                continue
            priority = urgency[op][count]
            if limited and op % 3 == F and not self._admits(rank, op):
                if ready[count] <= now and priority < blocked:
                    blocked = priority
            elif ready[count] > now:
                coming.append((ready[count], priority))
            else:
                if priority < lowest:
                    best, lowest = op, priority
                if op % 3 == release and priority < freeing_least:
                    freeing, freeing_least = op, priority
        if freeing >= 0 and blocked < lowest:
            best, lowest = freeing, blocked
        if best >= 0 and coming:
            until = now + self.patience * self.problem.cost[best]
            if any(comes < until and priority < lowest for comes, priority in coming):
                return -1
        return best

    def _admits(self, rank: int, op: int) -> bool:
        """True if the limit allows this forward: all earlier microbatches can still be finished."""
        counts = self.counts
        finish = self.problem.release
        limit = self.problem.limits[rank]
        operations = self.forwards[rank]
        if self.live[rank] >= limit or len(operations) == 1:
            return self.live[rank] < limit
        for older in range(min(counts[forward + finish] for forward in operations), counts[op]):
            need = 1
            for forward in operations:
                done = counts[forward]
                if done <= older:
                    need += 1
                else:
                    need += done - max(older, counts[forward + finish])
            if need > limit:
                return False
        return True


_LAST = 1e6  # periods: after everything else


@dataclass(frozen=True)
class BuildingBlock:
    """The urgency of the passes of one microbatch.

    `stretch` has the relative duration of F and I in each direction through the ranks, at least 1: F of even
    chunks, F of odd chunks, I of odd chunks, I of even chunks.
    """

    stretch: tuple[float, float, float, float]
    backward_first: bool  # I before any F
    weights_last: bool  # W only if nothing else is ready or no memory is left
    patience: float


def blocks(problem: SchedulingProblem) -> Iterator[BuildingBlock]:
    """Yield the grid of building blocks, the most useful first."""
    if problem.stages > problem.ranks:
        one_or_two = (1.0, 2.0)
        paces = sorted(product(one_or_two, one_or_two, one_or_two, one_or_two), key=sum)
    else:
        paces = [(f, f, b, b) for b in (1.0, 2.0) for f in (1.0, 2.0)]
    for stretch in paces:
        for first, patience in product((True, False), (0.0, 1.0, 0.5)):
            for last in (True, False) if problem.split else (True,):
                if not (first and stretch[2:] != (1.0, 1.0)):
                    yield BuildingBlock(stretch, first, last, patience)


def urgency(problem: SchedulingProblem, block: BuildingBlock) -> Times:
    """Return the urgency by operation and microbatch, for `dispatch`."""
    cost = problem.cost
    delay = problem.delay
    ranks = problem.ranks
    period = max(fsum(cost[op] for op in ops) for ops in problem.operations) or 1.0
    offsets = [0.0] * len(cost)
    clock = 0.0
    for stage in range(problem.stages):
        odd = stage // ranks % 2
        offsets[3 * stage] = clock
        clock += delay[3 * stage] + cost[3 * stage] * block.stretch[odd]
    lead = _LAST * period / 2 if block.backward_first else 0.0
    for stage in range(problem.stages - 1, -1, -1):
        odd = stage // ranks % 2
        offsets[3 * stage + 1] = clock - lead
        clock += delay[3 * stage + 1] + cost[3 * stage + 1] * block.stretch[3 - odd]
        offsets[3 * stage + 2] = _LAST * period if block.weights_last else offsets[3 * stage + 1]
    return [[offset + period * i for i in range(problem.microbatches)] for offset in offsets]
