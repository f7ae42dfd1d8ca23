"""zb-h1, zb-h2 and interleaved-zb: orders, memory, bubbles, torch's order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch_orders import dump, multi

from stretto.program import check, schedule
from stretto.program.replay import Costs, simulate
from stretto.program.text import to_csv

TIMES = st.sampled_from([0.5, 0.75, 1.0, 1.25, 1.5, 2.0])


def test_small_orders_written_out():
    assert [" ".join(map(str, order)) for order in schedule("zb-h1", 3, 4).orders] == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]
    assert [" ".join(map(str, order)) for order in schedule("zb-h2", 2, 4).orders] == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    ]


@pytest.mark.parametrize(
    ("p", "m", "h1", "h2"), [(4, 8, 27, 27), (8, 16, 55, 55), (8, 24, 79, 79), (8, 32, 103, 103)]
)
def test_makespans_of_equal_times(p: int, m: int, h1: float, h2: float):
    assert simulate(schedule("zb-h1", p, m)).makespan == h1
    assert simulate(schedule("zb-h2", p, m)).makespan == h2


def test_memory_is_the_formula():
    for p in range(1, 9):
        for m in range(1, 21):
            assert list(check(schedule("zb-h1", p, m)).peak_held) == [min(m, p)] * p
            assert list(check(schedule("zb-h2", p, m)).peak_held) == [min(m, 2 * p - 1)] * p


@given(p=st.integers(1, 8), more=st.integers(0, 9), f=TIMES, i=TIMES, w=TIMES)
def test_bubbles_are_the_closed_forms(p: int, more: int, f: float, i: float, w: float):
    costs, m = Costs(F=f, I=i, W=w), 2 * p + more
    h1 = simulate(schedule("zb-h1", p, m), costs).bubble
    assert h1.barrier == pytest.approx((p - 1) * max(f + i - w, f, i), abs=1e-9)
    assert h1.span == pytest.approx((p - 1) * max(f + i - w, i), abs=1e-9)
    h2 = simulate(schedule("zb-h2", p, m), costs).bubble
    assert h2.barrier == pytest.approx((p - 1) * max(f, f + i - 2 * w, i - f), abs=1e-9)
    assert h2.span == pytest.approx((p - 1) * max(0, f + i - 2 * w, i - f), abs=1e-9)


@given(p=st.integers(1, 8), more=st.integers(0, 9), extra=st.tuples(TIMES, TIMES), w=TIMES)
def test_transfers_cost_zb_h1_four_hops_a_rank(p: int, more: int, extra: tuple[float, float], w: float):
    f, i, hop = w + extra[0], w + extra[1], 0.0625
    bubble = simulate(schedule("zb-h1", p, 2 * p + more), Costs(F=f, I=i, W=w, hop=hop)).bubble
    assert bubble.barrier == pytest.approx((p - 1) * (f + i - w + 4 * hop), abs=1e-9)


def test_eager_and_bfs_hide_all_transfers_but_the_first_and_last():
    for p in (2, 3, 4, 8):
        eager = simulate(schedule("1f1b-eager", p, 4 * p), Costs(F=1.5, I=2, W=0.5, hop=0.125)).bubble
        assert eager.barrier == pytest.approx((p - 1) * (4 + 0.25), abs=1e-9)
        bfs = simulate(schedule("bfs", p, 2 * p + 1), Costs(F=1.5, I=2, W=0.5, hop=0.125)).bubble
        assert bfs.barrier == pytest.approx((p - 1) * (2 + 0.25), abs=1e-9)


@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 3, 2), (4, 10, 3), (3, 9, 4), (2, 6, 1), (8, 16, 2)]
)
def test_interleaved_is_torchs(p: int, m: int, v: int):
    torch_schedule = multi(ScheduleInterleavedZeroBubble, p, v, m)
    program = schedule("interleaved-zb", p, m, chunks=v, group=m // max(1, m // p))
    assert rows(to_csv(program)) == rows(dump(torch_schedule.pipeline_order))


def rows(text: str) -> list[list[str]]:
    return [[cell for cell in line.split(",") if cell and "REDUCE" not in cell] for line in text.splitlines()]


def test_interleaved_holds_what_its_formula_says():
    for p in range(1, 7):
        for m in (*range(1, 9), 12, 13, 16):
            for v in (1, 2, 3):
                for group in {None, min(p, m), max(p, m), (p + m) // 2}:
                    program = schedule("interleaved-zb", p, m, chunks=v, group=group)
                    bound = min(v * m, (v - 1) * program.parameters["group"] + p)
                    peaks = check(program).peak_held
                    assert max(peaks) <= bound
                    if m % program.parameters["group"] == 0:
                        assert set(peaks) == {bound}


def test_a_short_last_group_costs_little():
    """Each microbatch more takes its work, and the bubble of whole groups is hardly passed."""
    for p, v in ((4, 2), (4, 3), (8, 2)):
        two_groups = simulate(schedule("interleaved-zb", p, 2 * p, chunks=v)).bubble.barrier
        for m in range(2 * p + 1, 3 * p):
            assert simulate(schedule("interleaved-zb", p, m, chunks=v)).bubble.barrier <= two_groups + p


def test_few_microbatches_are_never_slower_in_zb_h2_than_in_zb_h1():
    for p in range(1, 9):
        for m in range(1, 2 * p + 2):
            h1, h2 = (simulate(schedule(name, p, m)) for name in ("zb-h1", "zb-h2"))
            assert h2.makespan <= h1.makespan
