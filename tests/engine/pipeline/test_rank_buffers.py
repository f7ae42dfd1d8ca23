"""Buffers of received messages, ties and channels: pure functions of a program or of modules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto import schedule
from stretto.engine.pipeline.exchange import BACKWARD, FORWARD, channels
from stretto.engine.pipeline.pipeline import forward_only
from stretto.engine.pipeline.rank_buffers import assign_slots
from stretto.engine.pipeline.shared import Tie, find_ties
from stretto.program import Action, ActionKind, lower
from stretto.program.program import Program

RECEIVES = (ActionKind.RECV_F, ActionKind.RECV_B)


@st.composite
def programs(draw) -> Program:
    name = draw(st.sampled_from(["naive", "gpipe", "1f1b", "interleaved"]))
    chunks = draw(st.integers(2, 3)) if name == "interleaved" else None
    program = schedule(
        name, ranks=draw(st.integers(1, 4)), microbatches=draw(st.integers(1, 7)), chunks=chunks
    )
    if draw(st.booleans()):
        program = forward_only(program, program.microbatches)
    return lower(program, lookahead=draw(st.integers(0, 3)))


@given(programs())
@settings(deadline=None, max_examples=60)
def test_no_two_messages_share_a_buffer_while_they_live(program):
    for order in program.orders:
        slots = assign_slots(order)
        assert set(slots) == {a for a in order if a.kind in RECEIVES}
        last = {(a.stage, a.microbatch): at for at, a in enumerate(order) if a.kind.is_compute}
        taken: dict[tuple[int, ActionKind, int], int] = {}  # last use of what is in a buffer
        for at, action in enumerate(order):
            if action in slots:
                buffer = (action.stage, action.kind, slots[action])
                assert taken.get(buffer, -1) < at, f"{action} overwrites a message that is still needed"
                taken[buffer] = last[action.stage, action.microbatch]


def test_one_f_one_b_needs_as_many_buffers_as_microbatches_in_flight():
    program = lower(schedule("1f1b", ranks=4, microbatches=16))
    for rank, order in enumerate(program.orders):
        slots = assign_slots(order)
        forward = {slot for a, slot in slots.items() if a.kind is ActionKind.RECV_F}
        backward = {slot for a, slot in slots.items() if a.kind is ActionKind.RECV_B}
        assert len(forward) <= 4 - rank + 1  # those alive, and the one posted ahead
        assert len(backward) <= 2


def test_a_deferred_weight_gradient_keeps_its_input():
    I, W = (Action(1, kind, 0) for kind in (ActionKind.I, ActionKind.W))
    receives = [Action(1, ActionKind.RECV_F, i) for i in range(2)]
    F = [Action(1, ActionKind.F, i) for i in range(2)]
    early = assign_slots([receives[0], F[0], I, W, receives[1], F[1]])
    late = assign_slots([receives[0], F[0], I, receives[1], F[1], W])
    assert early[receives[0]] == early[receives[1]]
    assert late[receives[0]] != late[receives[1]]


def test_forward_only_keeps_placement_and_order():
    program = schedule("interleaved", ranks=2, microbatches=2, chunks=2)
    forwards = forward_only(program, 5)
    assert forwards.placement == program.placement
    assert not forwards.trains
    assert {a.kind for order in forwards.orders for a in order} == {ActionKind.F}
    assert [len(order) for order in forwards.orders] == [10, 10]
    assert lower(forwards).lowered


# ------------------------------------------------------------------ ties


def test_ties_are_found_by_identity_in_model_order():
    a, b, c = (nn.Linear(2, 2) for _ in range(3))
    c.weight = a.weight
    inner = nn.Sequential(nn.ReLU(), b)
    b.bias = a.bias
    assert find_ties([a, inner, c]) == [
        Tie(((0, "weight"), (2, "weight"))),
        Tie(((0, "bias"), (1, "1.bias"))),
    ]
    assert find_ties([a]) == []
    equal = nn.Linear(2, 2)
    equal.load_state_dict(b.state_dict())
    assert find_ties([b, equal]) == []  # equal values are no tie


def test_the_stages_that_hold_a_tied_parameter():
    tie = Tie(((0, "w"), (1, "w"), (5, "w")))
    assert tie.stages([range(2), range(2, 4), range(4, 6)]) == (0, 2)
    assert tie.stages([range(6)]) == (0,)


# ------------------------------------------------------------------ channels


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "expected"),
    [
        ("1f1b", 1, None, []),
        ("1f1b", 3, None, [(0, 1, FORWARD), (1, 0, BACKWARD), (1, 2, FORWARD), (2, 1, BACKWARD)]),
        ("interleaved", 2, 2, [(0, 1, FORWARD), (0, 1, BACKWARD), (1, 0, FORWARD), (1, 0, BACKWARD)]),
    ],
)
def test_channels_are_those_that_the_program_sends_on(name, ranks, chunks, expected):
    assert channels(lower(schedule(name, ranks=ranks, microbatches=2, chunks=chunks))) == expected


def test_a_program_without_backward_sends_forward_only():
    program = lower(forward_only(schedule("1f1b", ranks=2, microbatches=1), 3))
    assert channels(program) == [(0, 1, FORWARD)]
