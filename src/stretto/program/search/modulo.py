"""Modulo scheduling (Rau 1994): building blocks for unequal stages.

A block has the start of each pass of one microbatch; the next microbatch repeats it one period later. No two
passes may claim a rank at the same time modulo the period. The block determines memory: for each stage the
microbatches between F and W, independent of their total number. Qi et al. 2024, "Pipeline parallelism with
controllable memory", write such blocks for passes of equal length; here they are searched for, with
decreasing periods, by changing how long single passes wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, fsum
from random import Random

from stretto.program.search.problem import F, I, Orders, SchedulingProblem, W

_TINY = 1e-9


@dataclass
class Waits:
    """The delay of each operation after its earliest start, and the W that come right after their I."""

    times: list[float]  # by operation
    at_once: list[bool]  # by stage


@dataclass
class _Block:
    starts: list[float]  # by operation
    excess: int  # activations above the limits, summed over ranks
    life: float  # summed lifetime of all activations


def cyclic(problem: SchedulingProblem, tries: int, random: Random) -> list[Orders]:
    """Return orders that repeat a block, for every feasible period that was tried, the shortest last.

    Args:
        tries: blocks to try for one period.
    """
    cost = problem.cost
    work = max(fsum(cost[op] for op in ops) for ops in problem.operations)
    if work <= 0:
        return []
    orders: list[Orders] = []
    waits = Waits([0.0] * len(cost), [True] * problem.stages)
    low, high = 1.0, 3.0  # in units of the busiest rank's work
    while high - low > 0.01:
        middle = low + (high - low) * 0.4
        block = _search(problem, middle * work, waits, tries, random)
        if block is None:
            low = middle
        else:
            high = middle
            orders.append(_repeat(problem, block, middle * work))
    return orders


def _search(
    problem: SchedulingProblem, period: float, waits: Waits, tries: int, random: Random
) -> _Block | None:
    """Return a block of this period that fits, or None; `waits` is the start of the search and is updated to
    its end.
    """
    now = _place(problem, period, waits)
    for _ in range(tries):
        if now is not None and not now.excess:
            return now
        other = _changed(problem, period, waits, random)
        block = _place(problem, period, other)
        if block is None:
            continue
        if now is None or (block.excess, block.life) <= (now.excess, now.life + period / 50):
            now = block
            waits.times, waits.at_once = other.times, other.at_once
    return now if now is not None and not now.excess else None


def _changed(problem: SchedulingProblem, period: float, waits: Waits, random: Random) -> Waits:
    """Redraw one or a few waits."""
    other = Waits(list(waits.times), list(waits.at_once))
    for _ in range(random.choice((1, 1, 2, 4))):
        stage = random.randrange(problem.stages)
        if problem.split and random.random() < 0.3:
            other.at_once[stage] = not other.at_once[stage]
        else:
            op = 3 * stage + random.choice((F, I, W) if problem.split else (F, I))
            other.times[op] = 0.0 if random.random() < 0.5 else random.uniform(0.0, period / 3)
    return other


def _place(problem: SchedulingProblem, period: float, waits: Waits) -> _Block | None:
    """Build the block from the loss outwards, with F as late and I as early as ranks are free, or return
    None.
    """
    cost = problem.cost
    delay = problem.delay
    rank_of = problem.rank_of
    busy: list[list[tuple[float, float]]] = [[] for _ in problem.limits]
    starts = [0.0] * len(cost)
    due = back = 0.0
    put_off: list[int] = []
    for stage in range(problem.stages - 1, -1, -1):
        forward, gradient = 3 * stage, 3 * stage + I
        rank_busy = busy[rank_of[forward]]
        begin = _free(rank_busy, -due + waits.times[forward], cost[forward], period, reversed_time=True)
        if begin is None:
            return None
        starts[forward] = -begin - cost[forward]
        rank_busy.append((starts[forward], cost[forward]))
        due = starts[forward] - delay[forward]
        if stage == problem.stages - 1:
            back = -begin
        begin = _free(rank_busy, back + delay[gradient] + waits.times[gradient], cost[gradient], period)
        if begin is None:
            return None
        starts[gradient], back = begin, begin + cost[gradient]
        rank_busy.append((begin, cost[gradient]))
        if waits.at_once[stage] and problem.split:
            if not _put_weight(
                starts=starts, busy=busy, problem=problem, stage=stage, period=period, waits=waits
            ):
                return None
        else:
            put_off.append(stage)
    if problem.split and not all(
        _put_weight(starts=starts, busy=busy, problem=problem, stage=s, period=period, waits=waits)
        for s in put_off
    ):
        return None
    return _measured(problem, starts, period)


def _put_weight(
    starts: list[float],
    busy: list[list[tuple[float, float]]],
    problem: SchedulingProblem,
    stage: int,
    period: float,
    waits: Waits,
) -> bool:
    op = 3 * stage + W
    rank_busy, time = busy[problem.rank_of[op]], problem.cost[op]
    begin = _free(rank_busy, starts[op - 1] + problem.cost[op - 1] + waits.times[op], time, period)
    if begin is None:
        return False
    starts[op] = begin
    rank_busy.append((begin, time))
    return True


def _free(
    busy: list[tuple[float, float]], ready: float, time: float, period: float, reversed_time: bool = False
) -> float | None:
    """Return the first start at or after `ready` at which the rank is free for `time`, modulo the period.

    With `reversed_time`, `ready` and the result are in reversed time.
    """
    limit = ready + period
    moved = True
    while moved:
        moved = False
        for start, length in busy:
            if reversed_time:
                start = -start - length
            past = (ready - start) % period
            if past < length - _TINY:
                ready += length - past
                moved = True
            elif period - past < time - _TINY:
                ready += period - past + length
                moved = True
        if ready > limit:
            return None
    return ready


def _measured(problem: SchedulingProblem, starts: list[float], period: float) -> _Block:
    """Return the block with the activations that it makes ranks hold."""
    cost, release = problem.cost, problem.release
    excess, life = 0, 0.0
    for rank, ops in enumerate(problem.operations):
        lives = [(starts[op], starts[op + release] + cost[op + release]) for op in ops if op % 3 == F]
        life += fsum(end - begin for begin, end in lives)
        peak = 0
        for moment, _ in lives:
            live = sum(
                floor((moment - begin) / period + _TINY) - floor((moment - end) / period + _TINY)
                for begin, end in lives
            )
            peak = max(peak, live)
        excess += max(0, peak - problem.limits[rank])
    return _Block(starts, excess, life)


def _repeat(problem: SchedulingProblem, block: _Block, period: float) -> Orders:
    """Repeat the block for every microbatch, without gaps."""
    orders: Orders = []
    for ops in problem.operations:
        passes = [
            (block.starts[op] + i * period, op % 3, op) for op in ops for i in range(problem.microbatches)
        ]
        orders.append([op for _, _, op in sorted(passes)])
    return orders
