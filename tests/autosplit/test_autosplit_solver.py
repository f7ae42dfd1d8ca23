"""The solver against every combination, on graphs small enough to try them all."""

from __future__ import annotations

from itertools import combinations, product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from example_counts import scaled
from stretto.autosplit.solver import Assignment, Cost, OptionGraph, solve

COSTS = st.builds(Cost, st.integers(0, 9).map(float), st.integers(0, 9).map(float))


@st.composite
def problems(draw: st.DrawFn) -> OptionGraph:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    nodes = [{at: draw(COSTS) for at in range(size)} for size in sizes]
    edges = {
        (node, other): {
            pair: draw(COSTS) for pair in product(nodes[node], nodes[other]) if draw(st.integers(0, 5))
        }
        for node, other in combinations(range(len(nodes)), 2)
        if draw(st.booleans())
    }
    return OptionGraph(nodes, edges)


def brute_force(problem: OptionGraph, limit: float) -> float | None:
    """The least seconds of all combinations within the limit."""
    costs = (problem.cost(options) for options in product(*problem.nodes))
    return min((cost.seconds for cost in costs if cost is not None and cost.bytes <= limit), default=None)


def check(problem: OptionGraph, limit: float, solution: Assignment | None) -> None:
    least = brute_force(problem, limit)
    if solution is None:
        assert least is None
        return
    assert problem.cost(solution.options) == solution.cost
    assert solution.cost.seconds == least
    assert solution.cost.bytes <= limit


@settings(max_examples=scaled(300), deadline=None)
@given(problem=problems(), widest=st.sampled_from([1, 4, 20, 100_000]))
def test_equals_brute_force(problem: OptionGraph, widest: int) -> None:
    check(problem, inf, solve(problem, widest=widest))


@settings(max_examples=scaled(600), deadline=None)
@given(problem=problems(), share=st.floats(0, 1), widest=st.sampled_from([1, 4, 20, 100_000]))
def test_equals_brute_force_under_a_limit_of_memory(problem: OptionGraph, share: float, widest: int) -> None:
    """Limits between the smallest and the largest combination."""
    possible = [cost.bytes for options in product(*problem.nodes) if (cost := problem.cost(options))]
    low, high = (min(possible), max(possible)) if possible else (0.0, 1.0)
    limit = low + share * (high - low)
    check(problem, limit, solve(problem, limit, widest))


def chain(length: int, options: int = 3) -> OptionGraph:
    """Nodes in a row whose options trade time for memory, none of them alike."""
    nodes = [
        {
            at: Cost(1.0 + 0.01 * (node * 7 % 13) * at, 100.0 - (node * 11 % 29 + 1) * at)
            for at in range(options)
        }
        for node in range(length)
    ]
    edges = {
        (node, node + 1): {
            (option, other): Cost(0.003 * (node % 5) * abs(option - other), 0.0)
            for option, other in product(range(options), repeat=2)
        }
        for node in range(length - 1)
    }
    return OptionGraph(nodes, edges)


def test_chains_of_hundreds_of_operators_fit_exactly() -> None:
    """Against the same chain by a table over memory: the least seconds for every number of bytes."""
    problem = chain(60)
    free = solve(problem)
    assert free is not None
    limit = 0.9 * free.cost.bytes
    reached: dict[tuple[int, float], float] = {
        (at, cost.bytes): cost.seconds for at, cost in problem.nodes[0].items()
    }
    for node in range(1, 60):
        after: dict[tuple[int, float], float] = {}
        for (option, size), seconds in reached.items():
            for other, cost in problem.nodes[node].items():
                key = other, size + cost.bytes
                total = seconds + cost.seconds + problem.edges[node - 1, node][option, other].seconds
                after[key] = min(after.get(key, inf), total)
        reached = after
    least = min(seconds for (_, size), seconds in reached.items() if size <= limit)
    best = solve(problem, limit)
    assert best is not None
    assert best.cost.seconds == pytest.approx(least, rel=1e-12)
    assert best.cost.bytes <= limit


def test_no_combination() -> None:
    forbidden = OptionGraph([{0: Cost(1, 1)}, {0: Cost(1, 1)}], {(0, 1): {}})
    assert solve(forbidden) is None
    assert solve(OptionGraph([{0: Cost(1, 5)}], {}), limit=4) is None
    assert solve(OptionGraph([{0: Cost(1, 5)}, {}], {})) is None
