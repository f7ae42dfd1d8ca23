"""The best orders of a small problem, by branch and bound.

Actions are started in the order of their start times. A schedule in which an I or a W could start earlier
without moving anything else need not be considered, since neither allocates memory: so the next action starts
before any I or W that is possible now could end (Giffler and Thompson 1960). Of two states that have started
the same actions, one that is no later in any time dominates the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.program.search.problem import F, I, Orders, SchedulingProblem, tails_of

_NEVER = float("inf")


@dataclass
class ExactSolution:
    """The result of a search."""

    orders: Orders | None  # better than the given value, or None if none were found
    complete: bool  # the search was exhaustive


def exact(problem: SchedulingProblem, value: float, bound: float, nodes: int) -> ExactSolution:
    """Search for the orders with the smallest makespan below `value`.

    Args:
        value: a makespan that is known to be reachable.
        bound: a lower bound, at which the search stops.
        nodes: number of states to visit before giving up.
    """
    search = _Search(problem, value, bound, nodes)
    search.extend(0.0)
    return ExactSolution(search.best, search.nodes > 0)


class _Search:
    """The state of a depth-first search."""

    def __init__(self, problem: SchedulingProblem, value: float, bound: float, nodes: int) -> None:
        self.problem = problem
        self.value = value
        self.bound = bound
        self.nodes = nodes
        self.best: Orders | None = None
        self.tolerance = 1e-12 * (1.0 + value)
        self.counts = [0] * len(problem.cost)
        self.arrivals: list[list[float]] = [[] for _ in problem.cost]
        self.arrivals[0] = [0.0] * problem.microbatches
        self.clocks = [0.0] * problem.ranks
        self.orders: Orders = [[] for _ in problem.limits]
        self.left = problem.actions
        self.tails = tails_of(problem)
        self.forwards = [[op for op in ops if op % 3 == F] for ops in problem.operations]
        total = problem.microbatches * problem.stages // problem.ranks
        self.free = [limit >= total for limit in problem.limits]
        # operations whose input may be in transit
        self.crossing = [
            op for op, d in enumerate(problem.source) if d >= 0 and problem.rank_of[op] != problem.rank_of[d]
        ]
        self.visited: dict[tuple[int, ...], list[tuple[float, ...]]] = {}

    def extend(self, now: float) -> None:
        """Search all continuations of the present orders at `now` or later."""
        self.nodes -= 1
        if self.nodes <= 0 or self.value <= self.bound + self.tolerance:
            return
        if not self.left:
            finish = max(self.clocks)
            if finish < self.value - self.tolerance:
                self.value, self.best = finish, [list(order) for order in self.orders]
            return
        if self._lower_bound(now) >= self.value - self.tolerance or self._dominated(now):
            return
        for start, _, op in self._choices(now):
            # start the operation, search all continuations, and undo it
            problem, rank = self.problem, self.problem.rank_of[op]
            before = self.clocks[rank]
            end = start + problem.cost[op]
            fed = [problem.follower[op]] if problem.follower[op] >= 0 else []
            if op % 3 == I and problem.split:
                fed.append(op + 1)
            for after in fed:
                self.arrivals[after].append(end + problem.delay[after])
            self.counts[op] += 1
            self.clocks[rank] = end
            self.orders[rank].append(op)
            self.left -= 1
            self.extend(start)
            self.left += 1
            self.orders[rank].pop()
            self.clocks[rank] = before
            self.counts[op] -= 1
            for after in fed:
                self.arrivals[after].pop()

    def _choices(self, now: float) -> list[tuple[float, int, int]]:
        """Return (start, preference, operation) of possible next operations, the most promising first."""
        choices: list[tuple[float, int, int]] = []
        soonest, soonest_op = _NEVER, -1
        for rank, ops in enumerate(self.problem.operations):
            free = max(self.clocks[rank], now)
            for op in ops:
                count = self.counts[op]
                ready = self.arrivals[op]
                if count >= len(ready) or (
                    op % 3 == F and not self.free[rank] and not self._admits(rank, op)
                ):
                    continue
                start = max(free, ready[count])
                end = start + self.problem.cost[op]
                if (op % 3 != F or self.free[rank]) and end < soonest:
                    soonest, soonest_op = end, op
                choices.append((start, (1, 0, 2)[op % 3], op))
        return sorted(choice for choice in choices if choice[0] < soonest or choice[2] == soonest_op)

    def _admits(self, rank: int, op: int) -> bool:
        """True if a forward leaves memory for those of the oldest microbatch; otherwise no continuation
        exists.
        """
        counts, release = self.counts, self.problem.release
        forwards = self.forwards[rank]
        live = sum(counts[forward] - counts[forward + release] for forward in forwards)
        oldest = min(counts[forward + release] for forward in forwards)
        due = sum(counts[forward] <= oldest for forward in forwards)
        return self.problem.limits[rank] - live - 1 >= due - (counts[op] == oldest)

    def _dominated(self, now: float) -> bool:
        """True if a visited state has started the same actions and is no later in any time; otherwise record
        this one.
        """
        counts = self.counts
        times = [max(clock, now) for clock in self.clocks]
        for op in self.crossing:
            times += [max(time, now) for time in self.arrivals[op][counts[op] :]]
        state = tuple(times)
        others = self.visited.setdefault(tuple(counts), [])
        if any(all(a <= b for a, b in zip(other, state, strict=True)) for other in others):
            return True
        others[:] = [o for o in others if not all(a <= b for a, b in zip(state, o, strict=True))]
        others.append(state)
        return False

    def _lower_bound(self, now: float) -> float:
        """Return a lower bound on the makespan of all continuations."""
        problem = self.problem
        counts = self.counts
        m = self.problem.microbatches
        cost = problem.cost
        source = problem.source
        delay = problem.delay
        early = [_NEVER] * len(cost)
        forward = range(0, len(cost), 3)
        for op in (*forward, *(s + I for s in reversed(forward))):
            count = counts[op]
            if count < m:
                ready = self.arrivals[op]
                origin = source[op]
                comes = ready[count] if count < len(ready) else early[origin] + cost[origin] + delay[op]
                early[op] = max(comes, now, self.clocks[problem.rank_of[op]])
        bound = max(self.clocks)
        for rank, ops in enumerate(problem.operations):
            begin = _NEVER
            work = 0.0
            ahead = 0.0
            for op in ops:
                left = (m - counts[op]) * cost[op]
                work += left
                if op % 3 != 2:
                    ahead += left
                    begin = min(begin, early[op])
                elif counts[op] < counts[op - 1]:
                    begin = min(begin, max(self.clocks[rank], now))
            if work:
                bound = max(bound, begin + work)
            if counts[ops[0] + I] < m:
                bound = max(bound, begin + ahead + self.tails[ops[0] // 3])
        return bound
