from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.clicks.synthetic.draws import (
    RankSampler,
    bell,
    power_law,
    random_bits,
    stream,
    uniform,
)
from stretto.recommender.clicks.synthetic.log import SyntheticClicks, SyntheticLog
from stretto.recommender.clicks.synthetic.spec import SyntheticFeature, SyntheticSpec, geometric_features
from stretto.recommender.clicks.synthetic.truth import HEAD, probability
from stretto.recommender.train.evaluate import Quality

MIXED = (
    SyntheticFeature(name="one", rows=1),
    SyntheticFeature(name="few", rows=7, skew=0.0),
    SyntheticFeature(name="three", rows=3000, hot=3),
    SyntheticFeature(name="vary", rows=500, hot=2.5, varying=True),
    SyntheticFeature(name="rare", rows=40, hot=0.5, varying=True),
    SyntheticFeature(name="huge", rows=1 << 31, skew=1.2),
)
SPEC = SyntheticSpec(features=MIXED, samples=1000, dense=3, seed=5)
LOG = SyntheticLog(SPEC)


def equal(batch: ClickBatch, other: ClickBatch) -> bool:
    pairs = (
        (batch.dense, other.dense),
        (batch.labels, other.labels),
        (batch.ids.ids, other.ids.ids),
        (batch.ids.lengths, other.ids.lengths),
    )
    return batch.ids.hot == other.ids.hot and all(torch.equal(a, b) for a, b in pairs)


def test_numbers_of_a_stream_are_splitmix64s():
    numbers = random_bits(np.array([1234567], np.uint64), np.arange(1, 4, dtype=np.uint64))
    assert numbers.tolist() == [[6457827717110365317, 3203168211198807973, 9817491932198370423]]
    assert stream("a", 1) != stream("a1")


def test_deviates_have_the_moments_they_say():
    bits = random_bits(np.array([stream("x")]), np.arange(200_000, dtype=np.uint64))
    assert bell(bits).mean() == pytest.approx(0, abs=0.01)
    assert bell(bits).var() == pytest.approx(1, abs=0.01)
    assert np.abs(bell(bits)).max() < 3.5
    assert uniform(bits).mean() == pytest.approx(0.5, abs=0.003)
    assert 0 <= uniform(bits).min() <= uniform(bits).max() < 1


@given(st.integers(0, 1100), st.integers(0, 60), st.data())
def test_a_slice_of_samples_is_the_same_however_it_is_cut(first: int, count: int, data: st.DataObject):
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    source = SyntheticClicks(SPEC, "train", LOG)
    uncut = source.batch(first, count)
    assert equal(source.batch(first, count, (start, stop)), uncut.part(start, stop))
    assert equal(source.batch(first + len(source), count), uncut)


def test_the_log_is_a_function_of_its_spec():
    assert equal(SyntheticLog(SPEC).batch(100, 50), LOG.batch(100, 50))
    assert not torch.equal(
        SyntheticLog(replace(SPEC, seed=6)).batch(100, 50).labels, LOG.batch(100, 50).labels
    )
    longer = SyntheticLog(replace(SPEC, samples=50_000, valid=0.5))
    assert equal(longer.batch(100, 50), LOG.batch(100, 50))


def test_parts_share_no_sample():
    train, valid = SyntheticClicks(SPEC, "train", LOG), SyntheticClicks(SPEC, "valid", LOG)
    assert (len(train), len(valid)) == (900, 100)
    assert equal(valid.batch(7, 20), LOG.batch(907, 20))
    with pytest.raises(StrettoError, match="none for 'valid'"):
        SyntheticClicks(replace(SPEC, valid=0.0), "valid")


def test_batches_are_what_tables_take():
    batch = LOG.batch(0, 400)
    ids = batch.ids
    assert (ids.features, ids.samples, batch.dense.shape) == (6, 400, (400, 3))
    assert ids.hot is None
    assert len(ids.ids) == int(ids.lengths.sum())
    assert (batch.dense.dtype, batch.labels.dtype, ids.ids.dtype) == (
        torch.float32,
        torch.float32,
        torch.int64,
    )
    for feature, feature_ids in zip(MIXED, ids.ids.split(ids.counts()), strict=True):
        assert 0 <= int(feature_ids.min()) <= int(feature_ids.max()) < feature.rows
    fixed = SyntheticLog(replace(SPEC, features=MIXED[:3])).batch(0, 5).ids
    assert fixed.hot == (1, 1, 3)
    assert fixed.lengths.tolist() == [[1] * 5, [1] * 5, [3] * 5]


def test_numbers_of_ids_vary_as_they_say():
    lengths = LOG.clicks(0, 20_000).lengths
    assert set(lengths[3].tolist()) == set(range(6))
    assert lengths[3].mean() == pytest.approx(2.5, abs=0.05)
    assert set(lengths[4].tolist()) == {0, 1}
    assert lengths[4].mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.0, 1.3])
def test_shares_follow_the_power_of_the_rank(skew: float):
    rows = 10_000
    popular = power_law(rows, skew)
    each = np.repeat(popular.shares / popular.widths, popular.widths)
    exact = np.arange(1, rows + 1) ** -skew
    exact /= exact.sum()
    assert len(each) == rows
    assert each.sum() == pytest.approx(1)
    np.testing.assert_allclose(each, exact, rtol=0.05 * max(skew, 1e-9))
    np.testing.assert_allclose(np.cumsum(each), np.cumsum(exact), rtol=0.002)


def test_a_thousand_million_ids_are_few_runs():
    popular = power_law(1_000_000_000, 1.05)
    assert int(popular.widths.sum()) == 1_000_000_000
    assert len(popular.starts) < 500
    total = sum(k**-1.05 for k in range(1, 200_000)) + 20 * (199_999.5**-0.05 - 1_000_000_000.5**-0.05)
    assert popular.shares[0] == pytest.approx(1 / total, rel=1e-6)
    assert power_law(1, 1.0).buckets() == [(1, 1.0)]


def test_draws_are_as_popular_as_they_should_be():
    columns = [power_law(5, 1.0), power_law(1000, 1.1)]
    draw, count = RankSampler(columns), 200_000
    bits = random_bits(np.array([stream("a"), stream("b")]), np.arange(count, dtype=np.uint64))
    for popular, ranks in zip(columns, draw(bits, slice(0, 2)), strict=True):
        expected = np.repeat(popular.shares / popular.widths, popular.widths) * count
        seen = np.bincount(ranks, minlength=len(expected))
        assert len(seen) == len(expected)
        chi = float(((seen - expected) ** 2 / expected).sum())
        assert abs(chi - len(seen)) < 5 * (2 * len(seen)) ** 0.5
    assert np.array_equal(draw(bits, slice(0, 2))[1:], draw(bits[1:], slice(1, 2)))


@given(st.integers(1, 300), st.integers(0, 9))
@settings(max_examples=20)
def test_every_rank_has_an_id_of_its_own(rows: int, seed: int):
    log = SyntheticLog(
        SyntheticSpec(features=(SyntheticFeature(name="a", rows=rows, skew=0.0),), samples=10, seed=seed)
    )
    clicks = log.clicks(0, 20 * rows)
    pairs = set(zip(clicks.ranks[0].tolist(), clicks.ids[0].tolist(), strict=True))
    assert len(pairs) == len({rank for rank, _ in pairs}) == len({each for _, each in pairs})
    assert {each for _, each in pairs} <= set(range(rows))


def test_the_logit_is_the_sum_that_is_documented():
    clicks, effects = LOG.clicks(0, 60), LOG._effects
    for n in range(60):
        total, factors = LOG.bias, dict[int, float]()
        for i, feature in enumerate(MIXED):
            columns = range(LOG.first_column[i], LOG.first_column[i] + int(clicks.lengths[i, n]))
            entries = [
                int(effects.bases[i]) + min(int(clicks.ranks[column, n]), min(feature.rows, HEAD))
                for column in columns
            ]
            total += sum(float(effects.values[0, entry]) for entry in entries)
            factors[i] = sum(float(effects.values[1, entry]) for entry in entries)
        total += sum(factors[left] * factors[right] for left, right in effects.pairs)
        total += sum(float(LOG.numbers.effects[j, slot]) for j, slot in enumerate(clicks.slots[:, n]))
        assert clicks.logits[n] == pytest.approx(total, abs=1e-12)
    assert effects.pairs == [(0, 1), (2, 3), (4, 5)]


def test_labels_are_drawn_from_the_true_probability():
    log = SyntheticLog(
        SyntheticSpec(features=geometric_features(26, 100, 10_000), base_rate=0.1, strength=2.0, seed=3)
    )
    clicks = log.clicks(0, 100_000)
    assert clicks.labels.mean() == pytest.approx(0.1, abs=0.005)
    assert clicks.logits.std() == pytest.approx(2.0, rel=0.03)
    p = probability(clicks.logits)
    for tenth in np.array_split(np.argsort(p), 10):
        spread_of = (p[tenth] * (1 - p[tenth])).sum() ** 0.5
        assert abs(clicks.labels[tenth].sum() - p[tenth].sum()) < 5 * spread_of


def test_effects_do_not_depend_on_how_many_ids_a_sample_has():
    for hot, varying in ((10.0, False), (2.5, True)):
        features = geometric_features(8, 50, 5000, hot=hot, varying=varying)
        logits = SyntheticLog(SyntheticSpec(features=features, samples=10)).clicks(0, 20_000).logits
        assert logits.std() == pytest.approx(1.5, rel=0.15)


def test_the_best_is_what_the_truth_itself_reaches():
    spec = SyntheticSpec(features=geometric_features(26, 1000, 100_000), samples=20_000)
    log = SyntheticLog(spec)
    best, first = log.best("valid"), log.span("valid")[0]
    clicks = log.clicks(first, 2000)
    truth = Quality()
    truth.add(torch.from_numpy(clicks.logits), torch.from_numpy(clicks.labels))
    reached = truth.result()
    assert best.logloss == pytest.approx(reached.logloss, rel=1e-12)
    assert best.entropy == pytest.approx(reached.entropy, rel=1e-12)
    assert best.auc == reached.auc
    assert (best.samples, best.base_rate) == (2000, pytest.approx(reached.positives / 2000))
    p = probability(clicks.logits)
    assert best.expected_logloss == pytest.approx(float(-(p * np.log(p) + (1 - p) * np.log(1 - p)).mean()))


def test_the_default_is_neither_trivial_nor_noise():
    best = SyntheticLog(SyntheticSpec(features=geometric_features(26, 1000, 100_000), samples=50_000)).best(
        "train"
    )
    assert best.entropy is not None
    assert best.expected_entropy is not None
    assert 0.7 < best.expected_entropy < 0.85
    assert best.entropy == pytest.approx(best.expected_entropy, abs=0.02)
    noise = SyntheticLog(
        SyntheticSpec(features=geometric_features(3, 10, 100), samples=20_000, strength=0.0)
    ).best("train")
    assert noise.expected_entropy == pytest.approx(1, abs=1e-9)
    assert noise.auc == 0.5


def test_popularity_is_told_as_a_folder_tells_it():
    source = SyntheticClicks(SPEC, "train", LOG)
    assert source.table_rows() == {feature.name: feature.rows for feature in MIXED}
    for feature in MIXED:
        popular = source.popularity()[feature.name]
        assert popular.hot == feature.hot
        assert sum(ids for ids, _ in popular.buckets) == feature.rows
        assert sum(share for _, share in popular.buckets) == pytest.approx(1)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: SyntheticFeature(name="a", rows=0), "feature a: rows is 0"),
        (lambda: SyntheticFeature(name="a", rows=1 << 40), "feature a: rows is"),
        (lambda: SyntheticFeature(name="a", rows=5, hot=1.5), r"feature a: hot is 1\.5"),
        (lambda: SyntheticFeature(name="a", rows=5, hot=0), "feature a: hot is 0"),
        (lambda: SyntheticFeature(name="a", rows=5, skew=-1), "feature a: skew is -1"),
        (lambda: SyntheticSpec(features=()), "features is"),
        (lambda: SyntheticSpec(features=(MIXED[0], MIXED[0])), "features is"),
        (lambda: SyntheticSpec(features=MIXED, samples=0), "samples is 0"),
        (lambda: SyntheticSpec(features=MIXED, valid=1.0), "valid is 1.0"),
        (lambda: SyntheticSpec(features=MIXED, base_rate=1.0), "base_rate is 1.0"),
        (lambda: SyntheticSpec(features=MIXED, strength=-1.0), "strength is -1.0"),
        (lambda: SyntheticSpec(features=MIXED, dense=-1), "dense is -1"),
        (lambda: geometric_features(3, 10, 5), "3 features of 10 to 5 rows"),
    ],
)
def test_what_is_refused(make: object, error: str):
    assert callable(make)
    with pytest.raises(StrettoError, match=error):
        make()
