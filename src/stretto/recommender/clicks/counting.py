"""How often the ids of a log occur: counts in bounded memory, and their histogram."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.recommender.clicks.index import Popularity
from stretto.recommender.clicks.raw import RawChunk, mix, unmix

HELD = 1 << 24
"""Counts in memory before a run is written: 16 bytes each, and twice that of one feature to sort them."""
MERGED = 1 << 22
"""About as many counts are merged at once."""
Counts = tuple[NDArray[np.uint64], NDArray[np.int64]]


@dataclass(frozen=True)
class Counted:
    """What a log has of one feature: `keys` seen often enough, the most frequent first and among equals the
    smaller key, with their `counts`; lookups of all `rare` keys and of `missing` values."""

    keys: NDArray[np.uint64]
    counts: NDArray[np.int64]
    rare: int
    missing: int

    def by_row(self) -> NDArray[np.int64]:
        """Lookups of each row of the vocabulary."""
        return np.concatenate([np.array([self.missing, self.rare]), self.counts])


class Counter:
    """Counts the ids of each feature of a log.

    `runs` are the sizes, by feature, of the runs that are written; with those and `missing` a new process
    goes on where the last `flush` was.
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
        self._held = list[list[Counts]]([] for _ in range(features))
        self._size = 0

    def add(self, chunk: RawChunk) -> None:
        """Count a chunk's ids."""
        for number, held in enumerate(self._held):
            keys, missing = chunk.feature(number)
            held.append(_counted(np.sort(mix(keys[~missing]))))
            self.missing[number] += int(np.count_nonzero(missing))
            self._size += len(held[-1][0])
        if self._size >= HELD:
            self.flush()

    def flush(self) -> None:
        """Write what is in memory as a run, durably."""
        if not self._size:
            return
        sizes = list[int]()
        with self._path(len(self.runs)).open("wb") as file:
            for held in self._held:
                keys, counts = _merged(held)
                held.clear()
                file.write(keys.astype("<u8").data)
                file.write(counts.astype("<u4").data)
                sizes.append(len(keys))
            file.flush()
            os.fsync(file.fileno())
        self.runs.append(sizes)
        self._size = 0

    def result(self, feature: int, threshold: int) -> Counted:
        """Keys of one feature that were seen `threshold` times or more; memory grows with those alone."""
        self.flush()
        keys = [np.zeros(0, np.uint64)]
        counts = [np.zeros(0, np.int64)]
        rare = 0
        for some, number in self._slices(feature):
            often = number >= threshold
            keys.append(unmix(some[often]))
            counts.append(number[often])
            rare += int(number[~often].sum())
        flat, number = np.concatenate(keys), np.concatenate(counts)
        order = np.lexsort((flat, -number))
        return Counted(flat[order], number[order], rare, self.missing[feature])

    def _slices(self, feature: int) -> Iterator[Counts]:
        """All counts of a feature, a range of mixed keys at a time."""
        runs = [self._run(number, feature) for number in range(len(self.runs))]
        parts = max(1, sum(len(keys) for keys, _ in runs) // MERGED)
        edges = [np.uint64(part * (1 << 64) // parts) for part in range(parts)]
        cuts = [[*np.searchsorted(keys, edges).tolist(), len(keys)] for keys, _ in runs]
        for part in range(parts):
            here = [slice(cut[part], cut[part + 1]) for cut in cuts]
            yield _merged(
                [
                    (keys[run_counts], counts[run_counts].astype(np.int64))
                    for (keys, counts), run_counts in zip(runs, here, strict=True)
                ]
            )

    def _run(self, number: int, feature: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        size, start = self.runs[number][feature], 12 * sum(self.runs[number][:feature])
        if not size:
            return np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        data = np.memmap(self._path(number), np.uint8, "r", start, 12 * size)
        return data[: 8 * size].view("<u8"), data[8 * size :].view("<u4")

    def _path(self, number: int) -> Path:
        return self._folder / f"run{number}.bin"


def remove_runs(folder: Path) -> None:
    """Remove the runs that counters have written."""
    for path in folder.glob("run*.bin"):
        path.unlink()


def _counted(keys: NDArray[np.uint64]) -> Counts:
    """Distinct ones of sorted keys, and how many of each."""
    edges = (
        np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1], [True]]))
        if len(keys)
        else np.zeros(1, int)
    )
    return keys[edges[:-1]], np.diff(edges)


def _merged(held: Sequence[Counts]) -> Counts:
    """One sorted list of several."""
    if not held:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    keys, counts = (np.concatenate(each) for each in zip(*held, strict=True))
    order = np.argsort(keys)
    unique, numbers = _counted(keys[order])
    if not len(unique):
        return unique, numbers
    return unique, np.add.reduceat(counts[order], np.cumsum(numbers) - numbers)


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
