"""What no program on a placement can beat."""

from __future__ import annotations

from stretto.program.search.problem import F, I, Problem


def lower_bound(problem: Problem) -> float:
    """The largest of three times over all ranks, each of them from when the first input can reach the rank.

    - its work;
    - its forwards and input gradients, then the last gradient's way to the model's first stage and the weight
      gradients that it sets free;
    - its limit of activations: each is held at least for the way of its microbatch to the loss and back, so
      all of them together for that time over the number that it may hold at once.
    """
    cost = problem.cost
    m = problem.microbatches
    least = 0.0
    start = _heads(problem)
    held = _holding(problem)
    tails = ways_back(problem)
    for rank, ops in enumerate(problem.operations):
        stages = sorted({op // 3 for op in ops})
        head = start[stages[0]]
        work = m * sum(cost[op] for op in ops)
        ahead = m * sum(cost[op] for op in ops if op % 3 in (F, I)) + tails[stages[0]]
        area = m * sum(held[stage] for stage in stages) / problem.limits[rank]
        least = max(least, head + work, head + ahead, head + area)
    return least


def _heads(problem: Problem) -> list[float]:
    """By stage, when the first input can be there."""
    starts = [0.0]
    for stage in range(1, problem.stages):
        starts.append(starts[-1] + problem.cost[3 * (stage - 1)] + problem.delay[3 * stage])
    return starts


def ways_back(problem: Problem) -> list[float]:
    """By stage, from the end of its last I to the earliest end of all that follows from it."""
    found: list[float] = []
    for stage in range(problem.stages):
        longest = problem.cost[3 * stage + 2]
        if stage:
            onward = problem.delay[3 * (stage - 1) + I] + problem.cost[3 * (stage - 1) + I]
            longest = max(longest, onward + found[-1])
        found.append(longest)
    return found


def _holding(problem: Problem) -> list[float]:
    """By stage, the least time from the start of F to the release of its activation."""
    found: list[float] = []
    way = 0.0
    for stage in range(problem.stages - 1, -1, -1):
        way += problem.cost[3 * stage] + problem.cost[3 * stage + I]
        found.append(way + problem.cost[3 * stage + 2])
        way += problem.delay[3 * stage]
        if stage:
            way += problem.delay[3 * (stage - 1) + I]
    return found[::-1]
