"""Ranking quality: the area under the ROC curve, for any number of samples in bounded memory.

The area is the share of pairs (a click, a sample without one) in which the click has the higher prediction;
equal predictions count half: the statistic of Mann and Whitney (Fawcett 2006, "An introduction to ROC
analysis", section 7). It depends on the order of predictions alone, so it is enough to count clicks and
non-clicks of every distinct prediction. All counts are integers, so the result is bitwise the same for any
order of the samples and any split over ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]

DISTINCT = 1 << 20  # maximum number of distinct predictions: 24 bytes each
_MAGNITUDE = np.int64((1 << 63) - 1)
_EXACT = 1 << 63


class Area(NamedTuple):
    """The area under the ROC curve.

    Attributes:
        value: the area, or None without both clicks and non-clicks.
        error: upper bound of its error: 0 unless bits of the predictions were dropped.
    """

    value: float | None
    error: float


class Ranking:
    """Counts of clicks and non-clicks for every distinct prediction.

    Predictions are compared by all of their 64 bits. If there are more than `distinct` of them, the fewest
    possible low bits are dropped, the same for any order of samples or split over ranks; predictions that
    then are equal count half, and the area's `error` bounds the effect. Memory: 24 bytes per distinct
    prediction, and the same again while predictions are added.
    """

    def __init__(self, distinct: int = DISTINCT) -> None:
        assert distinct > 1
        self.distinct, self.dropped = distinct, 0
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty((2, 0), np.int64)
        self._buffer = list[tuple[Integers, NDArray[np.bool_]]]()
        self._buffered = 0

    def add(self, predictions: Floats, clicked: NDArray[np.bool_]) -> None:
        """Count samples by their `predictions` [n] and labels [n].

        Raises:
            StrettoError: a prediction is NaN.
        """
        if np.isnan(predictions).any():
            raise StrettoError("a prediction is NaN, which has no rank", hint="see which step's loss was")
        self._buffer.append((_keys(predictions), np.array(clicked)))
        self._buffered += len(predictions)
        if self._buffered >= self.distinct:
            self._count_buffer()

    def merge(self, dropped: int, keys: Integers, counts: Integers) -> None:
        """Add the `state` of another ranking."""
        self._count_buffer()
        self._add_counts(keys, counts, dropped)

    def state(self) -> tuple[int, Integers, Integers]:
        """Bits dropped; keys [distinct], ascending; clicks and non-clicks of each [2, distinct]."""
        self._count_buffer()
        return self.dropped, self._keys, self._counts

    def area(self) -> Area:
        """The area under the ROC curve."""
        self._count_buffer()
        clicks, others = self._counts
        all_clicks, all_others = int(clicks.sum()), int(others.sum())
        pairs = all_clicks * all_others
        if not pairs:
            return Area(None, 0.0)
        # int64 holds twice the pairs of 2e9 samples; above that float64 has 16 digits
        exact = 2 * pairs < _EXACT
        above, below = (counts if exact else counts.astype(np.float64) for counts in (clicks, others))
        won = int((above * (2 * (np.cumsum(below) - below) + below)).sum())
        tied = int((above * below).sum()) if self.dropped else 0
        return Area(won / (2 * pairs), tied / (2 * pairs))

    def _count_buffer(self) -> None:
        if not self._buffer:
            return
        keys = np.concatenate([keys for keys, _ in self._buffer])
        clicked = np.concatenate([clicked for _, clicked in self._buffer])
        self._buffer.clear()
        self._buffered = 0
        self._add_counts(keys, np.stack((clicked, ~clicked)).astype(np.int64), 0)

    def _add_counts(self, keys: Integers, counts: Integers, dropped: int) -> None:
        level = max(dropped, self.dropped)
        keys = np.concatenate((self._keys >> (level - self.dropped), keys >> (level - dropped)))
        counts = np.concatenate((self._counts, counts), axis=1)
        order = np.argsort(keys, kind="stable")
        keys, counts = _summed(keys[order], counts[:, order])
        while len(keys) > self.distinct:
            level += 1
            keys = keys >> 1
            if 1 + np.count_nonzero(keys[1:] != keys[:-1]) <= self.distinct:
                keys, counts = _summed(keys, counts)
        self._keys = keys
        self._counts = counts
        self.dropped = level


def _keys(predictions: Floats) -> Integers:
    """Map predictions to integers with the same order, equal if they are equal."""
    bits = (predictions.astype(np.float64) + 0.0).view(np.int64)  # -0.0 becomes 0.0
    return np.where(bits < 0, bits ^ _MAGNITUDE, bits)


def _summed(keys: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """Sum the counts of equal keys; the keys ascend."""
    if not len(keys):
        return keys, counts
    first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    return keys[first], np.add.reduceat(counts, first, axis=1)
