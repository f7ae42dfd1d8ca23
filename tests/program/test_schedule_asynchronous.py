"""pipedream and pipedream-2bw: orders, weight versions, delays; windows of several steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.program import Action, ActionKind, Program, ScheduleError, check, schedule
from stretto.program.replay import Costs, simulate


def updates_before(program: Program, action: Action) -> int:
    """Updates of its stage that come before the action."""
    order = program.orders[program.placement[action.stage]]
    return sum(a.kind is ActionKind.UPDATE and a.stage == action.stage for a in order[: order.index(action)])


def test_small_orders_written_out():
    assert [" ".join(map(str, order)) for order in schedule("pipedream", 2, 3).orders] == [
        "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2",
        "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2",
    ]
    assert [" ".join(map(str, order)) for order in schedule("pipedream-2bw", 2, 5, group=2).orders] == [
        "0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0F4 0B3 0U3 0B4 0U4",
        "1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U3 1F4 1B4 1U4",
    ]


def test_small_windows_written_out():
    assert [" ".join(map(str, order)) for order in schedule("pipedream", 2, 2, steps=2).orders] == [
        "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0F3 0B2 0U2 0B3 0U3",
        "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2 1F3 1B3 1U3",
    ]
    # each step has an update of two microbatches and one of one; 0F3 needs the weights after 0U1, 0F5 those
    # after 0U2
    assert [
        " ".join(map(str, order)) for order in schedule("pipedream-2bw", 3, 3, group=2, steps=2).orders
    ] == [
        "0F0 0F1 0F2 0B0 0B1 0U1 0F3 0F4 0B2 0U2 0F5 0B3 0B4 0U4 0B5 0U5",
        "1F0 1F1 1B0 1F2 1B1 1U1 1F3 1B2 1U2 1F4 1B3 1F5 1B4 1U4 1B5 1U5",
        "2F0 2B0 2F1 2B1 2U1 2F2 2B2 2U2 2F3 2B3 2F4 2B4 2U4 2F5 2B5 2U5",
    ]


@pytest.mark.parametrize("p", range(1, 9))
def test_pipedream_uses_the_newest_weights_of_each_rank(p: int):
    for m in range(1, 21):
        program = schedule("pipedream", p, m)
        for rank in range(p):
            for i in range(m):
                newest = updates_before(program, Action(rank, ActionKind.F, i))
                assert program.versions[rank][i] == newest == max(0, i - (p - 1 - rank))
        assert list(check(program).peak_held) == [min(m, p - r) for r in range(p)]


@pytest.mark.parametrize("p", range(1, 9))
def test_vertical_sync_takes_the_version_of_the_first_rank_everywhere(p: int):
    for m in (1, p, 3 * p):
        program = schedule("pipedream", p, m, vertical_sync=True)
        assert program.orders == schedule("pipedream", p, m).orders
        for rank in range(p):
            entered = [updates_before(program, Action(0, ActionKind.F, i)) for i in range(m)]
            assert list(program.versions[rank]) == entered
            # it is not newer than what the rank has
            assert all(
                v <= updates_before(program, Action(rank, ActionKind.F, i)) for i, v in enumerate(entered)
            )


@pytest.mark.parametrize("p", range(1, 9))
def test_2bw_is_late_by_exactly_one_and_keeps_two_versions(p: int):
    for m in range(1, 21):
        for group in (None, *range(1, m + 1)):
            program = schedule("pipedream-2bw", p, m, group=group)
            size = program.parameters["group"]
            assert size == (group or min(p, m))
            batches = [range(at, min(at + size, m)) for at in range(0, m, size)]
            for rank, order in enumerate(program.orders):
                updates = [a.microbatch for a in order if a.kind is ActionKind.UPDATE]
                assert updates == [batch[-1] for batch in batches]
                for t, batch in enumerate(batches):
                    for i in batch:
                        assert program.versions[rank][i] == max(0, t - 1)
                        # the version is there, and no older one is asked for after the next but one
                        assert max(0, t - 1) <= updates_before(program, Action(rank, ActionKind.F, i)) <= t


def test_an_update_takes_in_whole_batches():
    program = schedule("pipedream-2bw", 4, 10, group=4)
    for order in program.orders:
        done: list[int | None] = []
        for before, action in pairwise(order):
            if before.kind is ActionKind.B:
                done.append(before.microbatch)
            if action.kind is ActionKind.UPDATE:
                assert done[-1] == action.microbatch
                assert done == list(range(len(done)))


def test_2bw_holds_no_more_than_1f1b():
    for p in range(1, 9):
        for m in (1, p, 2 * p + 1, 20):
            assert list(check(schedule("pipedream-2bw", p, m)).peak_held) == [min(m, p - r) for r in range(p)]


SIZES = {"p": st.integers(1, 8), "m": st.integers(1, 12), "k": st.integers(1, 6)}


@given(**SIZES, vertical_sync=st.booleans())
def test_a_window_of_pipedream_never_drains(p: int, m: int, k: int, vertical_sync: bool):
    program = schedule("pipedream", p, m, vertical_sync=vertical_sync, steps=k)
    assert (program.microbatches, program.steps, program.step_microbatches) == (k * m, k, m)
    # the same as one step of all its microbatches
    once = schedule("pipedream", p, k * m, vertical_sync=vertical_sync)
    assert (program.orders, program.versions) == (once.orders, once.versions)
    report = check(program)
    late = [p - 1 if vertical_sync else p - 1 - rank for rank in range(p)]
    assert report.weight_delays == tuple(tuple(min(i, late[r]) for i in range(k * m)) for r in range(p))
    versions = [p] * p if vertical_sync else [p - rank for rank in range(p)]
    assert all(count <= most for count, most in zip(report.weight_versions, versions, strict=True))
    assert k * m < 2 * p or report.weight_versions == tuple(versions)
    assert simulate(program).bubble.rate == pytest.approx((p - 1) / (k * m + p - 1))


@given(**SIZES, group=st.integers(1, 12))
def test_a_window_of_2bw_is_late_by_one_across_steps(p: int, m: int, k: int, group: int):
    group = min(group, m)
    program = schedule("pipedream-2bw", p, m, group=group, steps=k)
    report = check(program)
    a_step = -(-m // group)  # updates
    for order in program.orders:
        updates = [a.microbatch for a in order if a.kind is ActionKind.UPDATE]
        # the groups of every step are the same
        assert updates == [n * m + min(m, at + group) - 1 for n in range(k) for at in range(0, m, group)]
    batch = [i // m * a_step + i % m // group for i in range(k * m)]
    assert report.weight_delays == (tuple(min(1, t) for t in batch),) * p
    assert report.weight_versions == (min(2, batch[-1] + 1),) * p
    assert all(peak <= p - rank for rank, peak in enumerate(report.peak_held))


@given(p=st.integers(1, 6), k=st.integers(1, 6), groups=st.integers(1, 3), more=st.integers(0, 3))
def test_2bw_never_waits_where_groups_are_no_shorter_than_the_pipeline(
    p: int, k: int, groups: int, more: int
):
    group = max(1, p - 1 + more)
    program = schedule("pipedream-2bw", p, groups * group, group=group, steps=k)
    assert simulate(program).bubble.rate == pytest.approx((p - 1) / (program.microbatches + p - 1))


@given(p=st.integers(1, 8), m=st.integers(1, 10), group=st.integers(1, 10))
def test_2bw_waits_behind_groups_shorter_than_the_pipeline(p: int, m: int, group: int):
    """A group of s < p-1 microbatches lets every rank wait for the time of p-1-s."""
    group = min(group, m)
    six, twelve = (
        simulate(schedule("pipedream-2bw", p, m, group=group, steps=k)).bubble.barrier for k in (6, 12)
    )
    sizes = [min(group, m - at) for at in range(0, m, group)]
    assert (twelve - six) / 6 == pytest.approx(3 * sum(max(0, p - 1 - size) for size in sizes))


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 8)])
def test_memory_does_not_grow_with_the_window(name: str, p: int, m: int):
    single, five = (simulate(schedule(name, p, m, steps=k), Costs(activations=[1.0] * p)) for k in (1, 5))
    assert single.peak_bytes == five.peak_bytes == [float(p - rank) for rank in range(p)]
    assert max(five.weight_versions) == (p if name == "pipedream" else 2)


def test_windows_that_are_none():
    program = schedule("pipedream", 2, 3, steps=2)
    with pytest.raises(ScheduleError, match="steps is 4, must divide the 6 microbatches"):
        check(replace(program, steps=4))
    with pytest.raises(ScheduleError, match="steps is 0"):
        check(replace(program, steps=0))
    with pytest.raises(ScheduleError, match="steps is 2, but the program has no weight versions"):
        check(replace(schedule("1f1b", 2, 4), steps=2))
    # a group of microbatches 2 and 3, of two steps of three
    with pytest.raises(ScheduleError, match="0U3 applies gradients of steps 0 and 1 at once"):
        check(replace(schedule("pipedream-2bw", 2, 6, group=2), steps=2))
    with pytest.raises(StrettoError, match="steps is 0, must be a whole number of at least 1"):
        schedule("pipedream", 2, 3, steps=0)
    with pytest.raises(StrettoError, match=r"steps is 2, but schedule '1f1b' takes no steps(?s:.*)pipedream"):
        schedule("1f1b", 2, 3, steps=2)
