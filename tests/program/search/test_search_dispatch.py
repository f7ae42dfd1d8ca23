"""List scheduling within limits: it always comes to its end, and never holds more."""

from __future__ import annotations

from random import Random

import pytest

from stretto.layout.placement import loop, zigzag
from stretto.program import check, lower
from stretto.program.memory import peak_activations
from stretto.program.replay import Costs, simulate
from stretto.program.search.dispatch import blocks, dispatch, urgency
from stretto.program.search.evaluate import latest_starts, makespan, replay
from stretto.program.search.insertion import InsertionRule, insertion
from stretto.program.search.modulo import cyclic
from stretto.program.search.problem import Orders, SchedulingProblem, problem_of


def random_problem(random: Random, chunks: int) -> tuple[SchedulingProblem, Costs, list[float | None]]:
    ranks, m = random.randint(1, 4), random.randint(1, 9)
    place = random.choice([loop, zigzag])(ranks, chunks)
    times = [tuple(random.uniform(0.1, 2) for _ in range(3)) for _ in place]
    costs = Costs(hop=random.choice([0.0, 0.3]), per_stage=[(f, i, w) for f, i, w in times])
    memory: list[float | None] = [random.choice([1, 1.25, 1.5, 2, 3, None]) for _ in range(ranks)]
    return problem_of(place, m, costs, memory, random.random() < 0.7), costs, memory


def holds_what_it_should(
    problem: SchedulingProblem, costs: Costs, memory: list[float | None], orders: Orders
) -> None:
    program = problem.program(orders)
    check(lower(program))
    for peak, limit in zip(peak_activations(program), memory, strict=True):
        assert limit is None or peak <= limit
    ends = replay(problem, orders)
    assert ends is not None
    assert makespan(ends) == simulate(program, costs).makespan
    starts = latest_starts(problem, orders, ends)
    early = (
        (end - problem.cost[op], late)
        for op in range(len(ends))
        for end, late in zip(ends[op], starts[op], strict=True)
    )
    assert all(start <= late + 1e-9 for start, late in early)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_any_urgency_runs_and_fits(chunks: int) -> None:
    random = Random(chunks)
    for _ in range(25):
        problem, costs, memory = random_problem(random, chunks)
        wishes = [[random.random() for _ in range(problem.microbatches)] for _ in problem.cost]
        orders = dispatch(problem, wishes, random.choice([0.0, 0.5, 1.0]))
        holds_what_it_should(problem, costs, memory, orders)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_everything_built_runs_and_fits(chunks: int) -> None:
    random = Random(10 + chunks)
    for _ in range(4):
        problem, costs, memory = random_problem(random, chunks)
        built = [dispatch(problem, urgency(problem, b), b.patience) for b in list(blocks(problem))[::9]]
        built += [
            o for late in (True, False) if (o := insertion(problem, InsertionRule(1.0, late))) is not None
        ]
        built += cyclic(problem, 50, random)
        assert built
        for orders in built:
            holds_what_it_should(problem, costs, memory, orders)
