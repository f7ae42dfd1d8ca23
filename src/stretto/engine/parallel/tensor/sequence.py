"""The positions of a sample on a rank when the sequence is split over context- and tensor-parallel ranks.

The cost of causal attention at a position grows with the number of positions before it. To balance it, the
sequence is cut into 2 cp chunks, and context-parallel rank i holds chunks i and 2 cp - 1 - i (zigzag order).
With sequence parallelism (Korthikanti et al. 2022, section 4.2.2) a tensor-parallel rank holds, outside of
attention and MLP, a contiguous part of its context-parallel rank's positions. If the length does not divide,
the sequence is padded at its end, to which no real position attends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto.engine.device import moved

if TYPE_CHECKING:
    from stretto.engine.parallel.mesh import Mesh


def zigzag(length: int, cp: int, index: int) -> Tensor:
    """Return the positions of rank `index` of `cp`, [length / cp], int64, ascending; `length` must divide
    into 2 cp chunks.
    """
    if cp == 1:
        return torch.arange(length)
    chunk = length // (2 * cp)
    first, second = index * chunk, (2 * cp - 1 - index) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(second, second + chunk)])


@dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """One rank's positions of samples of `length` tokens.

    Args:
        cp, cp_index: number of context-parallel ranks, and this rank's index among them.
        tp, tp_index: the same for tensor-parallel ranks, which split the sequence further outside of
            attention and MLP; 1 and 0 without sequence parallelism.
    """

    length: int
    cp: int = 1
    cp_index: int = 0
    tp: int = 1
    tp_index: int = 0

    @classmethod
    def of(cls, mesh: Mesh, length: int, sequence_parallel: bool) -> SequenceSplit:
        """Return this rank's split of samples of `length` tokens."""
        return cls(
            length=length,
            cp=mesh.size("cp"),
            cp_index=mesh.index("cp"),
            tp=mesh.size("tp") if sequence_parallel else 1,
            tp_index=mesh.index("tp") if sequence_parallel else 0,
        )

    @property
    def complete(self) -> bool:
        """True if this rank holds exactly all positions, in order."""
        return self.cp == 1 and self.tp == 1

    @cached_property
    def padded(self) -> int:
        """Tokens of a padded sample: the next length that divides evenly over all ranks."""
        unit = (2 * self.cp if self.cp > 1 else 1) * self.tp
        return -(-self.length // unit) * unit

    @cached_property
    def positions(self) -> Tensor:
        """Positions of this context-parallel rank [padded / cp], int64, ascending; `length` and above are
        padding.
        """
        return zigzag(self.padded, self.cp, self.cp_index)

    @cached_property
    def shard(self) -> Tensor:
        """Positions of this rank outside of attention and MLP, where the sequence is also split over tp
        [padded / cp / tp]. Equal to `positions` without sequence parallelism.
        """
        return self.positions.chunk(self.tp)[self.tp_index]

    def take(self, x: Tensor, dim: int, fill: int | float) -> Tensor:
        """Return this context-parallel rank's positions of x, whose dimension `dim` has all `length`
        positions; padding is `fill`.
        """
        if self.cp == 1 and self.padded == self.length:
            return x
        if self.padded > self.length:
            ends = [*x.shape]
            ends[dim] = self.padded - self.length
            x = torch.cat([x, x.new_full(ends, fill)], dim)
        return x.index_select(dim, moved(self.positions, x.device))
