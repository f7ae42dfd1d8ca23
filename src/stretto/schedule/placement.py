"""Which rank holds which stage."""

from __future__ import annotations


def linear(ranks: int) -> tuple[int, ...]:
    """One stage a rank, in order."""
    return tuple(range(ranks))


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s on rank s % ranks: the model goes round the ranks `chunks` times."""
    return tuple(range(ranks)) * chunks
