"""Lowering: which communications are added, and where."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest

from stretto.errors import StrettoError
from stretto.program import Action, ActionKind, Program, ScheduleError, check, lower, schedule, send_releases
from stretto.program.messages import channel_of, needed_by, receive_of, sent_by
from stretto.program.text import parse_action

CASES = [
    ("naive", 3, 2, None, None),
    ("gpipe", 1, 3, None, None),
    ("gpipe", 4, 5, None, None),
    ("1f1b", 4, 9, None, None),
    ("1f1b", 5, 2, None, None),
    ("interleaved", 1, 3, 3, None),
    ("interleaved", 2, 5, 2, None),
    ("interleaved", 3, 7, 4, None),
    ("interleaved", 4, 10, 2, 6),
]


def vee(ranks: int, microbatches: int) -> Program:
    """GPipe over two chunks a rank, the second going back: the turn is a hand-over on one rank."""
    placement = (*range(ranks), *reversed(range(ranks)))
    orders = [
        tuple(
            Action(stage, kind, i)
            for kind, stages in (
                (ActionKind.F, (r, 2 * ranks - 1 - r)),
                (ActionKind.B, (2 * ranks - 1 - r, r)),
            )
            for stage in stages
            for i in range(microbatches)
        )
        for r in range(ranks)
    ]
    return Program(name="vee", placement=placement, microbatches=microbatches, orders=tuple(orders))


def program(placement: tuple[int, ...], microbatches: int, *orders: str) -> Program:
    return Program(
        name="test",
        placement=placement,
        microbatches=microbatches,
        orders=tuple(tuple(map(parse_action, order.split())) for order in orders),
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lookahead", [0, 1, 3, 1000])
def test_lowering_adds_the_messages_that_the_placement_needs(
    case: tuple[str, int, int, int | None, int | None], lookahead: int
):
    program = schedule(*case)
    lowered = lower(program, lookahead=lookahead)
    assert check(lowered).transfers == check(program).transfers
    sends: dict[object, list[Action]] = defaultdict(list)
    posts: dict[object, list[Action]] = defaultdict(list)
    for rank, order in enumerate(lowered.orders):
        assert tuple(a for a in order if a.kind.is_compute) == program.orders[rank]
        for at, action in enumerate(order):
            if send := sent_by(program, action):
                assert order[at + 1] == send
                sends[channel_of(program, send)].append(receive_of(send))
            if action.kind in (ActionKind.RECV_F, ActionKind.RECV_B):
                posts[channel_of(program, action)].append(action)
        for stage in program.stages_of(rank):
            reduce = order.index(Action(stage, ActionKind.REDUCE_GRAD))
            mine = [a for a in order[:reduce] if a.stage == stage and a.kind is ActionKind.B]
            assert len(mine) == program.microbatches
            assert order[reduce - 1].stage == stage
            assert order[reduce - 1].kind in (ActionKind.B, ActionKind.SEND_B)
    assert sends == posts


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_receives_are_posted_that_many_compute_actions_ahead(lookahead: int):
    lowered = lower(schedule("1f1b", 4, 8), lookahead=lookahead)
    for order in lowered.orders:
        for at, action in enumerate(order):
            if receive := needed_by(lowered, action):
                between = sum(a.kind.is_compute for a in order[order.index(receive) : at])
                place = sum(a.kind.is_compute for a in order[:at])
                assert between == min(lookahead, place)


def test_posts_follow_the_sender_where_the_consumer_does_not():
    # rank 1 takes microbatch 1 first, rank 0 sends microbatch 0 first
    example = program((0, 1), 2, "0F0 0F1 0B1 0B0", "1F1 1F0 1B1 1B0")
    lowered = lower(example, lookahead=0)
    assert " ".join(map(str, lowered.orders[1])) == (
        "1RECV_F0 1RECV_F1 1F1 1F0 1B1 1SEND_B1 1B0 1SEND_B0 1REDUCE_GRAD"
    )
    check(lowered)


def test_neighbours_on_one_rank_hand_over_locally():
    lowered = lower(vee(3, 2))
    assert check(lowered).transfers == 2 * 4 * 2
    text = [str(a) for a in lowered.orders[2] if a.kind.is_transfer]
    assert not any(t.startswith(("2SEND_F", "3RECV_F", "3SEND_B", "2RECV_B")) for t in text)


def test_split_backwards_send_after_the_input_gradient_and_reduce_after_the_last_weight_gradient():
    example = program((0, 1), 2, "0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W1 1W0")
    lowered = lower(example)
    first, second = (" ".join(map(str, order)) for order in lowered.orders)
    assert "1I0 1SEND_B0" in second
    assert second.endswith("1W0 1REDUCE_GRAD")
    assert first.endswith("0W1 0REDUCE_GRAD")
    check(lowered)


def test_tied_stages_reduce_last_and_in_one_order():
    program = schedule("interleaved", 2, 2, chunks=2)
    lowered = lower(program, tied=((3, 0), (1, 3), (0, 2)))
    assert lowered.tied == ((0, 3), (1, 3), (0, 2))
    ends = [[str(a) for a in order if a.kind is ActionKind.REDUCE_TIED] for order in lowered.orders]
    assert ends == [
        ["0REDUCE_TIED", "0REDUCE_TIED", "2REDUCE_TIED"],
        ["3REDUCE_TIED", "1REDUCE_TIED", "3REDUCE_TIED"],
    ]
    for order, end in zip(lowered.orders, ends, strict=True):
        assert [str(a) for a in order[-len(end) :]] == end
    check(lowered)


def test_forward_only_programs_have_nothing_to_reduce():
    example = replace(program((0, 1), 1, "0F0", "1F0"), trains=False)
    assert [" ".join(map(str, order)) for order in lower(example, tied=((0, 1),)).orders] == [
        "0F0 0SEND_F0",
        "1RECV_F0 1F0",
    ]
    check(lower(example))


def test_existing_reductions_are_placed_anew():
    example = program((0,), 1, "0F0 0REDUCE_GRAD 0B0")
    assert [str(a) for a in lower(example).orders[0]] == ["0F0", "0B0", "0REDUCE_GRAD"]


def test_bad_requests():
    program = schedule("gpipe", 2, 2)
    for tied in (((0,),), ((0, 2),), ((-1, 0),), ((1, 1),)):
        with pytest.raises(StrettoError, match="tied set"):
            lower(program, tied=tied)
    with pytest.raises(StrettoError, match="lookahead is -1"):
        lower(program, lookahead=-1)
    with pytest.raises(StrettoError, match="lowered already"):
        lower(lower(program))
    with pytest.raises(ScheduleError, match="rank 1 never does 1B1"):
        lower(replace(program, orders=(program.orders[0], program.orders[1][:-1])))


def calls_of(lowered: Callable[[], object]) -> int:
    """Return the number of function calls, a measure of work that does not depend on the machine's load."""
    count = 0

    def watch(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(watch)
    try:
        lowered()
    finally:
        sys.setprofile(None)
    return count


def test_the_work_of_lowering_grows_as_the_program_does():
    small, large = (schedule("1f1b", 8, microbatches) for microbatches in (32, 128))
    assert calls_of(lambda: lower(large)) < 5 * calls_of(lambda: lower(small))


# --- send_releases


def before(lowered: Program, program: Program) -> dict[Action, set[Action]]:
    """For each compute action, all compute actions whose start is certainly past when it starts.

    By definition, slowly: its rank's earlier ones, and through every awaited message the sender's.
    """
    past: dict[Action, set[Action]] = {}

    def of(action: Action) -> set[Action]:
        if action not in past:
            order = program.orders[program.placement[action.stage]]
            at = order.index(action)
            earlier = {action}
            if at:
                earlier |= of(order[at - 1])
            if needed_by(program, action):
                source = action.stage + (-1 if action.kind is ActionKind.F else 1)
                earlier |= of(Action(source, action.kind, action.microbatch))
            past[action] = earlier
        return past[action]

    for order in program.orders:
        for action in order:
            of(action)
    return past


@pytest.mark.parametrize("case", CASES)
def test_releases_are_the_first_actions_that_prove_the_message_consumed(
    case: tuple[str, int, int, int | None, int | None],
):
    program = schedule(*case)
    lowered = lower(program)
    past = before(lowered, program)
    for rank in range(program.ranks):
        releases = send_releases(lowered, rank)
        sends = [a for a in lowered.orders[rank] if a.kind in (ActionKind.SEND_F, ActionKind.SEND_B)]
        assert list(releases) == sends
        for send in sends:
            receive = receive_of(send)
            consumer = next(
                a
                for a in program.orders[program.placement[receive.stage]]
                if needed_by(program, a) == receive
            )
            release = releases[send]
            # sound: through whatever ranks, the release happens after the message was consumed
            assert release is None or consumer in past[release]
            # first: of the actions that hear from the other rank itself
            peer = program.orders[program.placement[receive.stage]]
            late = peer[peer.index(consumer) :]
            replies = {receive_of(s) for a in late if (s := sent_by(program, a))}
            proofs = (a for a in program.orders[rank] if needed_by(program, a) in replies)
            assert release == next(proofs, None)
            if send.kind is ActionKind.SEND_F:
                # at the latest its own gradient tells
                order = program.orders[rank]
                backward = Action(send.stage, ActionKind.B, send.microbatch)
                assert release is not None
                assert order.index(release) <= order.index(backward)


def test_releases_of_1f1b_written_out():
    releases = send_releases(lower(schedule("1f1b", 3, 4)), 1)
    assert {str(send): release and str(release) for send, release in releases.items()} == {
        "1SEND_F0": "1B0",
        "1SEND_F1": "1B1",
        "1SEND_F2": "1B2",
        "1SEND_F3": "1B3",
        "1SEND_B0": "1F3",
        "1SEND_B1": None,
        "1SEND_B2": None,
        "1SEND_B3": None,
    }
