"""The search strategy: constructive heuristics, local search on the best, exact search for small problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from stretto.program.program import Program
from stretto.program.search.dispatch import blocks, dispatch, urgency
from stretto.program.search.evaluate import replay
from stretto.program.search.exact import exact
from stretto.program.search.improve import Budget, ScheduleCandidate, Value, climb, redispatch
from stretto.program.search.insertion import InsertionRule, insertion
from stretto.program.search.modulo import cyclic
from stretto.program.search.problem import Orders, SchedulingProblem, lower_bound

_ACTIONS = 2e7  # largest number of replayed actions, for effort 1
_SMALL = 20_000  # largest number of states that exact search visits, for effort 1
_PROVABLE = 150  # largest number of compute actions for exact search
_TRIES = 1500  # largest number of building blocks for one period, for effort 1
_ALL = 5000  # largest number of actions of all problems for which `_TRIES` is not reduced
_SEEDS = 3
_SPACINGS = (0.5, 0.8, 0.9, 1.0, 1.1, 1.3)


@dataclass
class Solution:
    """The best candidates, the best first; `complete` if the first is proved to be optimal."""

    best: list[ScheduleCandidate]
    complete: bool


def solve(
    problems: Sequence[SchedulingProblem],
    fixed: Sequence[tuple[str, Program]],
    value: Value,
    effort: float,
    prove: bool,
) -> Solution:
    """Search for the best orders of all problems.

    Args:
        fixed: named programs that fit: starting points, not results.
        value: the objective, to be minimised.
        effort: search effort; 1 takes a few seconds for 8 ranks and 32 microbatches.
        prove: the value is the makespan, so lower bounds and exact search apply.
    """
    bounds = {problem: lower_bound(problem) if prove else 0.0 for problem in problems}
    # the time of a block grows with its stages; all problems share one budget
    everything = sum(problem.actions for problem in problems)
    tries = int(_TRIES * effort * min(1.0, _ALL / everything))
    candidates: list[ScheduleCandidate] = []
    for problem in problems:
        for name, program in fixed:
            if program.placement == problem.placement:
                candidates += _candidates(problem, problem.orders_of(program), value, name)
        candidates += _built(problem, value, bounds[problem], tries)
    _sort(candidates)
    size = max(problem.actions for problem in problems)
    budget = Budget(effort * min(_ACTIONS, 4.0 * size * size + 200 * size))
    best = _improve(candidates, bounds, value, budget)
    complete = prove and _prove(problems, bounds, best, value, effort)
    return Solution(best, complete)


def _sort(candidates: list[ScheduleCandidate]) -> None:
    candidates.sort(key=lambda candidate: candidate.value)


def _candidates(
    problem: SchedulingProblem, orders: Orders | None, value: Value, source: str
) -> list[ScheduleCandidate]:
    """Return a list of the orders as a candidate, empty if they deadlock or do not fit."""
    if orders is None or sum(map(len, orders)) != problem.actions or not problem.fits(orders):
        return []
    ends = replay(problem, orders)
    return [] if ends is None else [ScheduleCandidate(problem, orders, value(problem, ends), source)]


def _built(problem: SchedulingProblem, value: Value, bound: float, tries: int) -> list[ScheduleCandidate]:
    """Return the candidates of all constructive heuristics; stop at the first building block that reaches the
    bound.
    """
    candidates: list[ScheduleCandidate] = []
    for block in blocks(problem):
        orders = dispatch(problem, urgency(problem, block), block.patience)
        candidates += _candidates(problem, orders, value, "block")
        if bound and candidates[-1].value <= bound * (1 + 1e-12):
            return candidates
    for spacing, late in product(_SPACINGS, (True, False)):
        candidates += _candidates(
            problem, insertion(problem, InsertionRule(spacing, late)), value, "insertion"
        )
    if problem.tight and problem.actions > _PROVABLE:
        for orders in (
            orders
            for seed in range(_SEEDS)
            for orders in cyclic(problem, min(tries, problem.actions), Random(seed))
        ):
            candidates += _candidates(problem, orders, value, "cyclic")
    return candidates


def _improve(
    candidates: list[ScheduleCandidate], bounds: dict[SchedulingProblem, float], value: Value, budget: Budget
) -> list[ScheduleCandidate]:
    """Improve the best candidates, with increasing effort on fewer of them."""
    random = Random(0)
    # the best 12: at most a third from one problem and source, and no two of a problem with equal value
    pool: list[ScheduleCandidate] = []
    values: set[tuple[SchedulingProblem, float]] = set()
    for candidate in candidates:
        similar = sum(candidate.problem is t.problem and candidate.source == t.source for t in pool)
        if (candidate.problem, candidate.value) not in values and similar < 4:
            values.add((candidate.problem, candidate.value))
            pool.append(candidate)
        if len(pool) == 12:
            break
    total = budget.actions
    for width, share in ((12, 0.2), (4, 0.3), (1, 0.5)):
        del pool[width:]
        for at, candidate in enumerate(pool):
            until = bounds[candidate.problem] * (1 + 1e-12)
            if (
                pool[0].value <= until
                or candidate.value <= until
                or bounds[candidate.problem] >= pool[0].value
            ):
                continue
            part = Budget(total * share / width)
            better = redispatch(candidate, value, part, random, until, tries=6 if width > 1 else 12)
            pool[at] = climb(better, value, part, random, until)
        _sort(pool)
    # the best improved and original candidates: exact costs decide between them
    both = [*pool, *candidates[:3]]
    _sort(both)
    return both[:6]


def _prove(
    problems: Sequence[SchedulingProblem],
    bounds: dict[SchedulingProblem, float],
    best: list[ScheduleCandidate],
    value: Value,
    effort: float,
) -> bool:
    """Solve the problems that are small enough; return whether the first of `best` is then optimal."""
    complete = True
    for problem in sorted(problems, key=bounds.__getitem__):
        value_to_beat = best[0].value
        if bounds[problem] >= value_to_beat * (1 - 1e-12):
            continue
        if problem.actions > _PROVABLE:
            return False
        proof = exact(problem, value_to_beat, bounds[problem], int(_SMALL * effort) + 1)
        complete = complete and proof.complete
        best[:0] = _candidates(problem, proof.orders, value, "exact")
        _sort(best)
    return complete
