"""The shards of flat tensors on data-parallel ranks: of parameters, gradients and optimiser states.

Data-parallel ranks have the same parameters and different tokens, and are numbered 0 to copies - 1.
Parameters are sharded over `parameters` consecutive ranks, gradients over `gradients`, optimiser states over
`states`; each size divides the next (AMSP, Chen et al. 2023). A rank's number therefore has four digits
(`levels`): the first is the index of its shard of the parameters, the first two give its shard of the
gradients, and the first three its shard of the states, each within the previous one. Ranks that differ only
in the last digit have the same shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Mode = Literal["server", "ddp", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class ShardSizes:
    """Numbers of ranks over which the parameters, gradients and optimiser states of a copy are sharded."""

    parameters: int = 1
    gradients: int = 1
    states: int = 1

    @property
    def unsharded(self) -> bool:
        """True if no tensor is sharded."""
        return self.states == 1

    def levels(self, copies: int) -> tuple[int, int, int, int]:
        """Return the sizes of the four digits, the first varying fastest."""
        p = self.parameters
        g = self.gradients
        s = self.states
        assert g % p == s % g == copies % s == 0, (self, copies)
        return p, g // p, s // g, copies // s

    def digits(self, rank: int, copies: int) -> tuple[int, int, int, int]:
        """Return the four digits of a data-parallel rank."""
        a, b, c, d = self.levels(copies)
        return rank % a, rank // a % b, rank // (a * b) % c, rank // (a * b * c) % d

    def span(self, size: int, rank: int, copies: int, level: int) -> tuple[int, int]:
        """Return start and stop of the rank's shard of `size` elements.

        Args:
            size: a multiple of the number of shards, from `padded`.
            level: 1 for parameters, 2 for gradients, 3 for states.
        """
        start, length = 0, size
        for count, digit in list(zip(self.levels(copies), self.digits(rank, copies), strict=True))[:level]:
            assert length % count == 0, (size, self)
            length //= count
            start += digit * length
        return start, start + length

    def for_copies(self, copies: int) -> ShardSizes:
        """Return the largest sizes that divide these and `copies`, for parameters such as experts with other
        numbers of copies.
        """
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
    """Return the shard sizes of a mode over `copies` data-parallel ranks.

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
    """Return the smallest size >= `size` that `shards` ranks can share in multiples of `unit`."""
    step = shards * unit
    return -(-size // step) * step


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offsets and sizes of the boxes that cover elements [start, stop) of a tensor in row-major order.

    A tensor of n dimensions needs at most 2 n - 1 boxes.
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
