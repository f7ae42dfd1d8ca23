"""A rise of the loss is noticed at the end of a run, noise is not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.run.train.trend import LossTrend


def warning(losses: list[float | None]) -> str | None:
    trend = LossTrend()
    for loss in losses:
        trend.add(loss)
    return trend.warning


def test_a_rise_is_told_with_both_numbers() -> None:
    text = warning([10.0, 8, 6, 5, 4, *[3.8] * 8, 9, 12, *[15.9] * 6])
    assert text is not None
    assert text.startswith("the loss has risen: 15.9 over the last 8 steps, and 3.8 at its lowest")


def test_a_run_that_diverges_at_once_has_risen() -> None:
    text = warning([8.3, 30, 90, 200, 340, 133, 76, 42, *[15.1] * 8])
    assert text is not None
    assert text.startswith("the loss has risen: 15.1 over the last 8 steps, and 8.3 at its lowest")


@pytest.mark.parametrize(
    "losses",
    [
        [],
        [1.0, 9.0, 9.0],  # too few to tell
        [3.8] * 8 + [15.9],  # one step
        [2.8] + [3.8] * 20,  # a first step by chance
        [None, float("nan"), *[3.8] * 8, float("inf"), None],
        [0.01] * 9 + [0.05] * 9,  # a text that was learnt by heart
    ],
)
def test_what_is_no_rise(losses: list[float | None]) -> None:
    assert warning(losses) is None


def test_noise_is_no_rise() -> None:
    draw = random.Random(0)
    for _ in range(300):
        assert warning([2 + 2 * 0.98**step + draw.gauss(0, 0.15) for step in range(200)]) is None


@given(st.lists(st.floats(0.1, 20), min_size=8, max_size=40))
def test_a_run_that_ends_at_its_lowest_has_not_risen(losses: list[float]) -> None:
    assert warning([*sorted(losses, reverse=True)]) is None
    assert warning([*losses, *[100.0] * 8]) is not None
