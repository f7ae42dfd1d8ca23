"""Popularity of a feature's ids: distinct rows of a batch, shares of row ranges, cache hit rates.

Ids are grouped into classes of equal probability, the most popular first. A power law p(k) ~ k^-skew over
10^9 ids takes a few hundred classes: one for each of the first ids, then runs that end 5% above their
beginning, each with its exact share of the lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import expm1, log, log1p

from stretto.errors import StrettoError
from stretto.recommender.placement import TableSpec

_HEAD = 256  # number of ids with a class each
_WIDER = 1.05  # ratio of the end of a run to its beginning


@dataclass(frozen=True, kw_only=True)
class Popularity:
    """The popularity of one feature's ids.

    Attributes:
        rows: number of ids.
        hot: average number of ids per sample.
        classes: (number of ids, their share of all lookups), in decreasing order of popularity per id.
        source: "uniform", "skew 1.05", "measured".
    """

    rows: int
    hot: float
    classes: tuple[tuple[float, float], ...]
    source: str
    _cache: dict[tuple[str, float, float], float] = field(
        default_factory=dict[tuple[str, float, float], float], compare=False, repr=False
    )

    def unique(self, lookups: float, beyond: float = 0.0) -> float:
        """Expected number of unique ids among `lookups` independent lookups.

        Args:
            beyond: number of most popular ids to leave out: the result is the misses of a cache of these ids.
        """
        key = ("unique", lookups, beyond)
        if key not in self._cache:
            total, first = 0.0, 0.0
            for ids, share in self.classes:
                counted = min(ids, max(0.0, first + ids - beyond))
                first += ids
                if counted > 0 and share > 0:
                    probability = share / ids
                    # an id occurs in n lookups with probability 1 - (1 - p)^n
                    if probability < 1.0:
                        total += counted * -expm1(lookups * log1p(-probability))
                    else:
                        total += counted * min(1.0, lookups)
            self._cache[key] = total
        return self._cache[key]

    def top(self, ids: float) -> float:
        """Share of the lookups that go to the `ids` most popular ids."""
        total, remaining = 0.0, ids
        for count, share in self.classes:
            if remaining <= 0:
                break
            total += share * min(1.0, remaining / count)
            remaining -= count
        return min(1.0, total)

    def busiest(self, parts: int, block: bool = False) -> float:
        """Share of the lookups that go to the busiest of `parts` parts, with ids in order of popularity.

        Args:
            block: parts are contiguous ranges of ids; otherwise ids are assigned to parts by modulo.
        """
        if parts == 1:
            return 1.0
        if block:
            return self.top(-(-self.rows // parts))
        key = ("busiest", float(parts), 0.0)
        if key not in self._cache:
            total, first = 0.0, 0.0
            for ids, share in self.classes:
                # ids of this class that are 0 modulo parts; a long run counts as evenly spread
                last = first + ids
                count = -(-last // parts) - -(-first // parts)
                total += share * (count / ids if ids < 64 * parts else 1.0 / parts)
                first = last
            self._cache[key] = min(1.0, total)
        return self._cache[key]


def popularity_of(table: TableSpec, measured: Popularity | None = None) -> Popularity:
    """The measured popularity if there is one, else a power law with the table's skew, else uniform."""
    if measured is not None:
        return measured
    return by_skew(table.rows, table.hot, table.skew)


@lru_cache(maxsize=4096)
def by_skew(rows: int, hot: float = 1.0, skew: float | None = None) -> Popularity:
    """A power law, with popularity of id k (from 1) proportional to 1 / k^skew; uniform without a skew."""
    if not skew:
        return Popularity(rows=rows, hot=hot, classes=((float(rows), 1.0),), source="uniform")
    classes = list[tuple[float, float]]()
    first = 1
    while first <= rows:
        count = 1 if first <= _HEAD else max(1, int(first * (_WIDER - 1)))
        count = min(count, rows - first + 1)
        # the sum of k^-skew over the run, by a midpoint integral accurate to 1e-6
        low, high = first - 0.5, first + count - 0.5
        if count == 1:
            mass = first**-skew
        elif abs(skew - 1.0) < 1e-9:
            mass = log(high / low)
        else:
            mass = (high ** (1 - skew) - low ** (1 - skew)) / (1 - skew)
        classes.append((float(count), mass))
        first += count
    total = sum(mass for _, mass in classes)
    shares = tuple((count, mass / total) for count, mass in classes)
    return Popularity(rows=rows, hot=hot, classes=shares, source=f"skew {skew:g}")


def measured(rows: int, hot: float, buckets: Sequence[tuple[float, float]]) -> Popularity:
    """Popularity from a histogram of (number of ids, share of lookups): see `clicks.index.LookupHistogram`.

    Raises:
        StrettoError: more ids than rows, an empty bucket, or a negative share.
    """
    lookups = sum(share for _, share in buckets)
    if any(ids <= 0 or share < 0 for ids, share in buckets) or not lookups > 0:
        raise StrettoError(
            "a histogram of popularity has a bucket without ids or a negative share",
            hint="buckets are (number of ids, share of the lookups)",
        )
    distinct = sum(ids for ids, _ in buckets)
    if distinct > rows:
        raise StrettoError(
            f"a histogram of popularity has {distinct:g} ids for {rows} rows",
            hint="at least as many rows as the vocabulary that was counted",
        )
    ordered = sorted(buckets, key=lambda bucket: -bucket[1] / bucket[0])
    classes = tuple((float(ids), share / lookups) for ids, share in ordered)
    return Popularity(rows=rows, hot=hot, classes=classes, source="measured")
