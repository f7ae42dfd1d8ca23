"""hanayo: placement, memory, bubble."""

from __future__ import annotations

import pytest

from stretto.layout.placement import zigzag
from stretto.program import Program, check, schedule
from stretto.program.replay import simulate
from stretto.program.schedules.wave import one_wave, several_waves


def test_two_chunks_a_rank_for_each_wave():
    program = schedule("hanayo", 3, 4, waves=2)
    assert program.placement == (0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0)
    assert program.parameters == {"chunks": 4, "waves": 2}


def test_one_microbatch_goes_down_and_up():
    assert [" ".join(map(str, order)) for order in schedule("hanayo", 2, 1).orders] == [
        "0F0 3F0 3B0 0B0",
        "1F0 2F0 2B0 1B0",
    ]


@pytest.mark.parametrize("waves", [1, 2, *(pytest.param(w, marks=pytest.mark.slow) for w in (3, 4))])
def test_holds_p_microbatches_at_most(waves: int):
    for p in range(1, 9):
        for m in (1, p - 1, p, p + 1, 2 * p + 1, 4 * p):
            report = check(schedule("hanayo", p, max(1, m), waves=waves))
            assert max(report.peak_held) <= 2 * waves * p
            assert report.transfers == 4 * waves * (p - 1) * max(1, m)


@pytest.mark.parametrize(("waves", "makespan"), [(1, 38.0), (2, 31.0), (4, 27.5)])
def test_p_microbatches_stay_within_the_papers_bubble(waves: int, makespan: float):
    """Rates .368, .226, .127 for p = m = 8; the paper's bound is (2p - 2) / (3pw + p - 1)."""
    timeline = simulate(schedule("hanayo", 8, 8, waves=waves))
    assert timeline.makespan == makespan
    for p in (4, 6, 8, 12):
        rate = simulate(schedule("hanayo", p, p, waves=waves)).bubble.rate
        assert rate <= (2 * p - 2) / (3 * p * waves + p - 1)


@pytest.mark.parametrize("waves", [1, 2, 4])
def test_many_microbatches_take_no_longer_than_in_1f1b(waves: int):
    for p in (4, 5, 8):
        for m in (2 * p, 4 * p, 8 * p):
            assert simulate(schedule("hanayo", p, m, waves=waves)).makespan <= 3 * (m + p - 1)


def test_the_bubble_of_a_wave_does_not_grow_with_the_microbatches():
    for p in (2, 3, 4, 5, 8):
        bubbles = {simulate(schedule("hanayo", p, m)).bubble.barrier for m in (4 * p, 6 * p + 1, 16 * p)}
        assert len(bubbles) == 1
        assert bubbles.pop() < 3 * (p - 1)


def test_blocks_hold_what_p_microbatches_do():
    for p in (2, 3, 4, 5, 7, 8, 13):
        program = Program(name="x", placement=zigzag(p, 2), microbatches=3 * p, orders=one_wave(p, 3 * p))
        assert max(check(program).peak_held) <= 2 * p
    for waves in (2, 3, 4):
        for p in (3, 4, 6, 7):
            program = Program(
                name="x",
                placement=zigzag(p, 2 * waves),
                microbatches=3 * p,
                orders=several_waves(p, 3 * p, waves),
            )
            assert max(check(program).peak_held) <= 2 * waves * p
