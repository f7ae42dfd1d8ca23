"""Replay of orders in time: the inner loop of the search.

Additions and comparisons are in the order of `stretto.program.replay`, so makespans are bitwise equal.
"""

from __future__ import annotations

from stretto.program.search.problem import Orders, SchedulingProblem

Times = list[list[float]]  # by operation, then by microbatch


def replay(problem: SchedulingProblem, orders: Orders) -> Times | None:
    """Return the end of every operation for every microbatch, or None if the orders deadlock."""
    source = problem.source
    delay = problem.delay
    cost = problem.cost
    rank_of = problem.rank_of
    ends: Times = [[] for _ in source]
    reached = [0] * len(orders)
    clocks = [0.0] * len(orders)
    waiting: list[list[int]] = [[] for _ in orders]
    going = list(range(len(orders)))
    while going:
        rank = going.pop()
        order = orders[rank]
        at = reached[rank]
        now = clocks[rank]
        while at < len(order):
            op = order[at]
            done = ends[op]
            origin = source[op]
            if origin >= 0:
                inputs = ends[origin]
                count = len(done)
                if len(inputs) <= count:
                    waiting[rank_of[origin]].append(rank)
                    break
                ready = inputs[count] + delay[op]
                if ready > now:
                    now = ready
            now += cost[op]
            done.append(now)
            at += 1
        if at > reached[rank]:
            reached[rank], clocks[rank] = at, now
            if waiting[rank]:
                going += waiting[rank]
                waiting[rank] = []
    if any(at < len(order) for at, order in zip(reached, orders, strict=True)):
        return None
    return ends


def makespan(ends: Times) -> float:
    """Return the end of the last operation."""
    return max(times[-1] for times in ends if times)


def span(problem: SchedulingProblem, ends: Times) -> float:
    """Return the longest time of a rank from its first start to its last end."""
    longest = 0.0
    for ops in problem.operations:
        first = min(ends[op][0] - problem.cost[op] for op in ops)
        longest = max(longest, max(ends[op][-1] for op in ops) - first)
    return longest


def latest_starts(problem: SchedulingProblem, orders: Orders, ends: Times) -> Times:
    """Return the latest start of every operation that does not increase the makespan."""
    follower = problem.follower
    delay = problem.delay
    cost = problem.cost
    rank_of = problem.rank_of
    finish, m = makespan(ends), problem.microbatches
    starts: Times = [[] for _ in cost]  # last microbatch first, reversed at the end
    reached = [len(order) for order in orders]
    clocks = [finish] * len(orders)
    waiting: list[list[int]] = [[] for _ in orders]
    going = list(range(len(orders)))
    while going:
        rank = going.pop()
        order = orders[rank]
        at = reached[rank]
        now = clocks[rank]
        while at:
            op = order[at - 1]
            done = starts[op]
            after = follower[op]
            if after >= 0:
                uses = starts[after]
                if len(uses) <= len(done):
                    waiting[rank_of[after]].append(rank)
                    break
                now = min(now, uses[len(done)] - delay[after])
            now -= cost[op]
            done.append(now)
            at -= 1
        if at < reached[rank]:
            reached[rank], clocks[rank] = at, now
            going += waiting[rank]
            waiting[rank] = []
    assert all(len(times) in (0, m) for times in starts), "orders that run end to end also run backwards"
    return [times[::-1] for times in starts]
