"""No program is faster than the bound, and some are as fast."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import random_program, with_moves, with_updates
from test_replay_clockwork import draw_costs

from stretto.errors import StrettoError
from stretto.program import Action, ActionKind, Program, names, options, schedule
from stretto.program.replay import Costs, bound, simulate

EVERY = sorted(set(names()) - {"auto"})
times = st.floats(0.0, 4.0, allow_nan=False)


def drawn(random: Random, name: str) -> Program:
    """The schedule at some size that it is defined for."""
    while True:
        p, m = random.randint(1, 6), random.randint(1, 14)
        more = {"chunks": random.choice([1, 2, 3])} if "chunks" in options(name) else {}
        try:
            return schedule(name, p, m, **more)
        except StrettoError:
            continue


def holds(program: Program, costs: Costs) -> None:
    line = simulate(program, costs)
    slack = 1e-9 * (1 + line.makespan)
    assert line.bound <= line.makespan + slack
    assert bound(program, costs, memory=max(line.peak_bytes)) <= line.makespan + slack


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_no_schedule_beats_the_bound(seed: int):
    random = Random(seed)
    program = drawn(random, random.choice(EVERY))
    per_stage = [(random.random(), random.random(), random.random()) for _ in program.placement]
    costs = Costs(
        per_stage=per_stage if random.random() < 0.5 else None,
        F=random.random(),
        hop=random.choice([0, 0.1, 2.0]),
        pair=random.choice([None, 0.6, 1.0]),
        reduce=random.random(),
        reduce_overlaps=random.random() < 0.5,
        update=random.random(),
        kept_for_w=random.random(),
        activations=[random.random() for _ in program.placement],
    )
    holds(program, costs)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_no_random_order_beats_the_bound(seed: int):
    random = Random(seed)
    program = random_program(random)
    if random.random() < 0.3:
        program = with_updates(program, random)
    if random.random() < 0.3:
        program = with_moves(program, random)
    costs = replace(draw_costs(program, random), blocking=False, pair=None)
    holds(program, costs)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "interleaved-zb", "dualpipe", "dualpipe-v"])
@pytest.mark.parametrize(("p", "m"), [(2, 6), (4, 8), (8, 24)])
def test_schedules_that_reach_the_bound(name: str, p: int, m: int):
    line = simulate(schedule(name, p, m))
    assert line.bound == pytest.approx(line.makespan)


def test_one_microbatch_makes_a_round_trip():
    costs = Costs(hop=0.5, per_stage=[(1, 2, 3), (2, 1, 5), (3, 4, 1)])
    order = [[f"{s}F0", f"{s}I0", f"{s}W0"] for s in range(3)]
    kinds = {"F": ActionKind.F, "I": ActionKind.I, "W": ActionKind.W}
    orders = tuple(tuple(Action(int(a[0]), kinds[a[1]], 0) for a in each) for each in order)
    line = simulate(Program(name="one", placement=(0, 1, 2), microbatches=1, orders=orders), costs)
    # forwards 6, input gradients 7, four hops, the first stage's weight gradient
    assert line.bound == line.makespan == 6 + 7 + 2 + 3


def test_little_memory_makes_a_step_longer():
    program, costs = schedule("naive", 4, 16), Costs()
    # one microbatch at a time: a rank holds it from its F over the way to the loss and back
    assert simulate(program, costs).makespan == 16 * 12
    free, at_one, two = (bound(program, costs, memory) for memory in (None, 1, 2))
    assert free == 51
    assert at_one == 16 * (4 + 4 + 1)  # with weight gradients put off on the other ranks
    assert two == at_one / 2
    assert bound(program, costs, memory=10**9) == free


def test_memory_that_holds_not_even_one_microbatch():
    with pytest.raises(StrettoError, match="memory is 1, but stage 1 on rank 1 holds 2 of one microbatch"):
        bound(schedule("1f1b", 2, 4), Costs(activations=[1, 2]), memory=1)


def test_a_program_without_work():
    assert bound(Program(name="empty", placement=(0,), microbatches=1, orders=((),))) == 0
