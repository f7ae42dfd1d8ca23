"""Local search: dispatch again by latest starts, and move operations of the critical path.

Both preserve freedom from deadlock and the limits of memory: `dispatch` by construction, moves by replay and
by counting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from stretto.program.search.dispatch import dispatch
from stretto.program.search.evaluate import Times, latest_starts, replay
from stretto.program.search.problem import Orders, SchedulingProblem

_MEMORY = 8  # history length of late acceptance, in steps
_LONGEST_MOVE = 6  # positions by which one move shifts an operation

Value = Callable[[SchedulingProblem, Times], float]


@dataclass
class ScheduleCandidate:
    """Orders and their value; smaller is better."""

    problem: SchedulingProblem
    orders: Orders
    value: float
    source: str


@dataclass
class Budget:
    """The number of compute actions that may still be replayed: the same on every machine, unlike time."""

    actions: float

    def take(self, problem: SchedulingProblem, weight: float = 1.0) -> bool:
        """Spend one replay of the problem; return whether budget is left."""
        self.actions -= weight * problem.actions
        return self.actions > 0


def redispatch(
    candidate: ScheduleCandidate, value: Value, budget: Budget, random: Random, until: float, tries: int
) -> ScheduleCandidate:
    """Dispatch by latest starts, first unchanged, then perturbed, until `tries` in a row do not help."""
    problem, best = candidate.problem, candidate
    failed = 0
    while failed < tries and best.value > until and budget.take(problem, 3.0):
        ends = replay(problem, best.orders)
        assert ends is not None
        priorities = latest_starts(problem, best.orders, ends)
        patience = (0.0, 0.5, 1.0)[failed % 3]
        if failed >= 3:
            spread = best.value / problem.microbatches * random.choice((0.1, 0.3, 1.0))
            priorities = [_perturbed(times, spread, random) for times in priorities]
        orders = dispatch(problem, priorities, patience)
        ends = replay(problem, orders)
        assert ends is not None
        worth = value(problem, ends)
        if worth < best.value:
            best, failed = ScheduleCandidate(problem, orders, worth, candidate.source), 0
        else:
            failed += 1
    return best


def _perturbed(times: list[float], by: float, random: Random) -> list[float]:
    """Shift an operation's times by a common random offset, and each microbatch by a smaller one."""
    common = random.uniform(-by, by)
    return [time + common + random.uniform(-by, by) / 4 for time in times]


def climb(
    candidate: ScheduleCandidate, value: Value, budget: Budget, random: Random, until: float
) -> ScheduleCandidate:
    """Move operations of the critical path, with late acceptance (Burke and Bykov 2017).

    A move is accepted if its value is no worse than the current one, or than the current one `_MEMORY` steps
    ago.
    """
    problem, best = candidate.problem, candidate
    orders = [list(order) for order in candidate.orders]
    now = candidate.value
    ends = replay(problem, orders)
    assert ends is not None
    past = [now] * _MEMORY
    path = critical(problem, orders, ends)
    step = 0
    while best.value > until and budget.take(problem, 0.02):
        rank, at = random.choice(path)
        to = _target(problem, orders[rank], at, random)
        if to < 0:
            continue
        order = orders[rank]
        moved = list(order)
        moved.insert(to, moved.pop(at))
        if not problem.rank_fits(rank, moved):
            continue
        budget.take(problem)
        orders[rank] = moved
        ends = replay(problem, orders)
        worth = value(problem, ends) if ends is not None else float("inf")
        step += 1
        if ends is None or (worth > now and worth > past[step % _MEMORY]):
            orders[rank] = order
            continue
        now = worth
        past[step % _MEMORY] = now
        path = critical(problem, orders, ends)
        if now < best.value:
            best = ScheduleCandidate(problem, [list(order) for order in orders], now, candidate.source)
    return best


def _target(problem: SchedulingProblem, order: list[int], at: int, random: Random) -> int:
    """Return a new position for the operation, preferably earlier for critical F and I, or -1 for none."""
    op = order[at]
    by = random.randint(1, _LONGEST_MOVE)
    if op % 3 == problem.release and problem.split:
        by = random.choice((1, -1, 1)) * by * 2
    else:
        by = random.choice((-1, -1, -1, 1)) * by
    to = min(max(at + by, 0), len(order) - 1)
    return to if to != at else -1


def critical(problem: SchedulingProblem, orders: Orders, ends: Times) -> list[tuple[int, int]]:
    """Return a longest chain of actions without a pause, last first, each as (rank, index in its order)."""
    cost = problem.cost
    delay = problem.delay
    source = problem.source
    place: list[list[int]] = [[] for _ in cost]
    finish: list[list[float]] = []
    for order in orders:
        finishes: list[float] = []
        for at, op in enumerate(order):
            finishes.append(ends[op][len(place[op])])
            place[op].append(at)
        finish.append(finishes)
    rank = max(range(len(orders)), key=lambda r: finish[r][-1] if finish[r] else 0.0)
    at = len(orders[rank]) - 1
    path: list[tuple[int, int]] = []
    counts = [{at: n for n, at in enumerate(places)} for places in place]
    while True:
        path.append((rank, at))
        op = orders[rank][at]
        i = counts[op][at]
        begin = finish[rank][at] - cost[op]
        origin = source[op]
        tight = 1e-9 * (1.0 + abs(begin))
        if at and finish[rank][at - 1] >= begin - tight:
            at -= 1
        elif origin >= 0 and ends[origin][i] + delay[op] >= begin - tight:
            rank, at = problem.rank_of[origin], place[origin][i]
        else:
            return path
