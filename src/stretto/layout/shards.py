"""Which part of a flat tensor each data-parallel rank holds: of parameters, gradients and optimiser states.

Data-parallel ranks, which hold the same parameters and see different tokens, are numbered 0 to copies - 1.
Parameters are split over runs of `parameters` of them, gradients over runs of `gradients`, optimiser states
over runs of `states`; each size divides the next (AMSP, Chen et al. 2023). A rank's number therefore has four
digits, `levels`: the first says which shard of the parameters the rank holds, the first two which shard of
the gradients, the first three which shard of the states, each shard inside the one before it. Ranks that
differ in the last digit alone hold the same shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Mode = Literal["server", "ddp", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class ShardSizes:
    """Ranks that share the parameters, the gradients and the optimiser states of one copy of the model."""

    parameters: int = 1
    gradients: int = 1
    states: int = 1

    @property
    def unsharded(self) -> bool:
        """True if nothing is split."""
        return self.states == 1

    def levels(self, copies: int) -> tuple[int, int, int, int]:
        """Values that the four digits take, the first changing fastest."""
        p = self.parameters
        g = self.gradients
        s = self.states
        assert g % p == s % g == copies % s == 0, (self, copies)
        return p, g // p, s // g, copies // s

    def digits(self, rank: int, copies: int) -> tuple[int, int, int, int]:
        """The four digits of one of the copies' ranks."""
        a, b, c, d = self.levels(copies)
        return rank % a, rank // a % b, rank // (a * b) % c, rank // (a * b * c) % d

    def span(self, size: int, rank: int, copies: int, level: int) -> tuple[int, int]:
        """Start and stop of what the rank holds of `size` elements: of parameters (level 1), gradients (2) or
        states (3); `padded` sizes alone divide.
        """
        start, length = 0, size
        for count, digit in list(zip(self.levels(copies), self.digits(rank, copies), strict=True))[:level]:
            assert length % count == 0, (size, self)
            length //= count
            start += digit * length
        return start, start + length

    def for_copies(self, copies: int) -> ShardSizes:
        """The largest sizes that divide both, for parameters with other `copies`, such as experts."""
        states = _common(self.states, copies)
        gradients = _common(self.gradients, states)
        return ShardSizes(_common(self.parameters, gradients), gradients, states)


def _common(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def shard_sizes(
    mode: Mode,
    copies: int,
    parameters: int | None = None,
    gradients: int | None = None,
    states: int | None = None,
) -> ShardSizes:
    """The shard sizes of a mode over `copies` data-parallel ranks.

    `states` defaults to all copies, `gradients` to `states`, `parameters` to `gradients`.
    """
    if mode in ("server", "ddp"):
        return ShardSizes()
    states = states or copies
    if mode == "zero1":
        return ShardSizes(1, 1, states)
    gradients = gradients or states
    if mode == "zero2":
        return ShardSizes(1, gradients, states)
    return ShardSizes(parameters or gradients, gradients, states)


def padded(size: int, shards: int, unit: int = 1) -> int:
    """Return the smallest size >= `size` of which each of `shards` ranks holds a whole number of units."""
    step = shards * unit
    return -(-size // step) * step


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the boxes that elements [start, stop) of a tensor fill, counted row by row; at
    most 2 dimensions - 1.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row, inner = prod(shape[1:]), shape[1:]
    (first, at), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _rows(first, boxes(inner, at, end))
    parts = _rows(first, boxes(inner, at, row)) if at else []
    first += bool(at)
    if first < last:
        parts.append(((first, *[0] * len(inner)), (last - first, *inner)))
    return parts + (_rows(last, boxes(inner, 0, end)) if end else [])


def _rows(
    row: int, inner: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in inner]
