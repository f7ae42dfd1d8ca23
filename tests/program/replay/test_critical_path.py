"""The critical path leads from the step's start to its end without a gap that it cannot explain."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_programs import random_program
from test_bound import EVERY, drawn
from test_replay_clockwork import draw_costs, draw_program

from stretto.program import ActionKind, ScheduleError, lower, schedule
from stretto.program.replay import Costs, CriticalEvent, Timeline, simulate

REASONS = {"order", "message", "queue", "reduction", "barrier", "beside"}


def complete(line: Timeline) -> list[CriticalEvent]:
    """The path, once it is known to begin at the start and to end at the end."""
    path = line.critical_path
    assert path[0].event.start == 0
    assert path[0].reason == "start"
    assert path[-1].event.end == line.makespan
    assert {cause.reason for cause in path[1:]} <= REASONS
    return path


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_what_is_on_the_path_adds_up_to_the_makespan(seed: int):
    random = Random(seed)
    program = drawn(random, random.choice(EVERY))
    hop = random.choice([0.0, 0.25, 2.0])
    line = simulate(program, Costs(F=random.random(), I=random.random(), W=random.random(), hop=hop))
    path = complete(line)
    work = sum(cause.event.end - cause.event.start for cause in path)
    hops = hop * sum(cause.reason == "message" for cause in path)
    assert work + hops == pytest.approx(line.makespan)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_every_step_of_the_path_begins_when_the_one_before_lets_it(seed: int):
    random = Random(seed)
    program = drawn(random, random.choice(EVERY))
    line = simulate(lower(program, lookahead=random.choice([0, 1, 3])), Costs(hop=random.choice([0, 0.5])))
    path = complete(line)
    for before, (event, reason) in pairwise(path):
        sends = before.event.action.kind.is_transfer
        if reason == "message":
            assert sends
            assert before.event.end == event.start
        elif reason == "order":
            assert before.event.rank == event.rank
            assert before.event.end == event.start


@settings(max_examples=150, deadline=None)
@example(13156211)  # a receive between the two actions of a block, with blocking sends
@given(st.integers(0, 10**9))
def test_any_costs_have_a_path(seed: int):
    random = Random(seed)
    program = draw_program(random)
    costs = draw_costs(program, random)
    try:
        line = simulate(program, costs)
    except ScheduleError:
        return
    if line.makespan > 0:
        complete(line)


def test_a_path_written_out():
    line = simulate(schedule("1f1b", 2, 2), Costs(hop=0.5, reduce=[1, 0], update=1))
    path = [(str(cause.event.action), cause.reason) for cause in line.critical_path]
    assert path == [
        ("0F0", "start"),
        ("1F0", "message"),
        ("1B0", "order"),
        ("1F1", "order"),
        ("1B1", "order"),
        ("0B1", "message"),
        ("0REDUCE_GRAD", "order"),
        ("0U", "barrier"),
    ]


def test_a_message_that_queued_is_on_the_path():
    costs = Costs(message_bytes=4, bandwidth=1, contention=True)
    line = simulate(replace(schedule("gpipe", 2, 3)), costs)
    assert "queue" in {cause.reason for cause in complete(line)}
    assert any(kind is ActionKind.B for kind in (cause.event.action.kind for cause in line.critical_path))


def test_paths_of_random_orders():
    for seed in range(50):
        random = Random(seed)
        complete(simulate(random_program(random)))
