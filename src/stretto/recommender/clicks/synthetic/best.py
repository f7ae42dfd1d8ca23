"""The best that any model can do on synthetic clicks: to know their true probabilities."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.recommender.clicks.ranking import Ranking
from stretto.recommender.clicks.synthetic.truth import probability


@dataclass(frozen=True, kw_only=True)
class Best:
    """What the true probabilities reach on a part of the log: no model can be expected to do better.

    Attributes:
        logloss: in nats, of the true probabilities on the very labels of the part.
        entropy: logloss over that of the share of clicks as everybody's prediction (normalised entropy).
        auc: of the true probabilities.
        expected_logloss, expected_entropy: the same over all labels that might have been drawn for these
            samples: the mean entropy of the true probabilities, and that over the entropy of their mean.
        base_rate: clicks over samples.
        samples: of the part.
    """

    logloss: float
    entropy: float | None
    auc: float | None
    expected_logloss: float
    expected_entropy: float | None
    base_rate: float
    samples: int

    def facts(self) -> dict[str, float | int | None]:
        """All fields, as JSON."""
        return asdict(self)


class BestTally:
    """Adds up, chunk by chunk, what the true probabilities reach."""

    def __init__(self) -> None:
        self._ranking = Ranking()
        self._sums = np.zeros(5)

    def add(self, logits: NDArray[np.float64], labels: NDArray[np.bool_]) -> None:
        """Take samples: their true logits [n] and their labels [n]."""
        p = probability(logits)
        yes, no = np.logaddexp(0, -logits), np.logaddexp(0, logits)
        drawn, mean = np.where(labels, yes, no), p * yes + (1 - p) * no
        self._sums += (len(labels), labels.sum(), drawn.sum(), mean.sum(), p.sum())
        self._ranking.add(logits, labels)

    def result(self) -> Best:
        """Over all that was taken."""
        count, clicked, drawn, mean, p = (float(value) for value in self._sums / max(1.0, self._sums[0]))
        samples = int(self._sums[0])
        by_label, by_truth = _entropy(clicked), _entropy(p)
        return Best(
            logloss=drawn,
            entropy=drawn / by_label if by_label else None,
            auc=self._ranking.area().value,
            expected_logloss=mean,
            expected_entropy=mean / by_truth if by_truth else None,
            base_rate=clicked if count else 0.0,
            samples=samples,
        )


def _entropy(rate: float) -> float:
    """Of one event, in nats."""
    if not 0 < rate < 1:
        return 0.0
    return float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))
