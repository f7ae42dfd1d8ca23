"""Popularity of ids against counting them one by one, and against drawing them."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counted_calls import counted_calls
from stretto.errors import StrettoError
from stretto.recommender.placement import TableSpec
from stretto.recommender.popularity import Popularity, by_skew, measured, popularity_of


def probabilities(rows: int, skew: float | None) -> np.ndarray:
    p = np.arange(1, rows + 1, dtype=float) ** -(skew or 0.0)
    return p / p.sum()


@settings(max_examples=60)
@given(
    st.integers(1, 60_000),
    st.one_of(st.none(), st.floats(0.2, 2.0), st.just(1.0)),
    st.floats(1, 1e6),
    st.integers(1, 70),
    st.floats(0, 1),
)
def test_classes_against_every_id(rows: int, skew: float | None, lookups: float, parts: int, part: float):
    p, classes = probabilities(rows, skew), by_skew(rows, 1.0, skew)
    assert sum(ids for ids, _ in classes.classes) == rows
    each = 1 - (1 - np.minimum(p, 1 - 1e-16)) ** lookups
    assert classes.unique(lookups) == pytest.approx(each.sum(), rel=2e-3, abs=1e-9)
    cached = int(part * rows)
    # a class that is cut goes by its mean, and its ends are 5% of ids and 10% of probability apart
    assert classes.unique(lookups, cached) == pytest.approx(each[cached:].sum(), rel=5e-2, abs=0.1)
    assert classes.top(cached) == pytest.approx(p[:cached].sum(), rel=5e-3, abs=1e-9)
    assert classes.busiest(parts) == pytest.approx(p[::parts].sum(), rel=2e-2)
    assert classes.busiest(parts, block=True) == pytest.approx(p[: -(-rows // parts)].sum(), rel=5e-3)


def test_unique_against_draws():
    rng = np.random.default_rng(0)
    p = probabilities(5000, 1.05)
    drawn = [len(np.unique(rng.choice(5000, 3000, p=p))) for _ in range(50)]
    assert by_skew(5000, 1.0, 1.05).unique(3000) == pytest.approx(np.mean(drawn), rel=0.01)


def test_modulo_spreads_what_blocks_pile_up():
    """p(k) ~ 1/k of a million ids over 8 ranks: 85% on the first block, 18% at most where ids go modulo."""
    zipf = by_skew(10**6, 1.0, 1.0)
    assert zipf.busiest(8, block=True) == pytest.approx(0.855, abs=0.005)
    assert zipf.busiest(8) == pytest.approx(0.1755, abs=0.001)


def test_measured_buckets_are_as_the_ids_they_stand_for():
    p = probabilities(1000, 0.9)
    ends = [0, 1, 2, 10, 11, 200, 1000]
    buckets = [(b - a, float(p[a:b].sum())) for a, b in pairwise(ends)]
    bucketed = measured(1200, 2.5, list(reversed(buckets)))
    flat = np.concatenate([np.full(n, share / n) for n, share in buckets])
    assert bucketed.unique(500) == pytest.approx((1 - (1 - flat) ** 500).sum())
    assert bucketed.busiest(3) == pytest.approx(flat[::3].sum(), rel=0.01)
    assert bucketed.top(11) == pytest.approx(flat[:11].sum())
    assert (bucketed.hot, bucketed.source) == (2.5, "measured")
    table = TableSpec(name="a", rows=1200, dim=4, skew=3.0)
    assert popularity_of(table, bucketed) is bucketed
    assert popularity_of(table).source == "skew 3"


def test_one_id_and_no_lookups():
    assert by_skew(1, 1.0, 1.2).unique(0) == 0
    assert by_skew(1, 1.0, 1.2).unique(5) == 1
    assert Popularity(rows=1, hot=1.0, classes=((1.0, 1.0),), source="x").unique(0.25) == 0.25


@pytest.mark.parametrize("buckets", [[(0, 1.0)], [(5, -1.0)], [(5, 0.0)], [(2000, 1.0)], []])
def test_a_histogram_that_is_none(buckets: list[tuple[float, float]]):
    with pytest.raises(StrettoError, match="histogram"):
        measured(1000, 1.0, buckets)


def test_billions_of_rows_take_the_work_of_thousands():
    few, many = (
        counted_calls(lambda rows=rows: by_skew(rows, 1.0, 1.05).unique(1e6))
        for rows in (4 * 10**3, 4 * 10**9)
    )
    assert many < 5 * few
    assert 1e5 < by_skew(4 * 10**9, 1.0, 1.05).unique(1e6) < 1e6
