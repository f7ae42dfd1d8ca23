"""Training, evaluation and test data: a token stream cut in three at the ends of documents."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isfinite

from stretto.errors import StrettoError, nearest
from stretto.run.config.data import DEFAULT_RATIO
from stretto.run.data.part_names import Part
from stretto.run.data.token_source import LazyArray, TokenSource

SPLITS: tuple[Part, ...] = ("train", "valid", "test")
ALL = "all"
"""The whole stream as one split, for text that a model is only evaluated on."""
_HINT = 'three numbers for train, valid and test, as in "949,50,1"'


def parse_ratio(ratio: str) -> tuple[float, float, float]:
    """Return the shares of train, valid and test in "949,50,1"; they sum to 1.

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


def split_tokens(offsets: LazyArray, ratio: str) -> dict[str, range]:
    """Return the token range of each split, in the order train, valid, test; together they cover the stream.

    `offsets` are the documents' first tokens followed by the token count. Cuts are made at the document
    boundary nearest to where the ratio puts them; a document is cut in two only if the boundary would change
    the size of a neighbouring split by more than a quarter (few, long documents).

    Raises:
        StrettoError: malformed ratio.
    """
    total = int(offsets[-1])
    shares = {name: share for name, share in zip(SPLITS, parse_ratio(ratio), strict=True) if share > 0}
    ideal = [0, *(round(sum(list(shares.values())[:i]) * total) for i in range(1, len(shares))), total]
    cuts = ideal.copy()
    for i in range(1, len(shares)):
        reach = min(ideal[i] - ideal[i - 1], ideal[i + 1] - ideal[i]) // 4
        after = bisect_left(offsets, ideal[i])
        boundaries = [int(offsets[at]) for at in (after - 1, after) if 0 <= at < len(offsets)]
        boundary = min(boundaries, key=lambda place, cut=ideal[i]: abs(place - cut))
        cuts[i] = boundary if abs(boundary - ideal[i]) <= reach else ideal[i]
    ranges = {name: range(cuts[i], cuts[i + 1]) for i, name in enumerate(shares)}
    return {name: ranges.get(name, range(total, total)) for name in SPLITS}


def splits_of(source: TokenSource, ratio: str | None) -> dict[str, range]:
    """Return the tokens of each split: those that the source keeps apart by the names of its files (test text
    is evaluated on if there is no other), else, or with a ratio, as `split_tokens`.
    """
    if ratio is not None or not source.named_splits:
        return split_tokens(source.offsets, ratio or DEFAULT_RATIO)
    ends = [0, *accumulate(source.named_splits[name][0] for name in SPLITS)]
    ranges = {name: range(*run) for name, run in zip(SPLITS, pairwise(ends), strict=True)}
    return {**ranges, "valid": ranges["valid"] or ranges["test"]}


def split_range(source: TokenSource, split: str, ratio: str | None) -> range:
    """Return the tokens of a split, or of the whole stream."""
    return range(source.size) if split == ALL else splits_of(source, ratio)[split]


def check_split(split: str, allowed: Sequence[str], field: str = "split") -> None:
    """Raise StrettoError for a name that is no split; its message begins with `field`."""
    if split not in allowed:
        close = nearest(split, allowed)
        raise StrettoError(
            f"{field} {split!r}: allowed are {', '.join(allowed)}",
            hint=f"did you mean {close}?" if close else None,
        )
