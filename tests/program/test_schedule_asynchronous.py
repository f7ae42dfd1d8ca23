"""pipedream and pipedream-2bw: orders, weight versions, delays."""

from __future__ import annotations

from itertools import pairwise

import pytest

from stretto.program import Action, Kind, Program, check, schedule


def updates_before(program: Program, action: Action) -> int:
    """Updates of its stage that come before the action."""
    order = program.orders[program.placement[action.stage]]
    return sum(a.kind is Kind.UPDATE and a.stage == action.stage for a in order[: order.index(action)])


def test_small_orders_written_out():
    assert [" ".join(map(str, order)) for order in schedule("pipedream", 2, 3).orders] == [
        "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2",
        "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2",
    ]
    assert [" ".join(map(str, order)) for order in schedule("pipedream-2bw", 2, 5, group=2).orders] == [
        "0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0F4 0B3 0U3 0B4 0U4",
        "1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U3 1F4 1B4 1U4",
    ]


@pytest.mark.parametrize("p", range(1, 9))
def test_pipedream_uses_the_newest_weights_of_each_rank(p: int):
    for m in range(1, 21):
        program = schedule("pipedream", p, m)
        for rank in range(p):
            for i in range(m):
                newest = updates_before(program, Action(rank, Kind.F, i))
                assert program.versions[rank][i] == newest == max(0, i - (p - 1 - rank))
        assert list(check(program).peak_held) == [min(m, p - r) for r in range(p)]


@pytest.mark.parametrize("p", range(1, 9))
def test_vertical_sync_takes_the_version_of_the_first_rank_everywhere(p: int):
    for m in (1, p, 3 * p):
        program = schedule("pipedream", p, m, vertical_sync=True)
        assert program.orders == schedule("pipedream", p, m).orders
        for rank in range(p):
            entered = [updates_before(program, Action(0, Kind.F, i)) for i in range(m)]
            assert list(program.versions[rank]) == entered
            # it is not newer than what the rank has
            assert all(v <= updates_before(program, Action(rank, Kind.F, i)) for i, v in enumerate(entered))


@pytest.mark.parametrize("p", range(1, 9))
def test_2bw_is_late_by_exactly_one_and_keeps_two_versions(p: int):
    for m in range(1, 21):
        for group in (None, *range(1, m + 1)):
            program = schedule("pipedream-2bw", p, m, group=group)
            size = program.parameters["group"]
            assert size == (group or min(p, m))
            batches = [range(at, min(at + size, m)) for at in range(0, m, size)]
            for rank, order in enumerate(program.orders):
                updates = [a.microbatch for a in order if a.kind is Kind.UPDATE]
                assert updates == [batch[-1] for batch in batches]
                for t, batch in enumerate(batches):
                    for i in batch:
                        assert program.versions[rank][i] == max(0, t - 1)
                        # the version is there, and no older one is asked for after the next but one
                        assert max(0, t - 1) <= updates_before(program, Action(rank, Kind.F, i)) <= t


def test_an_update_takes_in_whole_batches():
    program = schedule("pipedream-2bw", 4, 10, group=4)
    for order in program.orders:
        done: list[int | None] = []
        for before, action in pairwise(order):
            if before.kind is Kind.B:
                done.append(before.microbatch)
            if action.kind is Kind.UPDATE:
                assert done[-1] == action.microbatch
                assert done == list(range(len(done)))


def test_2bw_holds_no_more_than_1f1b():
    for p in range(1, 9):
        for m in (1, p, 2 * p + 1, 20):
            assert list(check(schedule("pipedream-2bw", p, m)).peak_held) == [min(m, p - r) for r in range(p)]
