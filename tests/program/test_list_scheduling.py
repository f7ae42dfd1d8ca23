"""List scheduling: orders stay orders that run, memory stays within the limit, idle time goes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stretto.layout.placement import linear, vee
from stretto.program import Action, ActionKind, Program, check, schedule
from stretto.program.memory import peak_held
from stretto.program.replay import Costs, simulate
from stretto.program.schedules.list_scheduling import greedy, tighten


def one_after_the_other(placement: tuple[int, ...], m: int, split: bool) -> list[list[Action]]:
    """All of microbatch 0, then all of 1: runs on any placement, and holds one microbatch."""
    backs = (ActionKind.I, ActionKind.W) if split else (ActionKind.B,)
    orders: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for i in range(m):
        for stage, rank in enumerate(placement):
            orders[rank].append(Action(stage, ActionKind.F, i))
        for stage, rank in reversed(list(enumerate(placement))):
            orders[rank] += [Action(stage, kind, i) for kind in backs]
    return orders


@pytest.mark.parametrize("seed", range(12))
def test_any_placement_and_limits_run_within_them(seed: int):
    draw = random.Random(seed)
    p, m = draw.randint(1, 5), draw.randint(1, 9)
    placement = tuple(list(range(p)) + [draw.randrange(p) for _ in range(draw.randint(0, 6))])
    orders = one_after_the_other(placement, m, split=draw.random() < 0.5)
    limits = [placement.count(r) + draw.randint(0, 5) for r in range(p)]
    played = tighten(placement, orders, limits)
    program = Program(name="x", placement=placement, microbatches=m, orders=played.orders)
    check(program)
    assert all(peak <= limit for peak, limit in zip(peak_held(program), limits, strict=True))
    assert [sorted(order) for order in played.orders] == [sorted(order) for order in orders]


def test_room_for_p_microbatches_makes_1f1b_of_the_naive_order():
    placement = linear(4)
    orders = one_after_the_other(placement, 8, split=False)
    tight = tighten(placement, orders, [4 - r for r in range(4)])
    assert tight.makespan == 3 * (8 + 3)
    # no room, no gain
    assert tighten(placement, orders, [1] * 4).makespan == 8 * 4 * 3


def test_orders_without_gaps_stay_unchanged():
    program = schedule("1f1b", 4, 8)
    assert tighten(program.placement, program.orders, [4, 3, 2, 1]).orders == program.orders


def test_a_simulation_takes_the_time_of_a_replay():
    for name, backward in (("1f1b", 2), ("interleaved", 2), ("zb-v", 2), ("chimera", 1)):
        program = schedule(name, 4, 10)
        limits = peak_held(program)
        played = tighten(program.placement, program.orders, limits, program.copies, backward)
        each = [(1, backward / 2, backward / 2)] * program.stages
        tight = replace(program, orders=played.orders)
        assert played.makespan == simulate(tight, Costs(per_stage=each)).makespan


def test_greedy_lets_no_more_in_than_allowed():
    placement = vee(3)
    wishes = [
        [Action(s, kind, i) for kind in (ActionKind.B, ActionKind.F) for i in range(7) for s in (r, 5 - r)]
        for r in range(3)
    ]
    for in_flight in (1, 2, 5):
        program = Program(
            name="x", placement=placement, microbatches=7, orders=greedy(placement, wishes, in_flight).orders
        )
        check(program)
        assert max(peak_held(program)) <= 2 * in_flight
    assert greedy(placement, wishes, 1).makespan == 7 * 6 * 3
