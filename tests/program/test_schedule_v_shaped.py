"""zb-v, v-half and v-min: memory, bubbles, torch's order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
from torch_orders import dump, multi

from stretto.program import check, schedule
from stretto.program.replay import Costs, simulate
from stretto.program.text import to_csv


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 8), (4, 3), (4, 6), (3, 7), (8, 16)])
def test_zb_v_is_torchs(p: int, m: int):
    torch_csv = dump(multi(ScheduleZBVZeroBubble, p, 2, m).pipeline_order)
    cells = [[cell for cell in line.split(",") if cell] for line in torch_csv.splitlines()]
    assert [line.split(",") for line in to_csv(schedule("zb-v", p, m)).splitlines()] == cells


@pytest.mark.parametrize(("p", "m", "makespan"), [(4, 8, 25.5), (8, 16, 51.5), (8, 24, 75.5), (8, 32, 99.5)])
def test_zb_v_makespans_of_equal_times(p: int, m: int, makespan: float):
    assert simulate(schedule("zb-v", p, m)).makespan == makespan


@given(
    p=st.integers(1, 8),
    more=st.integers(0, 9),
    times=st.lists(st.sampled_from([0.5, 0.75, 1.0, 1.25, 1.5, 2.0]), min_size=3, max_size=3).map(sorted),
)
def test_zb_v_bubbles_are_the_closed_forms(p: int, more: int, times: list[float]):
    w, f, i = times
    bubble = simulate(schedule("zb-v", p, 2 * p + more), Costs(F=f, I=i, W=w)).bubble
    assert bubble.barrier == pytest.approx((p - 1) * max(i / 2, i - w), abs=1e-9)
    assert bubble.span == pytest.approx((p - 1) * (i - w), abs=1e-9)


LIMITS: dict[str, Callable[[int], int]] = {
    "zb-v": lambda p: 2 * p,
    "v-half": lambda p: 2 * ((p + 2) // 2),
    "v-min": lambda p: 2 * ((p + 4) // 3),
}


@pytest.mark.parametrize("name", list(LIMITS))
def test_memory_is_the_formula_whatever_the_microbatches(name: str):
    for p in range(1, 11):
        limit = LIMITS[name](p)
        for m in (1, 2, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1, 6 * p):
            peak = max(check(schedule(name, p, m)).peak_held)
            assert peak <= min(2 * m, limit)
            if m >= 2 * p:
                assert peak == limit


@pytest.mark.parametrize(("name", "part"), [("v-half", 0.61), ("v-min", 0.67)])
def test_bubbles_are_their_part_of_1f1bs_for_any_microbatches(name: str, part: float):
    """Half (and the block's wait) and two thirds for equal times; they do not grow with the microbatches."""
    for p in (4, 6, 8, 12):
        for m in (2 * p, 4 * p, 7 * p + 3):
            assert simulate(schedule(name, p, m)).bubble.barrier <= part * 3 * (p - 1)


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_few_microbatches_are_never_slower_than_in_1f1b(name: str):
    for p in range(1, 9):
        for m in range(1, 2 * p):
            assert simulate(schedule(name, p, m)).makespan <= simulate(schedule("1f1b", p, m)).makespan
