"""Train, validation and test: three runs of one token stream."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import isfinite

from stretto.errors import StrettoError

SPLITS = ("train", "valid", "test")
_HINT = 'three numbers for train, valid and test, as in "949,50,1"'


def parse_ratio(ratio: str) -> tuple[float, float, float]:
    """The shares of train, valid and test in "949,50,1"; they sum to 1.

    Raises:
        StrettoError: not three finite numbers >= 0 with a sum > 0.
    """
    try:
        numbers = [float(part) for part in ratio.split(",")]
    except ValueError:
        raise StrettoError(f"split {ratio!r}: not numbers", hint=_HINT) from None
    if len(numbers) != 3:
        raise StrettoError(f"split {ratio!r}: {len(numbers)} numbers", hint=_HINT)
    total = sum(numbers)
    if not all(isfinite(n) and n >= 0 for n in numbers) or not isfinite(total) or total <= 0:
        raise StrettoError(f"split {ratio!r}: numbers must be >= 0 and not all 0", hint=_HINT)
    train, valid, test = (n / total for n in numbers)
    return train, valid, test


def split_tokens(offsets: Sequence[int], ratio: str) -> dict[str, range]:
    """Token ranges of each split, in the order train, valid, test; together they cover the stream.

    `offsets` are the documents' first tokens followed by the token count. A cut falls between two documents,
    the nearest to where the ratio wants it; only where that would change the size of a split next to it by
    more than a quarter (few, long documents, in the extreme a single one) is a document cut in two.

    Raises:
        StrettoError: malformed ratio.
    """
    total = int(offsets[-1])
    shares = {name: share for name, share in zip(SPLITS, parse_ratio(ratio), strict=True) if share > 0}
    ideal = [0, *(round(sum(list(shares.values())[:i]) * total) for i in range(1, len(shares))), total]
    cuts = ideal.copy()
    for i in range(1, len(shares)):
        reach = min(ideal[i] - ideal[i - 1], ideal[i + 1] - ideal[i]) // 4
        near = _nearest(offsets, ideal[i])
        cuts[i] = near if abs(near - ideal[i]) <= reach else ideal[i]
    ranges = {name: range(cuts[i], cuts[i + 1]) for i, name in enumerate(shares)}
    return {name: ranges.get(name, range(total, total)) for name in SPLITS}


def _nearest(offsets: Sequence[int], position: int) -> int:
    """The document boundary nearest to `position`."""
    at = bisect_left(offsets, position)
    around = [int(offsets[i]) for i in (at - 1, at) if 0 <= i < len(offsets)]
    return min(around, key=lambda boundary: abs(boundary - position))
