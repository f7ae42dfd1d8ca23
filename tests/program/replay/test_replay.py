"""The replay gives the events that were worked out by hand, and a lowered program the same times."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest

from stretto.errors import StrettoError
from stretto.program import Action, ActionKind, Program, ScheduleError, lower, schedule, send_releases
from stretto.program.messages import channel_of, needed_by, receive_of
from stretto.program.replay import Costs, Event, simulate
from stretto.program.text import parse_action


def program(placement: tuple[int, ...], microbatches: int, *orders: str) -> Program:
    rows = tuple(tuple(map(parse_action, order.split())) for order in orders)
    return Program(name="test", placement=placement, microbatches=microbatches, orders=rows)


def test_a_short_last_group_costs_less_than_the_textbook_order():
    # the textbook order comes to 9.75 here, an even number of groups to 2.25
    assert simulate(schedule("interleaved", 4, 18, chunks=4)).bubble.barrier < 6


# --- events


def test_events_written_out():
    line = simulate(program((0, 1), 1, "0F0 0B0", "1F0 1I0 1W0"), Costs(F=1, I=2, W=3, hop=0.5))
    assert line.events == [
        Event(0, Action(0, ActionKind.F, 0), 0, 1),
        Event(0, Action(0, ActionKind.B, 0), 5, 10),
        Event(1, Action(1, ActionKind.F, 0), 1.5, 2.5),
        Event(1, Action(1, ActionKind.I, 0), 2.5, 4.5),
        Event(1, Action(1, ActionKind.W, 0), 4.5, 7.5),
    ]
    assert line.makespan == 10
    assert line.ideal == 6
    assert line.bubble == (4, 4, 0.4, 4 / 6)


def test_span_bubble_is_the_worst_rank_between_its_own_ends():
    line = simulate(schedule("1f1b", 4, 8))
    # rank 0 waits for its first backward; the last rank starts late and then never waits
    assert line.bubble.span == line.bubble.barrier == 9
    slow = simulate(schedule("1f1b", 2, 4), Costs(per_stage=[(1, 1, 1), (2, 2, 2)]))
    assert slow.ideal == 24
    assert slow.bubble.barrier == 1 + 2  # the busiest rank idles only for the first forward and last backward
    assert slow.bubble.span == slow.makespan - 12


def test_events_respect_ranks_and_dependencies():
    random = Random(3)
    for name, p, m, v in (("gpipe", 3, 4, None), ("1f1b", 4, 7, None), ("interleaved", 3, 8, 3)):
        program = schedule(name, p, m, chunks=v)
        shares = [(random.random(), random.random(), random.random()) for _ in range(program.stages)]
        hop = random.random()
        line = simulate(program, Costs(hop=hop, per_stage=shares))
        end = {e.action: e.end for e in line.events}
        start = {e.action: e.start for e in line.events}
        for rank, order in enumerate(program.orders):
            free = 0.0
            for action in order:
                f, i, w = shares[action.stage]
                assert end[action] == start[action] + (f if action.kind is ActionKind.F else i + w)
                ready = free
                source = action.stage + (-1 if action.kind is ActionKind.F else 1)
                if 0 <= source < program.stages:
                    away = program.placement[source] != rank
                    ready = max(ready, end[action._replace(stage=source)] + hop * away)
                assert start[action] == ready  # neither before its time nor idle without reason
                free = end[action]


def test_hand_over_on_one_rank_takes_no_transfer():
    line = simulate(program((0, 0), 1, "0F0 1F0 1B0 0B0"), Costs(F=2, I=2, W=2, hop=9))
    assert line.makespan == 6
    assert line.transfers == 0
    assert simulate(schedule("interleaved", 1, 3, chunks=4)).bubble == (0, 0, 0, 0)


# --- lowered programs


CASES = [("gpipe", 4, 6, None), ("1f1b", 4, 9, None), ("interleaved", 2, 6, 2), ("interleaved", 3, 8, 3)]


@pytest.mark.parametrize("case", CASES)
def test_lowering_changes_no_time(case: tuple[str, int, int, int | None]):
    program = schedule(*case)
    tied = ((0, program.stages - 1),)
    for costs in (Costs(), Costs(hop=0.25)):
        plain, lowered = simulate(program, costs), simulate(lower(program, tied), costs)
        # one compute action ahead is enough while a hop takes no longer than the shortest of them
        compute = [e for e in lowered.events if e.action.kind.is_compute]
        assert compute == plain.events
        assert lowered.bubble == plain.bubble
        assert (lowered.peak_activations, lowered.transfers) == (plain.peak_activations, plain.transfers)
    slow = Costs(hop=7)
    assert simulate(lower(program, lookahead=10**6), slow).makespan == simulate(program, slow).makespan
    assert simulate(lower(program, lookahead=0), slow).makespan > simulate(program, slow).makespan


def test_a_transfer_starts_when_it_is_sent_and_its_receive_is_posted():
    # rank 1 is busy with stage 2 while the message waits for its receive
    example = program((0, 1, 1), 2, "0F0 0F1 0B0 0B1", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1")
    line = simulate(
        lower(example, lookahead=0), Costs(F=2, I=1, W=1, hop=1, per_stage=[(2, 1, 1)] + [(1, 1, 1)] * 2)
    )
    times = {str(e.action): (e.start, e.end) for e in line.events}
    assert times["0F1"] == (2, 4)
    assert times["1B0"] == (7, 9)
    assert times["0SEND_F1"] == (4, 10)
    assert times["1RECV_F1"] == (9, 10)
    assert times["1F1"] == (10, 11)


def test_reductions_of_tied_parameters_wait_for_one_another():
    line = simulate(lower(schedule("gpipe", 3, 2), tied=((0, 2),)))
    ties = [e for e in line.events if e.action.kind is ActionKind.REDUCE_TIED]
    assert [(e.rank, e.start, e.end) for e in ties] == [
        (0, line.makespan, line.makespan),
        (2, line.makespan, line.makespan),
    ]
    ends = [e.end for e in line.events if e.rank == 2 and e.action.kind is ActionKind.B]
    assert max(ends) < line.makespan


@pytest.mark.parametrize("case", CASES)
def test_sends_are_complete_when_they_are_released(case: tuple[str, int, int, int | None]):
    program = schedule(*case)
    lowered = lower(program)
    for seed in range(10):
        random = Random(seed)
        shares = [(random.random(), random.random(), random.random()) for _ in range(program.stages)]
        line = simulate(lowered, Costs(hop=random.choice([0, 0.2, 3]), per_stage=shares))
        at = {e.action: (e.start, e.end) for e in line.events}
        for rank in range(program.ranks):
            for send, release in send_releases(lowered, rank).items():
                if release is not None:
                    assert at[send][1] <= at[release][0]


# --- bad input, speed


def test_a_deadlock_is_an_error_and_never_a_loop():
    stuck = program((0, 1), 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    for example in (stuck, lower(stuck)):
        with pytest.raises(ScheduleError, match="deadlock: rank 0 waits at 0B0"):
            simulate(example)
    example = lower(schedule("1f1b", 2, 2))
    lost = tuple(a for a in example.orders[1] if a.kind is not ActionKind.RECV_F)
    with pytest.raises(ScheduleError, match="rank 1 waits at 1F0 for 1RECV_F0, which it never does"):
        simulate(replace(example, orders=(example.orders[0], lost)))
    itself = program((0, 0), 1, "1F0 0F0 1B0 0B0")
    with pytest.raises(ScheduleError, match="rank 0 waits at 1F0 for 0F0"):
        simulate(itself)


@pytest.mark.parametrize(
    "bad", [{"F": -1}, {"hop": float("nan")}, {"W": float("inf")}, {"per_stage": [(1, 1, -2)]}]
)
def test_bad_costs(bad: dict[str, float]):
    with pytest.raises(StrettoError, match="must be a finite time"):
        Costs(**bad)  # type: ignore[arg-type]


def test_costs_of_the_wrong_number_of_stages():
    with pytest.raises(StrettoError, match="per_stage has 1 entries, must be one each for 2 stages"):
        simulate(schedule("gpipe", 2, 2), Costs(per_stage=[(1, 1, 1)]))
    with pytest.raises(StrettoError, match=r"per_stage\[0\]"):
        Costs(per_stage=[(1, 1)])  # type: ignore[list-item]


def test_uneven_stages_and_shares():
    even = simulate(schedule("interleaved", 2, 4, chunks=2), Costs(F=2, I=2, W=2))
    as_triples = simulate(schedule("interleaved", 2, 4, chunks=2), Costs(per_stage=[(1, 1, 1)] * 4))
    assert even.events == as_triples.events


def test_messages_and_channels_agree_with_the_placement():
    program = Program(name="vee", placement=(0, 1, 1, 0), microbatches=1, orders=((), ()))
    assert channel_of(program, Action(0, ActionKind.SEND_F, 0)) == (0, 1, ActionKind.F)
    assert channel_of(program, receive_of(Action(3, ActionKind.SEND_B, 0))) == (0, 1, ActionKind.B)
    assert needed_by(program, Action(2, ActionKind.F, 0)) is None


def test_hundreds_of_thousands_of_actions_a_second():
    program = schedule("1f1b", 16, 2048)
    actions = sum(map(len, program.orders))
    start = time.process_time()
    simulate(program)
    assert actions / (time.process_time() - start) > 200_000


def test_ranks_with_less_work_idle_beside_the_bubble() -> None:
    program = schedule("1f1b", 2, 8)
    even, uneven = (simulate(program, Costs(per_stage=[(1.0, 1.0, 1.0), (f, f, f)])) for f in (1.0, 0.5))
    assert even.idle == pytest.approx(even.bubble.rate)
    assert uneven.idle == pytest.approx(1 - 1.5 * 24 / (2 * uneven.makespan))
    assert uneven.idle > uneven.bubble.rate + 0.2
