"""Popularity of the ids of a feature, from their counts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stretto.recommender.clicks.index import Popularity

COUNTED = 1 << 25
"""Lookups of all features together that are counted where not all have been: a million of each of 26."""
_RUN = 1 << 13
_EDGES = np.unique(np.ceil(2 ** (np.arange(129) / 2)).astype(np.float64) - 1)


def popularity(counts: NDArray[np.int64], hot: float) -> Popularity:
    """Of an id's lookups, one number for each id in any order; `hot`: ids of a sample, on average.

    The buckets hold 1, 1, 1, 2, 2, 4, ... ids, each about 1.4 times the one before: 20 steps for 1000 ids, 60
    for 10^9.
    """
    counts = np.sort(counts[counts > 0])[::-1]
    total = int(counts.sum())
    edges = [int(edge) for edge in _EDGES if edge < len(counts)] + [len(counts)]
    sums = np.concatenate([[0], np.cumsum(counts)])
    buckets = [
        (stop - start, int(sums[stop] - sums[start]) / total)
        for start, stop in pairwise(edges)
        if stop > start
    ]
    return Popularity(hot, len(counts), total, buckets if total else [])


def count(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each distinct id stands in `ids`, in no order."""
    return np.unique(ids, return_counts=True)[1].astype(np.int64)


def spread(samples: int, wanted: int) -> list[range]:
    """At most `wanted` of `samples` samples in short runs, evenly over the log; all, if they are that few."""
    if samples <= wanted:
        return [range(start, min(start + _RUN, samples)) for start in range(0, samples, _RUN)]
    each = max(1, min(_RUN, wanted // 64))
    starts = np.linspace(0, samples - each, wanted // each).astype(np.int64)
    return [range(start, start + each) for start in starts.tolist()]
