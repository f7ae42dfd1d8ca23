"""True click probabilities of synthetic samples, and the best quality that any model can reach on them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from stretto.recommender.clicks.ranking import Ranking
from stretto.recommender.clicks.synthetic.draws import PowerLaw, bell, random_bits, stream, uniform
from stretto.recommender.clicks.synthetic.spec import SyntheticSpec

Floats = NDArray[np.float64]

HEAD = 1024  # most popular ids per feature with individual effects
PAIRS = 3
_HALF_AT = 16  # rank at which effects have decayed to half
# Shares of the logit's variance, chosen such that a small DLRM comes close to the truth within a few million
# samples, but not if it ignores one of the three.
_SHARES = {"ids": 0.55, "dense": 0.3, "pairs": 0.15}

SLOTS = 256  # distinct values per dense feature
# shares of missing values, as in Criteo's data set
_ABSENT = (0.45, 0.0, 0.2, 0.2, 0.03, 0.2, 0.04, 0.0, 0.04, 0.45, 0.04, 0.78, 0.2)
MISSING = np.iinfo(np.int64).min


class Effects:
    """Contribution of categorical ids to the logit.

    Attributes:
        values: [2, entries] float32: additive effects, and factors of pairwise products. All ids of a
            feature beyond its first HEAD share its last entry.
        bases, last: [features] int64: the id at rank k uses entry bases + min(k, last).
        pairs: features whose factors are multiplied.
    """

    def __init__(self, spec: SyntheticSpec, popularity: list[PowerLaw]) -> None:
        count = len(spec.features)
        self.pairs = [(2 * i, 2 * i + 1) for i in range(min(PAIRS, count // 2))]
        sizes = np.array([min(feature.rows, HEAD) for feature in spec.features])
        self.last = sizes.astype(np.int64)
        self.bases = (np.cumsum(sizes + 1) - sizes - 1).astype(np.int64)
        weights = _weights(spec, count, spec.strength**2 * _SHARES["ids"])
        factor = (spec.strength**2 * _SHARES["pairs"] / max(1, len(self.pairs))) ** 0.25
        values = list[NDArray[np.float32]]()
        for i, (feature, popular) in enumerate(zip(spec.features, popularity, strict=True)):
            starts = np.array([stream(spec.seed, "effect", i, c) for c in range(2)])
            raw = bell(random_bits(starts, np.arange(sizes[i], dtype=np.uint64))).T
            raw = raw / (1 + np.arange(len(raw)) / _HALF_AT)[:, None]
            mean = popular.mean(raw)
            deviation = np.sqrt(np.maximum(popular.mean(raw**2) - mean**2, 1e-12))
            # a sample's ids are summed: scaling by the pooling factor keeps the variance constant
            scale = feature.hot**-0.5 / deviation * (weights[i], factor)
            centred = np.concatenate((raw, np.zeros((1, 2)))) - mean
            values.append((centred * scale * (feature.rows > 1)).astype(np.float32))
        self.values = np.ascontiguousarray(np.concatenate(values).T)


class Numbers:
    """Dense features, each with SLOTS equally likely values.

    Attributes:
        raw: [numbers, SLOTS] int64, long-tailed counts, shifted by -1 in the second feature; MISSING marks
            missing values.
        values: [numbers, SLOTS] float32, the standard transform sign(raw) log(1 + |raw|), and 0 for MISSING.
        effects: [numbers, SLOTS] float64, contribution to the logit as a function of `values`.
    """

    def __init__(self, spec: SyntheticSpec) -> None:
        normal = np.array([NormalDist().inv_cdf((i + 0.5) / SLOTS) for i in range(SLOTS)])
        shape = uniform(
            random_bits(np.array([stream(spec.seed, "number", i) for i in range(4)]), _count(spec.dense))
        )
        raw = np.floor(np.exp(5 * shape[0][:, None] + (0.5 + shape[1][:, None]) * normal)).astype(np.int64)
        raw[1:2] -= 1
        for row, absent in zip(raw, _ABSENT, strict=False):
            row[: round(absent * SLOTS)] = MISSING
        self.raw = raw
        filled = np.where(raw == MISSING, 0, raw)
        self.values = np.copysign(np.log1p(np.abs(filled)), filled).astype(np.float32)
        standard = _standard(self.values.astype(np.float64))
        curves = standard * (shape[2][:, None] - 0.5) + standard**2 * (shape[3][:, None] - 0.5) / 2
        weights = _weights(spec, spec.dense, spec.strength**2 * _SHARES["dense"])
        self.effects = _standard(curves) * weights[:, None]


def _weights(spec: SyntheticSpec, count: int, variance: float) -> Floats:
    """Unequal weights whose squares sum to `variance`."""
    chosen = 0.5 + uniform(random_bits(np.array([stream(spec.seed, "weight", count)]), _count(count)))[0]
    return chosen * np.sqrt(variance / max(1e-9, float((chosen**2).sum())))


def _standard(rows: Floats) -> Floats:
    """Standardise each row to mean 0 and variance 1; constant rows become 0."""
    deviation = rows.std(1, keepdims=True)
    return (rows - rows.mean(1, keepdims=True)) / np.maximum(deviation, 1e-9) * (deviation > 1e-9)


def _count(count: int) -> NDArray[np.uint64]:
    return np.arange(count, dtype=np.uint64)


def best_bias(logits: Floats, base_rate: float) -> float:
    """The bias with which logits [n] have the mean probability `base_rate`."""
    low, high = -60.0, 60.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(logits + middle).mean() < base_rate else (low, middle)
    return (low + high) / 2


def probability(logits: Floats) -> Floats:
    """The logistic function."""
    return 1 / (1 + np.exp(-logits))


@dataclass(frozen=True, kw_only=True)
class BayesOptimal:
    """Metrics of the true click probabilities on a split, which no model can be expected to beat.

    Attributes:
        logloss: log loss on the labels of the split, in nats.
        entropy: normalised entropy: log loss relative to predicting the click-through rate everywhere.
        auc: area under the ROC curve.
        expected_logloss, expected_entropy: log loss and normalised entropy in expectation over labels: the
            mean entropy of the true probabilities, alone and relative to the entropy of their mean.
        base_rate: click-through rate of the labels.
        samples: number of samples in the split.
    """

    logloss: float
    entropy: float | None
    auc: float | None
    expected_logloss: float
    expected_entropy: float | None
    base_rate: float
    samples: int

    def as_dict(self) -> dict[str, float | int | None]:
        """All fields, as JSON."""
        return asdict(self)


class BayesOptimalTally:
    """Accumulates the metrics of `BayesOptimal` chunk by chunk."""

    def __init__(self) -> None:
        self._ranking = Ranking()
        self._sums = np.zeros(5)

    def add(self, logits: NDArray[np.float64], labels: NDArray[np.bool_]) -> None:
        """Add samples by their true logits [n] and labels [n]."""
        p = probability(logits)
        yes, no = np.logaddexp(0, -logits), np.logaddexp(0, logits)
        drawn, mean = np.where(labels, yes, no), p * yes + (1 - p) * no
        self._sums += (len(labels), labels.sum(), drawn.sum(), mean.sum(), p.sum())
        self._ranking.add(logits, labels)

    def result(self) -> BayesOptimal:
        """Metrics over all samples added so far."""
        count, clicked, drawn, mean, p = (float(value) for value in self._sums / max(1.0, self._sums[0]))
        samples = int(self._sums[0])
        by_label, by_truth = _entropy(clicked), _entropy(p)
        return BayesOptimal(
            logloss=drawn,
            entropy=drawn / by_label if by_label else None,
            auc=self._ranking.area().value,
            expected_logloss=mean,
            expected_entropy=mean / by_truth if by_truth else None,
            base_rate=clicked if count else 0.0,
            samples=samples,
        )


def _entropy(rate: float) -> float:
    """Binary entropy in nats."""
    if not 0 < rate < 1:
        return 0.0
    return float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))
