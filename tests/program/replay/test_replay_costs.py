"""Every cost beyond F, I, W and hop, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.program import Action, ActionKind, Program, ScheduleError, lower, schedule
from stretto.program.replay import Costs, Timeline, simulate
from stretto.program.text import parse_action

TWO = ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")


def program(placement: tuple[int, ...], microbatches: int, *orders: str) -> Program:
    rows = tuple(tuple(map(parse_action, order.split())) for order in orders)
    return Program(name="test", placement=placement, microbatches=microbatches, orders=rows)


def spans(line: Timeline) -> dict[str, tuple[float, float]]:
    return {str(event.action): (event.start, event.end) for event in line.events}


# --- messages


def test_a_message_takes_its_latency_and_its_bytes_over_the_bandwidth():
    line = simulate(program((0, 1), 2, *TWO), Costs(hop=0.5, message_bytes=[4], bandwidth=2))
    assert spans(line)["1F0"] == (3.5, 4.5)
    assert spans(line)["1F1"] == (4.5, 5.5)  # its message came at 4.5
    slow = Costs(hop=0.5, message_bytes=4, bandwidth={(0, 1): 4, (1, 0): 1})
    assert spans(simulate(program((0, 1), 2, *TWO), slow))["1F0"] == (2.5, 3.5)
    assert spans(simulate(program((0, 1), 2, *TWO), slow))["0B0"] == (4.5 + 2 + 4.5, 13)


def test_messages_on_one_link_come_one_after_another_with_contention():
    costs = Costs(hop=0.5, message_bytes=4, bandwidth=2, contention=True)
    line = simulate(program((0, 1), 2, *TWO), costs)
    assert spans(line)["1F0"] == (3.5, 4.5)
    # the link is taken from 1 to 3, then from 3 to 5; latencies overlap
    assert spans(line)["1F1"] == (5.5, 6.5)
    assert line.queued == {Action(1, ActionKind.RECV_F, 1): Action(1, ActionKind.RECV_F, 0)}
    # the way back is another link, and free
    assert spans(line)["0B0"] == (8.5 + 2.5, 13)


def test_what_a_message_leads_to_at_the_same_moment_queues_behind_those_that_asked_before():
    """Ranks 1 and 2 end a forward at 1. Rank 1's takes no time on its way, nor does what rank 0 makes of it,
    which then asks for rank 2's link: after rank 2, although rank 0 goes first of those that ask together.
    """
    orders = {0: "1F0 5F1", 1: "0F0", 2: "3F1", 3: "2F0 4F1"}
    program = Program(
        name="two chains",
        placement=(1, 0, 3, 2, 3, 0),
        microbatches=2,
        orders=tuple(tuple(map(parse_action, order.split())) for order in orders.values()),
        trains=False,
        copies=2,
    )
    costs = Costs(
        per_stage=[(1, 0, 0), (0, 0, 0), (0, 0, 0)],
        message_bytes=8,
        bandwidth={(a, b): 8 if b == 3 else inf for a in range(4) for b in range(4)},
        links={(0, 3): "to 3", (2, 3): "to 3"},
        contention=True,
    )
    line = simulate(program, costs)
    assert line.arrivals[Action(4, ActionKind.RECV_F, 1)] == 2
    assert line.arrivals[Action(2, ActionKind.RECV_F, 0)] == 3
    assert line.queued == {Action(2, ActionKind.RECV_F, 0): Action(4, ActionKind.RECV_F, 1)}


def test_pairs_of_ranks_that_share_a_link_wait_for_each_other():
    two = Program(
        name="two",
        placement=(0, 2, 1, 2),
        microbatches=2,
        orders=tuple(map(_row, ("0F0", "2F1", "1F0 3F1"))),
        trains=False,
        copies=2,
    )
    costs = Costs(message_bytes=4, bandwidth=2, contention=True)
    assert spans(simulate(two, costs))["3F1"] == (4, 5)  # after 1F0, which its message came with
    assert spans(simulate(two, replace(costs, per_stage=[(1, 0, 0), (0.25, 0, 0)])))["3F1"] == (3.25, 3.5)
    shared = replace(costs, links={(0, 2): "card", (1, 2): "card"})
    line = simulate(two, replace(shared, per_stage=[(1, 0, 0), (0.25, 0, 0)]))
    assert spans(line)["1F0"] == (3, 3.25)  # the lower rank goes first
    assert spans(line)["3F1"] == (5, 5.25)


def _row(text: str) -> tuple[Action, ...]:
    return tuple(map(parse_action, text.split()))


def test_a_rank_that_sends_is_busy_where_communication_blocks():
    line = simulate(program((0, 1), 2, *TWO), Costs(hop=0.5, blocking=True))
    times = spans(line)
    assert (times["0F0"], times["0F1"]) == ((0, 1), (1.5, 2.5))
    assert times["1F1"] == (3, 4)
    assert (times["1B0"], times["1B1"]) == ((4, 6), (6.5, 8.5))
    assert line.makespan == 11
    # a send of a lowered program also waits for its receive
    lowered = spans(simulate(lower(program((0, 1), 2, *TWO)), Costs(hop=0.5, blocking=True)))
    assert lowered["0SEND_F0"] == (1, 1.5)
    assert lowered["0F1"] == (1.5, 2.5)


def test_blocking_sends_that_wait_for_each_other_are_an_error():
    crossed = program((0, 1), 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    example = lower(crossed, lookahead=0)
    assert simulate(example, Costs(hop=1)).makespan > 0
    with pytest.raises(ScheduleError, match="deadlocks with these costs: rank 0 waits at 0SEND_F1"):
        simulate(example, Costs(hop=1, blocking=True))


# --- beside the work


def test_recompute_takes_as_long_as_forward_by_default():
    example = program((0,), 1, "0F0 0RECOMPUTE0 0B0")
    assert simulate(example, Costs(F=3)).makespan == 8
    assert simulate(example, Costs(F=3, recompute=1)).makespan == 6
    assert simulate(example, Costs(F=3, recompute=[2])).work == (7,)


def test_gathers_run_ahead_and_work_waits_for_them():
    example = program((0, 0), 1, "0UNSHARD 1UNSHARD 0F0 1F0 1B0 1RESHARD 0B0 0RESHARD")
    line = simulate(example, Costs(F=2, I=2, W=2, unshard=[3, 5]))
    times = spans(line)
    assert (times["0UNSHARD"], times["1UNSHARD"]) == ((0, 3), (3, 8))
    assert (times["0F0"], times["1F0"]) == ((3, 4), (8, 9))
    assert line.makespan == 13


def test_moves_to_the_host_and_back():
    example = program((0,), 2, "0F0 0OFFLOAD0 0F1 0RELOAD0 0B1 0B0")
    line = simulate(example, Costs(offload=2, reload=4, activations=10))
    times = spans(line)
    assert times["0OFFLOAD0"] == (1, 3)
    assert times["0RELOAD0"] == (3, 7)  # asked for at 2, not away before 3
    assert (times["0B1"], times["0B0"]) == ((2, 4), (7, 9))
    assert line.live_bytes[0] == [(0, 10), (1, 20), (3, 10), (3, 20), (4, 10), (9, 0)]
    assert line.peak_bytes == [20]


# --- gradients and the optimiser


@pytest.mark.parametrize("lowered", [False, True])
def test_reductions_overlap_or_come_at_the_end(lowered: bool):
    example = program((0, 0), 1, "0F0 1F0 1B0 0B0")
    example = lower(example) if lowered else example
    costs = Costs(F=2, I=2, W=2, reduce=[1, 5])  # 1B0 ends at 4, 0B0 at 6
    assert simulate(example, costs).makespan == 10  # stage 1 from 4 to 9, then stage 0
    assert simulate(example, replace(costs, reduce=[1, 1])).makespan == 7
    assert simulate(example, replace(costs, reduce_overlaps=False)).makespan == 12


def test_the_optimiser_waits_for_all_ranks_and_counts_as_work():
    line = simulate(schedule("1f1b", 2, 2), Costs(reduce=0.5, update=[1, 3]))
    # 1F1B ends at 9, stage 0 is reduced until 9.5
    updates = [event for event in line.tail if event.action.kind is ActionKind.UPDATE]
    assert [(e.rank, e.start, e.end) for e in updates] == [(0, 9.5, 10.5), (1, 9.5, 12.5)]
    assert line.makespan == 12.5
    assert line.ideal == 9
    assert line.bubble.barrier == 3.5


def test_an_update_within_the_step_waits_for_its_reduction():
    example = replace(program((0,), 2, "0F0 0B0 0U0 0F1 0B1 0U1"), versions=((0, 1),))
    for each in (example, lower(example)):
        line = simulate(each, Costs(reduce=2, update=1))
        assert [e[:2] for e in spans(line).values() if e[1] - e[0] == 1][1:3] == [(5, 6), (6, 7)]
        assert line.makespan == 12
        assert simulate(each, Costs(reduce=2, update=1, reduce_overlaps=False)).makespan == 12


# --- pairs


def test_a_pair_is_one_block_or_runs_one_after_the_other():
    example = program((0, 1), 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    example = replace(example, pairs=frozenset({(Action(0, ActionKind.F, 1), Action(0, ActionKind.B, 0))}))
    apart = spans(simulate(example))
    assert (apart["0F1"], apart["0B0"], apart["1F1"]) == ((1, 2), (4, 6), (4, 5))
    for each in (example, lower(example)):
        block = spans(simulate(each, Costs(pair=0.75)))
        assert block["0F1"] == block["0B0"] == (4, 6.25)  # both inputs at its start
        assert block["1F1"] == (6.25, 7.25)  # both results at its end


def test_blocks_that_need_one_another_deadlock():
    knot = {(Action(0, ActionKind.F, 1), Action(0, ActionKind.B, 0))}
    example = replace(program((0, 1), 2, "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), pairs=frozenset(knot))
    simulate(example)
    with pytest.raises(ScheduleError, match="rank 0 waits at 0F1; rank 1 waits at 1F1"):
        simulate(example, Costs(pair=1))


# --- memory


def test_memory_that_input_gradients_give_back():
    example = program((0,), 2, "0F0 0F1 0I0 0I1 0W0 0W1")
    line = simulate(example, Costs(activations=8, kept_for_w=0.25))
    assert line.live_bytes[0] == [(0, 8), (1, 16), (3, 10), (4, 4), (5, 2), (6, 0)]
    again = program((0,), 2, "0F0 0F1 0RECOMPUTE0 0B0 0RECOMPUTE1 0B1")
    line = simulate(again, Costs(activations=8, inputs=1))
    # F keeps its input alone; RECOMPUTE holds all again until B
    assert line.live_bytes[0] == [(0, 1), (1, 2), (2, 10), (3, 9), (5, 1), (5, 9), (6, 8), (8, 0)]
    assert line.peak_bytes == [10]


# --- bad input


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"bandwidth": 0}, "bandwidth is 0, must be above 0"),
        ({"bandwidth": {(0, 1): -2.0}}, r"bandwidth\[\(0, 1\)\] is -2.0"),
        ({"kept_for_w": 1.5}, "kept_for_w is 1.5, must be 0 to 1"),
        ({"reduce": [1, -1]}, r"cost reduce\[1\] is -1, must be a finite time"),
        ({"activations": float("nan")}, "activations is nan, must be a finite number"),
        ({"update": True}, "cost update is True, must be a number"),
        ({"hop": "1"}, "cost hop is '1', must be a number"),
    ],
)
def test_bad_costs(bad: dict[str, Any], says: str):
    with pytest.raises(StrettoError, match=says):
        Costs(**bad)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"message_bytes": [1, 2]}, "message_bytes has 2 entries, must be one each for 1 boundaries"),
        ({"bandwidth": {(0, 1): 1.0}}, "bandwidth has no entry for messages from rank 1 to rank 0"),
        ({"reduce": [1]}, "reduce has 1 entries, must be one each for 2 stages"),
    ],
)
def test_costs_that_do_not_fit_the_program(bad: dict[str, Any], says: str):
    with pytest.raises(StrettoError, match=says):
        simulate(schedule("gpipe", 2, 2), Costs(**bad))


def test_copies_of_the_weights_cost_the_same_by_default():
    program = schedule("dualpipe", 2, 4)
    per_stage = simulate(program, Costs(per_stage=[(1, 1, 1), (2, 2, 2)]))
    both = simulate(program, Costs(per_stage=[(1, 1, 1), (2, 2, 2)] * 2))
    assert per_stage.events == both.events
    # a rank's share of one microbatch is its stage of one copy
    assert simulate(program).work == (12, 12)


def test_work_of_overlapped_pairs_is_that_of_their_blocks():
    program = schedule("dualpipe-v", 4, 10)
    shown = simulate(program, Costs(pair=0.75, hop=0.1))
    busy = [0.0] * 4
    paired = {action for pair in program.pairs for action in pair}
    for rank, order in enumerate(program.orders):
        for action in order:
            alone = {"F": 0.5, "B": 1.0, "I": 0.5, "W": 0.5}[action.kind]
            busy[rank] += alone * (0.75 if action in paired else 1.0)
    assert list(shown.work) == pytest.approx(busy)
    assert shown.bubble.barrier > 0
