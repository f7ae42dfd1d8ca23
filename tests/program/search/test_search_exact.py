"""The search against all orders there are, replayed one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

import pytest

from stretto.layout.placement import linear, place
from stretto.program import Action, ActionKind, Program, check, lower
from stretto.program.memory import peak_activations
from stretto.program.replay import Costs, simulate
from stretto.program.search import search
from stretto.program.search.evaluate import makespan, replay
from stretto.program.search.exact import exact
from stretto.program.search.problem import lower_bound, problem_of


def merges(left: frozenset[Action], done: tuple[Action, ...], ordered: bool) -> Iterator[tuple[Action, ...]]:
    """Every order of one rank in which F comes before I and I before W; `ordered`: and in which every stage
    takes its microbatches in their order, kind by kind."""
    if not left:
        yield done
    for action in left:
        stage, kind, i = action
        before = {ActionKind.I: ActionKind.F, ActionKind.B: ActionKind.F, ActionKind.W: ActionKind.I}.get(
            kind
        )
        if before is not None and Action(stage, before, i) in left:
            continue
        if ordered and i and Action(stage, kind, i - 1) in left:
            continue
        yield from merges(left - {action}, (*done, action), ordered)


def all_orders(
    placement: tuple[int, ...], rank: int, m: int, kinds: tuple[ActionKind, ...], ordered: bool
) -> list[tuple[Action, ...]]:
    stages = [s for s, r in enumerate(placement) if r == rank]
    actions = frozenset(Action(s, k, i) for s in stages for k in kinds for i in range(m))
    return list(merges(actions, (), ordered))


def ends_at(program: Program, costs: Costs) -> float:
    """The makespan, infinite for a deadlock. Longest paths, independent of the other replays here."""
    assert costs.per_stage is not None
    end: dict[Action, float] = {}
    place = [0] * program.ranks
    clock = [0.0] * program.ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(program.orders):
            while place[rank] < len(order):
                stage, kind, i = order[place[rank]]
                f, inputs, w = costs.per_stage[stage]
                back = ActionKind.B if ActionKind.B in {a.kind for a in order} else ActionKind.I
                needs: list[tuple[Action, int]] = []
                if kind is ActionKind.F and stage:
                    needs = [(Action(stage - 1, ActionKind.F, i), stage - 1)]
                elif kind is back:
                    last = stage == program.stages - 1
                    needs = [(Action(stage, ActionKind.F, i), stage)]
                    needs += [] if last else [(Action(stage + 1, back, i), stage + 1)]
                elif kind is ActionKind.W:
                    needs = [(Action(stage, ActionKind.I, i), stage)]
                if any(need not in end for need, _ in needs):
                    break
                hops = [end[need] + costs.hop * (program.placement[s] != rank) for need, s in needs]
                time = {ActionKind.F: f, ActionKind.I: inputs, ActionKind.W: w, ActionKind.B: inputs + w}[
                    kind
                ]
                clock[rank] = end[Action(stage, kind, i)] = max([clock[rank], *hops]) + time
                place[rank] += 1
                moved = True
    done = all(at == len(order) for at, order in zip(place, program.orders, strict=True))
    return max(clock) if done else float("inf")


def brute_force(
    placement: tuple[int, ...], m: int, costs: Costs, memory: list[float], split: bool, ordered: bool
) -> float:
    kinds = (ActionKind.F, ActionKind.I, ActionKind.W) if split else (ActionKind.F, ActionKind.B)
    ranks = max(placement) + 1
    rows: list[list[tuple[Action, ...]]] = []
    for rank in range(ranks):
        mine = all_orders(placement, rank, m, kinds, ordered)
        empty = ((),) * ranks
        rows.append(
            [
                order
                for order in mine
                if peak_activations(
                    Program(
                        name="",
                        placement=placement,
                        microbatches=m,
                        orders=(*empty[:rank], order, *empty[rank + 1 :]),
                    )
                )[rank]
                <= memory[rank]
            ]
        )
    return min(
        ends_at(Program(name="", placement=placement, microbatches=m, orders=orders), costs)
        for orders in product(*rows)
    )


def random_costs(random: Random, stages: int) -> Costs:
    times = [(random.uniform(0.2, 2), random.uniform(0.2, 2), random.uniform(0, 2)) for _ in range(stages)]
    return Costs(hop=random.choice([0.0, 0.4]), per_stage=times)


# (ranks, microbatches, chunks, split); the number of programs stays below 4000
SIZES = [
    *((1, 3, 1, True), (2, 2, 1, True), (2, 3, 1, True), (3, 2, 1, True), (2, 1, 2, True)),
    *((2, 3, 1, False), (2, 4, 1, False), (3, 3, 1, False), (3, 4, 1, False), (2, 1, 2, False)),
]


@pytest.mark.parametrize(("ranks", "m", "chunks", "split"), SIZES)
def test_nothing_beats_what_is_proved(ranks: int, m: int, chunks: int, split: bool) -> None:
    for seed in range(3):
        random = Random(f"{ranks} {m} {chunks} {seed}")
        costs = random_costs(random, ranks * chunks)
        memory = [random.choice([1, 1.5, 2, 3, m]) for _ in range(ranks)]
        for name in ("linear", "loop", "zigzag")[: 1 if chunks == 1 else 3]:
            result = search(ranks, m, costs, memory, placement=name, split=split)
            best = brute_force(place(name, ranks, chunks), m, costs, memory, split, ordered=True)
            assert result.optimal
            assert result.value == pytest.approx(best, rel=1e-12), (name, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "m", "chunks", "split"), [(3, 3, 1, True), (2, 4, 1, True), (2, 2, 2, False)]
)
def test_nothing_beats_what_is_proved_among_more(ranks: int, m: int, chunks: int, split: bool) -> None:
    random = Random(5)
    costs = random_costs(random, ranks * chunks)
    memory = [random.choice([1.5, 2, 3]) for _ in range(ranks)]
    result = search(ranks, m, costs, memory, placement="zigzag", split=split)
    best = brute_force(place("zigzag", ranks, chunks), m, costs, memory, split, ordered=True)
    assert result.optimal
    assert result.value == pytest.approx(best, rel=1e-12)


def test_microbatches_out_of_their_order_gain_nothing() -> None:
    """What lets the search leave them out."""
    for seed in range(3):
        random = Random(seed)
        costs = random_costs(random, 2)
        memory = [random.choice([1, 2]), random.choice([1, 2])]
        some, every = (
            brute_force(linear(2), 2, costs, list(memory), True, ordered) for ordered in (True, False)
        )
        assert some == pytest.approx(every, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_three_ranks_and_four_microbatches_are_solved(seed: int) -> None:
    random = Random(seed)
    costs = random_costs(random, 3)
    memory = [random.choice([1, 2, 3, None]) for _ in range(3)]
    result = search(3, 4, costs, memory, placement="linear")
    assert result.optimal
    assert result.bound == result.value == simulate(result.program, costs).makespan
    assert check(lower(result.program)).ranks == 3


def test_exact_search_starts_from_nothing() -> None:
    """It finds the best by itself, not only what heuristics gave it."""
    for seed in range(4):
        random = Random(seed)
        costs = random_costs(random, 2)
        problem = problem_of(linear(2), 3, costs, [2, 2], True)
        proof = exact(problem, 1e9, lower_bound(problem), 100_000)
        assert proof.complete
        assert proof.orders is not None
        ends = replay(problem, proof.orders)
        assert ends is not None
        best = brute_force(linear(2), 3, costs, [2, 2], True, ordered=True)
        assert makespan(ends) == pytest.approx(best, rel=1e-12)
        assert lower_bound(problem) <= best * (1 + 1e-12)


def test_a_search_cut_short_proves_nothing() -> None:
    problem = problem_of(linear(3), 4, random_costs(Random(0), 3), [2, 2, 2], True)
    assert not exact(problem, 1e9, 0.0, 5).complete
