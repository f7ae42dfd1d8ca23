"""Cuts against every possible cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.layout import cut, describe_cut


def every_cut(layers: int, stages: int) -> list[list[range]]:
    cuts = []
    for inner in combinations(range(1, layers), stages - 1):
        marks = [0, *inner, layers]
        cuts.append([range(a, b) for a, b in pairwise(marks)])
    return cuts


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_no_cut_has_a_cheaper_largest_stage_nor_is_more_even(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    got = cut(costs, stages)

    def worth(parts: list[range]) -> tuple[int, int]:
        totals = [sum(costs[layer] for layer in part) for part in parts]
        return max(totals), sum(total * total for total in totals)

    assert [layer for part in got for layer in part] == list(range(len(costs)))
    assert len(got) == stages
    assert all(len(part) > 0 for part in got)
    assert worth(got) == min(worth(parts) for parts in every_cut(len(costs), stages))


def test_equal_layers_leave_the_extra_ones_to_the_end() -> None:
    assert [len(part) for part in cut([1.0] * 10, 4)] == [2, 2, 3, 3]
    assert [len(part) for part in cut([0.1] * 7, 3)] == [2, 2, 3]


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    assert [len(part) for part in cut([1, 1, 1, 1, 1, 1, 1, 1, 4], 3)] == [4, 4, 1]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.data())
def test_real_costs_are_cut_whole(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    parts = cut(costs, stages)
    assert [layer for part in parts for layer in part] == list(range(len(costs)))
    assert all(part for part in parts)


def test_the_text_names_layers_and_shares() -> None:
    text = describe_cut([1, 1, 2], cut([1, 1, 2], 2))
    assert text.splitlines() == [
        "3 layers over 2 stages, largest 1.000 x mean",
        "  stage 0: layers 0-1, 50.0%",
        "  stage 1: layer 2, 50.0%",
    ]


@pytest.mark.parametrize(
    ("costs", "stages", "says", "hint"),
    [
        ([1.0] * 3, 4, "3 layers over 4 stages", "at most 3 stages"),
        ([1.0], 0, "stages=0", "at least 1"),
        ([1.0, -1.0], 1, "layer 1", "not negative"),
        ([float("nan")], 1, "layer 0", "finite"),
    ],
)
def test_what_cannot_be_cut(costs: list[float], stages: int, says: str, hint: str) -> None:
    with pytest.raises(StrettoError, match=says) as caught:
        cut(costs, stages)
    assert hint in str(caught.value.hint)
