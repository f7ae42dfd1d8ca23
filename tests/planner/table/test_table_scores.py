"""Scores of predictions beside what was measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.planner.table.scores import Point, concordant, fit_efficiency, layouts_by_group, regret, scores

SECONDS = st.floats(0.01, 100)


def points(*pairs: tuple[float, float], group: str = "g") -> list[Point]:
    return [
        Point(name=f"row {i}", predicted=p, measured=m, group=group, layout=i, low=0.9 * p, high=1.1 * p)
        for i, (p, m) in enumerate(pairs)
    ]


def test_errors_by_hand() -> None:
    scored = scores(points((1.1, 1.0), (1.6, 2.0), (3.0, 3.0)))
    assert scored is not None
    assert scored.rows == 3
    assert scored.mape == pytest.approx((0.1 + 0.2 + 0.0) / 3)
    assert scored.median == pytest.approx(0.1)
    assert scored.bias == pytest.approx((0.1 - 0.2) / 3)
    assert scored.worst == pytest.approx(-0.2)
    assert scored.worst_row == "row 1"
    assert scored.coverage == pytest.approx(2 / 3)  # 1.0 is in 0.99 to 1.21, 2.0 above 1.76


def test_no_measurements_have_no_scores() -> None:
    assert scores([]) is None


def test_regret_is_the_cost_of_the_predicted_best() -> None:
    assert regret([(1.0, 5.0), (2.0, 4.0), (3.0, 8.0)]) == pytest.approx(0.25)
    assert regret([(2.0, 4.0), (3.0, 8.0)]) == 0.0


def test_equal_predictions_have_the_mean_regret() -> None:
    """Equal predictions have the mean regret of their layouts, whatever the order in the file."""
    for layouts in ([(1.0, 2.0), (1.0, 4.0)], [(1.0, 4.0), (1.0, 2.0)]):
        assert regret(layouts) == pytest.approx(0.5)
        assert concordant(layouts) == (0.5, 1)


def test_repeated_measurements_are_averaged() -> None:
    runs = points((1.0, 4.0), (2.0, 3.0))
    again = replace(runs[0], measured=1.0)  # the same layout, lucky once
    (layouts,) = layouts_by_group([*runs, again])
    assert sorted(layouts) == [(1.0, 2.5), (2.0, 3.0)]
    assert regret(layouts) == 0.0


def test_groups_of_one_layout_have_no_regret() -> None:
    alone = [replace(point, group=i) for i, point in enumerate(points((1.0, 2.0), (2.0, 1.0)))]
    scored = scores(alone)
    assert scored is not None
    assert (scored.groups, scored.regret, scored.concordance) == (0, None, None)


def test_concordance_counts_pairs_in_order() -> None:
    assert concordant([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)]) == (2.0, 3)
    assert concordant([(1.0, 1.0), (2.0, 1.0)]) == (0.0, 0)  # measured alike: nothing to order


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=8))
def test_perfect_predictions_have_no_regret(pairs: list[tuple[float, float]]) -> None:
    right = [(measured, measured) for _, measured in pairs]
    assert regret(right) == pytest.approx(0, abs=1e-6)
    assert regret(pairs) >= 0
    right_pairs, count = concordant(right)
    assert right_pairs == pytest.approx(count, abs=count * 0.5 if _close(pairs) else 0)


def _close(pairs: list[tuple[float, float]]) -> bool:
    """Whether two measured times are nearly equal, so that rounding decides their order."""
    times = sorted(measured for _, measured in pairs)
    return any(b - a <= 1e-6 * b for a, b in pairwise(times))


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12), st.floats(0.02, 3))
def test_no_efficiency_beats_the_fitted_one(rows: list[tuple[float, float]], other: float) -> None:
    ideal, measured = [a for a, _ in rows], [b for _, b in rows]

    def mape(efficiency: float) -> float:
        return sum(abs(a / efficiency / b - 1) for a, b in rows)

    assert mape(fit_efficiency(ideal, measured)) <= mape(other) * (1 + 1e-9)
