"""Counter-based random numbers, and sampling of ids from a power law."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Uint64 = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = tuple(np.uint64(s) for s in (30, 27, 31))
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53
_SUMMANDS = 4


def stream(*names: object) -> np.uint64:
    """Seed of the random stream with these names."""
    text = "/".join(map(str, names))
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), dtype="<u8")[0]


def random_bits(starts: Uint64, counters: Uint64) -> Uint64:
    """64 random bits per stream and counter (SplitMix64): [streams, counters]."""
    values = starts[:, None] + counters * _STEP
    scratch = np.empty_like(values)
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        np.right_shift(values, shift, out=scratch)
        np.bitwise_xor(values, scratch, out=values)
        if factor is not None:
            np.multiply(values, factor, out=values)
    return values


def uniform(bits: Uint64) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * _UNIT


def bell(bits: Uint64) -> NDArray[np.float64]:
    """Nearly normal numbers of mean 0 and variance 1, below 3.5 in magnitude: four uniform numbers added."""
    total: NDArray[Any] = np.zeros(bits.shape)
    for i in range(_SUMMANDS):
        total += (bits >> np.uint64(16 * i)) & np.uint64(0xFFFF)
    return (total / 65536 - _SUMMANDS / 2 + _SUMMANDS / 131072) * np.sqrt(12 / _SUMMANDS)


SINGLE = 64  # most popular ids, each a run of its own
_FINENESS = 16
_SUMMED = 4096  # width up to which the mass of a run is summed exactly; wider runs are integrated
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class PowerLaw:
    """Piecewise constant popularity: runs of equally popular ids, most popular first.

    Attributes:
        starts: [runs] int64, popularity rank of the first id of each run.
        widths: [runs] int64, number of ids in each run.
        shares: [runs] float64, fraction of draws that fall in each run; they sum to 1.
    """

    starts: NDArray[np.int64]
    widths: NDArray[np.int64]
    shares: NDArray[np.float64]

    def buckets(self) -> list[tuple[int, float]]:
        """(number of ids, share of draws) per run."""
        return list(zip(self.widths.tolist(), self.shares.tolist(), strict=True))

    def mean(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Mean over draws of `values` [ids, ...] of the most popular ids; all other ids count as 0."""
        count = len(values)
        total = np.zeros(values.shape[1:])
        for start, width, share in zip(self.starts, self.widths, self.shares, strict=True):
            if start < count:
                total += share / width * values[start : start + width].sum(0)
        return total


def power_law(ids: int, skew: float) -> PowerLaw:
    """Runs for `ids` ids with popularity (k + 1)^-skew at rank k."""
    starts = [*range(min(ids, SINGLE))]
    start = len(starts)
    while start < ids:
        starts.append(start)
        start += max(1, start // _FINENESS)
    widths = np.diff([*starts, ids])

    def mass(start: int, width: int) -> float:
        """Sum of (k + 1)^-skew over a run."""
        if width <= _SUMMED:
            return float((np.arange(start + 1, start + width + 1, dtype=np.float64) ** -skew).sum())
        low, high = start + 0.5, start + width + 0.5  # midpoint rule, with an error below 1e-9
        if skew == 1:
            return float(np.log(high / low))
        return float((high ** (1 - skew) - low ** (1 - skew)) / (1 - skew))

    masses = np.array([mass(start, int(width)) for start, width in zip(starts, widths, strict=True)])
    return PowerLaw(np.array(starts, np.int64), widths.astype(np.int64), masses / masses.sum())


class RankSampler:
    """Draws popularity ranks for several columns at once, each from its power law (alias method)."""

    def __init__(self, columns: list[PowerLaw]) -> None:
        laws = list({id(column): column for column in columns}.values())
        sizes = np.array([len(law.starts) for law in laws])
        bases = np.cumsum(sizes) - sizes
        law_index = {id(law): i for i, law in enumerate(laws)}
        by_column = [law_index[id(column)] for column in columns]
        self._sizes = sizes[by_column].astype(np.uint64)[:, None]
        self._bases = bases[by_column].astype(np.int64)[:, None]
        limits, aliases = zip(*(alias_table(law.shares) for law in laws), strict=True)
        self._limits = np.concatenate(limits)
        self._aliases = np.concatenate([alias + base for alias, base in zip(aliases, bases, strict=True)])
        self._starts = np.concatenate([law.starts for law in laws])
        self._widths = np.concatenate([law.widths for law in laws]).astype(np.uint64)

    def __call__(self, bits: Uint64, columns: slice) -> NDArray[np.int64]:
        """Ranks [columns, n] from random bits [columns, n]: the high half for the run, the low half for the
        id within it."""
        scaled = (bits >> _HALF) * self._sizes[columns]
        run = (scaled >> _HALF).view(np.int64)
        run += self._bases[columns]
        scaled &= _LOW
        run = np.where(scaled < self._limits.take(run), run, self._aliases.take(run))
        offsets = bits & _LOW
        offsets *= self._widths.take(run)
        offsets >>= _HALF
        ranks = self._starts.take(run)
        ranks += offsets.view(np.int64)
        return ranks


def alias_table(shares: NDArray[np.float64]) -> tuple[Uint64, NDArray[np.int64]]:
    """Thresholds, scaled by 2^32, and aliases for draws at or above them (Walker 1977, the alias method)."""
    count = len(shares)
    height = (shares * count).tolist()
    alias = list(range(count))
    low = [i for i in range(count) if height[i] < 1]
    high = [i for i in range(count) if height[i] >= 1]
    while low and high:
        small, large = low.pop(), high[-1]
        alias[small] = large
        height[large] -= 1 - height[small]
        if height[large] < 1:
            low.append(high.pop())
    for slot in (*low, *high):  # left over from rounding
        height[slot] = 1.0
    return np.round(np.array(height) * 2.0**32).astype(np.uint64), np.array(alias, np.int64)
