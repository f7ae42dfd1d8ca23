"""Which samples of a global batch are a rank's."""

from __future__ import annotations


def own_part(count: int, rank: int, world: int) -> tuple[int, int]:
    """(start, stop) of a rank's samples of `count`: as even as they go, the first ranks one more."""
    each, more = divmod(count, world)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)
