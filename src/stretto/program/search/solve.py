"""The way of the search: many programs built quickly, the best of them improved, small problems solved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from stretto.program.program import Program
from stretto.program.search.dispatch import blocks, dispatch, urgency
from stretto.program.search.evaluate import replay
from stretto.program.search.exact import exact
from stretto.program.search.improve import Budget, Found, Value, climb, redispatch
from stretto.program.search.insertion import Entry, insertion
from stretto.program.search.modulo import cyclic
from stretto.program.search.problem import Orders, Problem, lower_bound

_ACTIONS = 2e7  # played out for effort 1, at most
_SMALL = 20_000  # states that exact search may look at, for effort 1
_PROVABLE = 150  # compute actions up to which exact search is tried
_TRIES = 1500  # building blocks for one period, for effort 1, at most
_ALL = 5000  # actions of all problems up to which so many are looked at
_SEEDS = 3
_SPACINGS = (0.5, 0.8, 0.9, 1.0, 1.1, 1.3)


@dataclass
class Hunt:
    """What was found, the best first; `complete` if the first is proved to be optimal."""

    best: list[Found]
    complete: bool


def hunt(
    problems: Sequence[Problem],
    fixed: Sequence[tuple[str, Program]],
    value: Value,
    effort: float,
    prove: bool,
) -> Hunt:
    """Look for the best orders of all problems.

    Args:
        fixed: programs by name that fit; they are starting points, and are not found again.
        value: what to make small.
        effort: 1 for a few seconds at 8 ranks and 32 microbatches.
        prove: whether the value is the makespan, which lower bounds and exact search are for.
    """
    bounds = {problem: lower_bound(problem) if prove else 0.0 for problem in problems}
    # blocks cost by their stages; all problems share what is spent on them
    everything = sum(problem.actions for problem in problems)
    tries = int(_TRIES * effort * min(1.0, _ALL / everything))
    found = [
        one
        for problem in problems
        for one in [*_named(problem, fixed, value), *_built(problem, value, bounds[problem], tries)]
    ]
    _sort(found)
    size = max(problem.actions for problem in problems)
    budget = Budget(effort * min(_ACTIONS, 4.0 * size * size + 200 * size))
    best = _improve(found, bounds, value, budget)
    complete = prove and _prove(problems, bounds, best, value, effort)
    return Hunt(best, complete)


def _sort(found: list[Found]) -> None:
    found.sort(key=lambda one: one.value)


def _found(problem: Problem, orders: Orders | None, value: Value, source: str) -> list[Found]:
    """The orders if they run and fit, in a list."""
    if orders is None or sum(map(len, orders)) != problem.actions or not problem.fits(orders):
        return []
    ends = replay(problem, orders)
    return [] if ends is None else [Found(problem, orders, value(problem, ends), source)]


def _named(problem: Problem, fixed: Sequence[tuple[str, Program]], value: Value) -> list[Found]:
    return [
        one
        for name, program in fixed
        if program.placement == problem.placement
        for one in _found(problem, problem.orders_of(program), value, name)
    ]


def _built(problem: Problem, value: Value, bound: float, tries: int) -> list[Found]:
    """What the building blocks give; the rest is left out once one reaches the bound."""
    found: list[Found] = []
    for block in blocks(problem):
        orders = dispatch(problem, urgency(problem, block), block.patience)
        found += _found(problem, orders, value, "block")
        if bound and found[-1].value <= bound * (1 + 1e-12):
            return found
    for spacing, late in product(_SPACINGS, (True, False)):
        found += _found(problem, insertion(problem, Entry(spacing, late)), value, "insertion")
    if problem.tight and problem.actions > _PROVABLE:
        for orders in (
            orders
            for seed in range(_SEEDS)
            for orders in cyclic(problem, min(tries, problem.actions), Random(seed))
        ):
            found += _found(problem, orders, value, "cyclic")
    return found


def _improve(found: list[Found], bounds: dict[Problem, float], value: Value, budget: Budget) -> list[Found]:
    """Improve the best of each problem, more and more of the effort on fewer and fewer."""
    random = Random(0)
    pool = _various(found, 12)
    whole = budget.actions
    for width, share in ((12, 0.2), (4, 0.3), (1, 0.5)):
        del pool[width:]
        for at, one in enumerate(pool):
            until = bounds[one.problem] * (1 + 1e-12)
            if pool[0].value <= until or one.value <= until or bounds[one.problem] >= pool[0].value:
                continue
            mine = Budget(whole * share / width)
            better = redispatch(one, value, mine, random, until, tries=6 if width > 1 else 12)
            pool[at] = climb(better, value, mine, random, until)
        _sort(pool)
    return _merged(pool, found)


def _various(found: list[Found], count: int) -> list[Found]:
    """The best, at most a third of one problem and origin, no two of one problem with the same value."""
    taken: list[Found] = []
    seen: set[tuple[Problem, float]] = set()
    for one in found:
        same = sum(one.problem is t.problem and one.source == t.source for t in taken)
        if (one.problem, one.value) not in seen and same < max(1, count // 3):
            seen.add((one.problem, one.value))
            taken.append(one)
        if len(taken) == count:
            break
    return taken


def _merged(pool: list[Found], found: list[Found]) -> list[Found]:
    """A few of the best of both, the best first: exact costs decide between them."""
    both = [*pool, *found[:3]]
    _sort(both)
    return both[:6]


def _prove(
    problems: Sequence[Problem],
    bounds: dict[Problem, float],
    best: list[Found],
    value: Value,
    effort: float,
) -> bool:
    """Solve the problems that are small enough; whether the first of `best` is optimal after that."""
    complete = True
    for problem in sorted(problems, key=bounds.__getitem__):
        least = best[0].value
        if bounds[problem] >= least * (1 - 1e-12):
            continue
        if problem.actions > _PROVABLE:
            return False
        proof = exact(problem, least, bounds[problem], int(_SMALL * effort) + 1)
        complete = complete and proof.complete
        best[:0] = _found(problem, proof.orders, value, "exact")
        _sort(best)
    return complete
