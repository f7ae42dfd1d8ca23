from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ranks import on_ranks
from stretto.errors import StrettoError
from stretto.recommender.clicks.ranking import Ranking
from stretto.recommender.train.evaluate import Quality, QualityResult

SAMPLES = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=1, max_size=40)


def by_pairs(logits: list[float], labels: list[bool]) -> Fraction | None:
    """Every click beside every other sample."""
    won, pairs = Fraction(0), 0
    for high, click in zip(logits, labels, strict=True):
        for low, other in zip(logits, labels, strict=True):
            if click and not other:
                won += Fraction(1) if high > low else Fraction(1, 2) if high == low else 0
                pairs += 1
    return won / pairs if pairs else None


def quality(logits: Tensor, labels: Tensor, distinct: int = 1 << 20, each: int = 7) -> QualityResult:
    measure = Quality(distinct)
    for start in range(0, len(logits), each):
        measure.add(logits[start : start + each], labels[start : start + each])
    return measure.result()


def drawn(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, generator=generator).mul(8).round().div(4)
    labels = torch.rand(count, generator=generator) < torch.sigmoid(logits - 1)
    return logits, labels.float()


@given(SAMPLES)
def test_the_area_counts_pairs_and_ties_by_half(samples: list[tuple[int, bool]]):
    logits, labels = [value / 2 for value, _ in samples], [label for _, label in samples]
    expected = by_pairs(logits, labels)
    result = quality(torch.tensor(logits), torch.tensor(labels))
    assert result.auc == (None if expected is None else float(expected))
    assert result.auc_error == 0
    assert (result.samples, result.positives) == (len(samples), sum(labels))


@given(SAMPLES, st.integers(2, 5))
def test_few_bins_are_off_by_no_more_than_they_say(samples: list[tuple[int, bool]], distinct: int):
    logits, labels = [math.pi * value for value, _ in samples], [label for _, label in samples]
    expected = by_pairs(logits, labels)
    result = quality(torch.tensor(logits), torch.tensor(labels), distinct)
    if expected is not None and result.auc is not None:
        assert abs(result.auc - expected) <= result.auc_error + 1e-15
        assert (result.auc_error > 0) <= (len(set(logits)) > distinct)


@given(SAMPLES, st.permutations(range(40)), st.integers(2, 8))
def test_the_order_of_samples_changes_no_bit_of_the_area(
    samples: list[tuple[int, bool]], order: list[int], distinct: int
):
    shuffled = [samples[i] for i in order if i < len(samples)]
    areas = set[tuple[float | None, float]]()
    for given_, each in ((samples, 1), (samples, 40), (shuffled, 3)):
        logits = torch.tensor([math.e**value for value, _ in given_])
        result = quality(logits, torch.tensor([label for _, label in given_]), distinct, each)
        areas.add((result.auc, result.auc_error))
    assert len(areas) == 1


def test_against_the_definitions():
    logits, labels = drawn(1000)
    result = quality(logits, labels)
    p = torch.sigmoid(logits.double()).numpy()
    y = labels.double().numpy()
    logloss = float(np.mean(-np.where(y == 1, np.log(p), np.log(1 - p))))
    base = float(np.mean(-np.where(y == 1, np.log(y.mean()), np.log(1 - y.mean()))))
    assert result.auc == pytest.approx(float(by_pairs(logits.tolist(), labels.bool().tolist()) or 0), abs=0)
    assert result.logloss == pytest.approx(logloss, rel=1e-12)
    assert result.entropy == pytest.approx(logloss / base, rel=1e-12)
    assert result.calibration == pytest.approx(float(p.sum() / y.sum()), rel=1e-12)


def test_a_constant_is_worth_nothing():
    labels = torch.tensor([1.0, 0, 0, 0])
    result = quality(torch.full((4,), math.log(1 / 3)), labels)
    assert result.auc == 0.5
    assert result.entropy == pytest.approx(1, rel=1e-6)
    assert result.calibration == pytest.approx(1, rel=1e-6)


def test_zero_has_one_sign_and_16_bits_keep_their_order():
    assert quality(torch.tensor([-0.0, 0.0]), torch.tensor([1.0, 0])).auc == 0.5
    logits, labels = drawn(300)
    assert quality(logits.bfloat16(), labels).auc == quality(logits, labels).auc
    close = torch.tensor([1.0, 1.0 + 1e-15], dtype=torch.float64)
    assert quality(close, torch.tensor([0.0, 1])).auc == 1


def test_huge_logits_have_a_loss():
    result = quality(torch.tensor([1e4, -1e4, -50.0]), torch.tensor([1.0, 0, 1]))
    assert result.logloss == pytest.approx(50 / 3)
    wrong = quality(torch.tensor([math.inf, math.inf]), torch.tensor([1.0, 0]))
    assert wrong.logloss == math.inf


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_label_alone_has_no_area(label: float):
    result = quality(torch.tensor([0.5, -1.0]), torch.full((2,), label))
    assert (result.auc, result.entropy) == (None, None)
    assert (result.calibration is None) == (label == 0)
    assert math.isfinite(result.logloss)


def test_nothing_and_nan():
    nothing = Quality().result()
    assert (nothing.auc, nothing.entropy, nothing.calibration, nothing.samples) == (None, None, None, 0)
    broken = quality(torch.tensor([0.0, math.nan, 1.0]), torch.tensor([0.0, 1, 1]))
    assert broken.auc is None
    assert math.isnan(broken.logloss)
    assert broken.as_dict()["logloss"] is None
    with pytest.raises(StrettoError, match="NaN"):
        Ranking().add(np.array([math.nan]), np.array([True]))


def test_more_may_come_after_a_result():
    logits, labels = drawn(50)
    measure = Quality()
    measure.add(logits[:20], labels[:20])
    measure.result()
    measure.add(logits[20:], labels[20:])
    assert measure.result() == quality(logits, labels, each=20)


@pytest.mark.parametrize(
    ("logits", "labels", "error"),
    [
        (torch.zeros(2), torch.zeros(3), r"logits of shape \[2\] and labels of shape \[3\]"),
        (torch.zeros(2, 1), torch.zeros(2, 1), r"shape \[2, 1\]"),
        (torch.zeros(1), torch.tensor([0.5]), r"a label is 0\.5"),
    ],
)
def test_what_is_refused(logits: Tensor, labels: Tensor, error: str):
    with pytest.raises(StrettoError, match=error):
        Quality().add(logits, labels)


def test_more_distinct_predictions_than_are_kept():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(20_000, generator=generator)
    labels = (torch.rand(20_000, generator=generator) < torch.sigmoid(logits)).float()
    exact, few = quality(logits, labels, each=999), quality(logits, labels, 512, each=999)
    assert exact.auc is not None
    assert few.auc is not None
    assert 0 < abs(exact.auc - few.auc) <= few.auc_error < 0.01
    assert few.logloss == pytest.approx(exact.logloss, rel=1e-12)


def _shares(distinct: int) -> QualityResult:
    """Samples dealt out unevenly; the last rank has none."""
    import torch.distributed as dist

    logits, labels = drawn(2000)
    rank, world = dist.get_rank(), dist.get_world_size()
    share = torch.arange(2000) ** 2 % max(1, world - 1) == rank
    measure = Quality(distinct)
    measure.add(logits[share], labels[share])
    return measure.result()


@pytest.mark.parametrize("distinct", [1 << 20, 16])
def test_ranks_agree_with_one_process(distinct: int):
    logits, labels = drawn(2000)
    expected = quality(logits, labels, distinct)
    assert (expected.auc_error > 0) == (distinct == 16)
    for ranks in (2, 3):
        results = on_ranks(ranks, _shares, distinct)
        assert len({result.auc for result in results}) == 1
        for result in results:
            assert (result.auc, result.auc_error) == (expected.auc, expected.auc_error)
            assert result.logloss == pytest.approx(expected.logloss, rel=1e-12)
            assert result.calibration == pytest.approx(expected.calibration, rel=1e-12)
