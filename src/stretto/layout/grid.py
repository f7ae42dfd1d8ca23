"""Which ranks work together: the arithmetic of a grid of ranks.

A grid gives every axis a size and the axes an order, the first varying fastest over ranks. A group over some
axes is the set of ranks that agree on all other axes. The stride arithmetic is that of Megatron's
RankGenerator (masked orthogonal groups).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from stretto.errors import StrettoError


def offsets(axes: Iterable[tuple[int, int]]) -> list[int]:
    """Every sum of i * stride, i < size, over (size, stride) axes; the first axis varies fastest."""
    sums = [0]
    for size, stride in axes:
        if size > 1:
            sums = [s + i for i in range(0, size * stride, stride) for s in sums]
    return sums


@dataclass(frozen=True)
class RankGrid:
    """Sizes of the axes in order, fastest first; `offset` is the grid's first rank."""

    sizes: Mapping[str, int]
    offset: int = 0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance in ranks between neighbours along each axis."""
        found, stride = {}, 1
        for axis, size in self.sizes.items():
            found[axis] = stride
            stride *= size
        return found

    def _split(self, axes: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(size, stride) of the named axes, and of all others; `axes` as in "tp-dp"."""
        names = axes.split("-")
        for name in names:
            if name not in self.sizes:
                raise StrettoError(
                    f"group {axes!r} names axis {name!r}", hint=f"axes here are {', '.join(self.sizes)}"
                )
        pairs = {axis: (size, self.strides[axis]) for axis, size in self.sizes.items()}
        return [pairs[a] for a in pairs if a in names], [pairs[a] for a in pairs if a not in names]

    def groups(self, axes: str) -> list[list[int]]:
        """All groups over `axes` ("tp", "tp-dp", ...); every rank is in exactly one."""
        masked, unmasked = self._split(axes)
        inner = offsets(masked)
        return [[start + i for i in inner] for start in (self.offset + o for o in offsets(unmasked))]

    def group(self, rank: int, axes: str) -> list[int]:
        """The group over `axes` that holds `rank`."""
        masked, _ = self._split(axes)
        here = rank - self.offset
        start = here - sum(here // stride % size * stride for size, stride in masked)
        return [self.offset + start + i for i in offsets(masked)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` sits on every axis."""
        here = rank - self.offset
        return {axis: here // self.strides[axis] % size for axis, size in self.sizes.items()}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at the given coordinates; axes left out are 0."""
        return self.offset + sum(self.strides[axis] * at for axis, at in coordinates.items())
