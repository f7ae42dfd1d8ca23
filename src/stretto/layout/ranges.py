"""Ranks as text."""

from __future__ import annotations

from collections.abc import Sequence


def rank_ranges(ranks: Sequence[int]) -> list[str]:
    """Return ascending ranks as ranges: 0, 1, 2, 3, 7, 8 are "0-3" and "7-8"."""
    starts = [at for at in range(len(ranks)) if at == 0 or ranks[at] != ranks[at - 1] + 1]
    return [
        str(ranks[start]) if end - start == 1 else f"{ranks[start]}-{ranks[end - 1]}"
        for start, end in zip(starts, [*starts[1:], len(ranks)], strict=True)
    ]
