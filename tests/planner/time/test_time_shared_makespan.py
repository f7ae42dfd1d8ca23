"""Ranks that share cores, replayed."""

from __future__ import annotations

import pytest

from stretto.planner.time.shared_cores import shared_replay
from stretto.program import schedule
from stretto.program.action import Action, ActionKind
from stretto.program.program import Program
from stretto.program.replay import Costs, simulate

PARTS = {ActionKind.F: 1.0, ActionKind.B: 2.0, ActionKind.I: 1.0, ActionKind.W: 1.0}


def makespan(program: Program, processes: int, cores: int) -> float:
    chunks = program.stages // program.ranks
    return shared_replay(program, lambda action: PARTS[action.kind] / chunks, processes, cores).makespan


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved", "dualpipe", "chimera"])
def test_with_a_core_for_each_rank_it_equals_the_replay(name: str) -> None:
    options = {"chunks": 2} if name == "interleaved" else {}
    program = schedule(name, 4, 8, **options)
    timeline = simulate(program, Costs(per_stage=[(1.0, 1.0, 1.0)] * program.stages))
    shared = shared_replay(program, lambda action: PARTS[action.kind], 1, 4)
    assert shared.makespan == pytest.approx(timeline.makespan)
    assert [shared.busy(order) for order in program.orders] == pytest.approx(timeline.work)


@pytest.mark.parametrize("processes", [1, 3])
def test_on_one_core_it_is_the_sum_of_the_work(processes: int) -> None:
    program = schedule("1f1b", 4, 8)
    assert makespan(program, processes, 1) == pytest.approx(4 * 8 * 3 * processes)


def test_cores_idle_where_fewer_ranks_can_work() -> None:
    few, many = (schedule("1f1b", 4, m) for m in (4, 64))
    work = {m: 4 * m * 3 / 2 for m in (4, 64)}
    assert makespan(few, 1, 2) > 1.05 * work[4]
    assert work[64] < makespan(many, 1, 2) < 1.03 * work[64]


def test_waiting_ranks_leave_their_core_to_others() -> None:
    program = schedule("1f1b", 2, 2)
    slow = shared_replay(program, lambda a: 10.0 if a == Action(0, ActionKind.F, 0) else 1.0, 1, 1)
    assert slow.makespan == pytest.approx(10.0 + 7.0)
