"""The replay agrees with a second one, written differently, on random programs and costs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from clockwork import Clockwork, Stuck
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_programs import random_program, with_moves, with_updates

from example_counts import scaled
from stretto.program import ActionKind, Program, ScheduleError, lower
from stretto.program.replay import Costs, simulate


def draw_costs(program: Program, random: Random) -> Costs:
    """Sums of quarters, so that events meet at one moment often and exactly."""

    def times(top: int) -> list[float]:
        high = random.choice([0, top])
        return [random.randint(0, high) / 4 for _ in program.placement]

    shares = list(zip(times(8), times(8), times(8), strict=True))
    ranks = range(program.ranks)
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    some = Costs(
        per_stage=shares,
        hop=random.choice([0, 0.25, 1.5]),
        recompute=times(6),
        message_bytes=[float(random.choice([0, 4, 8, 16])) for _ in range(program.depth - 1)],
        bandwidth=random.choice([16.0, {pair: random.choice([8.0, 16.0]) for pair in pairs}]),
        update=times(4),
        **dict.fromkeys(("reduce", "unshard", "offload", "reload"), [0.0] * program.stages),
    )
    if random.random() < 0.3:
        return some  # one pass will do
    return replace(
        some,
        links={pair: random.choice(["a", "b"]) for pair in pairs if random.random() < 0.7},
        contention=random.random() < 0.6,
        blocking=random.random() < 0.3,
        reduce=times(8),
        reduce_overlaps=random.random() < 0.7,
        unshard=times(8),
        offload=times(8),
        reload=times(8),
        pair=random.choice([None, 0.75, 1.0]),
    )


def draw_program(random: Random) -> Program:
    program = random_program(random)
    if random.random() < 0.3:
        program = with_updates(program, random)
    if random.random() < 0.4:
        program = with_moves(program, random)
    if random.random() < 0.5:
        tied = [(0, program.depth - 1)] if program.depth > 1 and random.random() < 0.5 else []
        program = lower(program, tied, lookahead=random.choice([0, 1, 1, 3, 100]))
    return program


def agree(seed: int) -> bool:
    """True if both completed the program."""
    random = Random(seed)
    program = draw_program(random)
    costs = draw_costs(program, random)
    try:
        spans = Clockwork(program, costs).run()
    except Stuck:
        with pytest.raises(ScheduleError):
            simulate(program, costs)
        return False
    line = simulate(program, costs)
    inside = any(a.kind is ActionKind.UPDATE for order in program.orders for a in order)
    for rank, order in enumerate(program.orders):
        for at, action in enumerate(order):
            if action.kind is ActionKind.REDUCE_GRAD and not inside and not costs.reduce_overlaps:
                continue  # after everything else: has its own tests
            span = line.starts[rank][at], line.ends[rank][at]
            assert span == spans[rank, at], (seed, rank, action)
    return True


@settings(max_examples=scaled(400), deadline=None)
@given(st.integers(0, 10**9))
@example(163)  # of two messages on a link, the one that is sent later is the first whose receive is posted
def test_the_replay_agrees_with_clockwork(seed: int):
    agree(seed)


def test_most_random_programs_complete():
    assert sum(map(agree, range(100))) > 60


@pytest.mark.slow
def test_the_replay_agrees_with_clockwork_thousands_of_times():
    assert sum(map(agree, range(20_000))) > 12_000
