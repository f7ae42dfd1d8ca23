"""How often the ids of a log occur: counts in bounded memory, and their histogram."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.recommender.clicks.index import LookupHistogram
from stretto.recommender.clicks.raw import RawChunk, mix, unmix

IN_MEMORY = 1 << 24
"""Counts in memory before a run is written: 16 bytes each, and twice that of one feature to sort them."""
MERGED = 1 << 22
"""Approximate number of counts merged at once."""
Counts = tuple[NDArray[np.uint64], NDArray[np.int64]]


class FeatureCounts(NamedTuple):
    """The ids of one feature of a log.

    Attributes:
        keys, counts: keys that occur at least as often as the threshold, the most frequent first and among
            equals the smaller key.
        rare: lookups of all other keys.
        missing: number of missing values.
    """

    keys: NDArray[np.uint64]
    counts: NDArray[np.int64]
    rare: int
    missing: int

    def by_row(self) -> NDArray[np.int64]:
        """Lookups of each row of the vocabulary."""
        return np.concatenate([np.array([self.missing, self.rare]), self.counts])


class IdCounter:
    """Counts the ids of each feature of a log.

    `runs` are the sizes, by feature, of the runs written so far; with those and `missing` a new process
    continues from the last `flush`.
    """

    def __init__(
        self,
        folder: Path,
        features: int,
        runs: Sequence[Sequence[int]] = (),
        missing: Sequence[int] | None = None,
    ) -> None:
        self.runs = [list(sizes) for sizes in runs]
        self.missing = list(missing or [0] * features)
        self._folder = folder
        self._buffers = list[list[Counts]]([] for _ in range(features))
        self._size = 0

    def add(self, chunk: RawChunk) -> None:
        """Count a chunk's ids."""
        for feature, buffer in enumerate(self._buffers):
            keys, missing = chunk.feature(feature)
            buffer.append(_count_sorted(np.sort(mix(keys[~missing]))))
            self.missing[feature] += int(np.count_nonzero(missing))
            self._size += len(buffer[-1][0])
        if self._size >= IN_MEMORY:
            self.flush()

    def flush(self) -> None:
        """Write the counts in memory as a run, durably."""
        if not self._size:
            return
        sizes = list[int]()
        with self._path(len(self.runs)).open("wb") as file:
            for buffer in self._buffers:
                keys, counts = _merge(buffer)
                buffer.clear()
                file.write(keys.astype("<u8").data)
                file.write(counts.astype("<u4").data)
                sizes.append(len(keys))
            file.flush()
            os.fsync(file.fileno())
        self.runs.append(sizes)
        self._size = 0

    def counts(self, feature: int, threshold: int) -> FeatureCounts:
        """The counts of one feature; memory grows only with the keys that reach `threshold`."""
        self.flush()
        frequent_keys = [np.zeros(0, np.uint64)]
        frequent_counts = [np.zeros(0, np.int64)]
        rare = 0
        runs = [self._map_run(run, feature) for run in range(len(self.runs))]
        # mixed keys are spread evenly: ranges of them have about as many counts each
        parts = max(1, sum(len(keys) for keys, _ in runs) // MERGED)
        edges = [np.uint64(part * (1 << 64) // parts) for part in range(parts)]
        cuts = [[*np.searchsorted(keys, edges).tolist(), len(keys)] for keys, _ in runs]
        for part in range(parts):
            slices = [slice(cut[part], cut[part + 1]) for cut in cuts]
            keys, counts = _merge(
                [
                    (run_keys[in_part], run_counts[in_part].astype(np.int64))
                    for (run_keys, run_counts), in_part in zip(runs, slices, strict=True)
                ]
            )
            often = counts >= threshold
            frequent_keys.append(unmix(keys[often]))
            frequent_counts.append(counts[often])
            rare += int(counts[~often].sum())
        keys, counts = np.concatenate(frequent_keys), np.concatenate(frequent_counts)
        order = np.lexsort((keys, -counts))
        return FeatureCounts(keys[order], counts[order], rare, self.missing[feature])

    def _map_run(self, run: int, feature: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        size, start = self.runs[run][feature], 12 * sum(self.runs[run][:feature])
        if not size:
            return np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        data = np.memmap(self._path(run), np.uint8, "r", start, 12 * size)
        return data[: 8 * size].view("<u8"), data[8 * size :].view("<u4")

    def _path(self, run: int) -> Path:
        return self._folder / f"run{run}.bin"


def remove_runs(folder: Path) -> None:
    """Remove the runs that counters have written."""
    for path in folder.glob("run*.bin"):
        path.unlink()


def _count_sorted(keys: NDArray[np.uint64]) -> Counts:
    """The distinct values of sorted keys, and the count of each."""
    edges = (
        np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1], [True]]))
        if len(keys)
        else np.zeros(1, int)
    )
    return keys[edges[:-1]], np.diff(edges)


def _merge(lists: Sequence[Counts]) -> Counts:
    """Merge lists of counts into one, sorted by key."""
    if not lists:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    keys, counts = (np.concatenate(arrays) for arrays in zip(*lists, strict=True))
    order = np.argsort(keys)
    unique, lengths = _count_sorted(keys[order])
    if not len(unique):
        return unique, lengths
    return unique, np.add.reduceat(counts[order], np.cumsum(lengths) - lengths)


COUNTED = 1 << 25
"""Lookups of all features together in a sample of the log: a million of each of 26."""
_RUN = 1 << 13
_EDGES = np.unique(np.ceil(2 ** (np.arange(129) / 2)).astype(np.float64) - 1)


def lookup_histogram(counts: NDArray[np.int64], hot: float) -> LookupHistogram:
    """The histogram of a feature's lookups.

    Args:
        counts: [ids], lookups of each id, in any order.
        hot: mean number of ids in a sample.

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
    return LookupHistogram(hot, len(counts), total, buckets if total else [])


def count_ids(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of occurrences of each distinct id in `ids`, in no order."""
    return np.unique(ids, return_counts=True)[1].astype(np.int64)


def sample_runs(samples: int, wanted: int) -> list[range]:
    """Short runs of samples, evenly over the log: at most `wanted` samples in all, or the whole log."""
    if samples <= wanted:
        return [range(start, min(start + _RUN, samples)) for start in range(0, samples, _RUN)]
    length = max(1, min(_RUN, wanted // 64))
    starts = np.linspace(0, samples - length, wanted // length).astype(np.int64)
    return [range(start, start + length) for start in starts.tolist()]
