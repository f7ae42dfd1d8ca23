"""Hierarchical reduction of one flat gradient over the ranks that hold copies of its parameters.

Level by level of `ShardGroups`: reduce-scatters over ranks with different parts, then an all-reduce over
ranks with the same part. Only the first starts immediately; each of the others starts when the reduction is
waited for.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.device import on_accelerator
from stretto.engine.parallel.collectives import Pending, start_scatter_sum, start_sum
from stretto.engine.parallel.mesh import COPIES, Mesh
from stretto.layout.shards import ShardSizes


@dataclass(frozen=True, kw_only=True)
class ShardGroups:
    """The groups over which parameters, gradients and states of one kind are sharded and reduced.

    Attributes:
        sizes: shard sizes, among `copies` ranks with the same parameters.
        rank: index of this process among them.
        levels: for each digit of the index (`ShardSizes`), the ranks that differ only in it: shards of
            parameters, of gradients within them, of states within these, and ranks with the same states.
        gathers: the ranks of the first level, for the gathers of parameters. On an accelerator it is a
            separate group, so that weights prefetched in the backward do not queue behind its reductions.
        copied: all ranks that hold a copy.
        holders: ranks of this pipeline rank that together hold one copy of parameters and states.
        counted: the same over all pipeline ranks.
    """

    sizes: ShardSizes = field(default_factory=ShardSizes)
    copies: int = 1
    rank: int = 0
    levels: tuple[ProcessGroup | None, ...] = (None, None, None, None)
    gathers: ProcessGroup | None = None
    copied: ProcessGroup | None = None
    holders: ProcessGroup | None = None
    counted: ProcessGroup | None = None

    def span(self, size: int, level: int) -> tuple[int, int]:
        """Return start and stop of this rank's part of `size` elements, at levels 0 (all) to 3 (states)."""
        return self.sizes.span(size, self.rank, self.copies, level)


def shard_groups(mesh: Mesh, over: str, sizes: ShardSizes) -> ShardGroups:
    """Create the groups for parameters that are split over `over` ("tp", or "expert_tp-ep"). Collective.

    Args:
        sizes: sizes for dense parameters; experts may have fewer copies and use sizes that divide them.
    """
    rows = mesh.layout.groups(COPIES[over])
    copies = len(rows[0])
    sizes = sizes.for_copies(copies)
    # ascending, as torch orders the ranks of a group
    place = {rank: (row, at) for row, ranks in enumerate(rows) for at, rank in enumerate(sorted(ranks))}

    def digits(rank: int) -> tuple[int, ...]:
        return sizes.digits(place[rank][1], copies)

    def others(level: int, rank: int) -> tuple[int, ...]:
        digits_of_rank = digits(rank)
        return (place[rank][0], *digits_of_rank[:level], *digits_of_rank[level + 1 :])

    levels = tuple(
        mesh.partition(lambda rank, level=level: others(level, rank)) if count > 1 else None
        for level, count in enumerate(sizes.levels(copies))
    )
    gathers = levels[0]
    if sizes.levels(copies)[0] > 1 and on_accelerator(mesh.device):
        gathers = mesh.partition(lambda rank: others(0, rank), separate=True)
    return ShardGroups(
        sizes=sizes,
        copies=copies,
        rank=place[mesh.rank][1],
        levels=levels,
        gathers=gathers,
        copied=mesh.copies(over),
        holders=mesh.partition(lambda rank: (mesh.layout.index(rank, "pp"), digits(rank)[3])),
        counted=mesh.partition(lambda rank: digits(rank)[3]),
    )


def one_group(group: ProcessGroup | None) -> ShardGroups:
    """Return the groups of plain data parallelism: copies in one group, each with all states."""
    if group is None:
        return ShardGroups()
    return ShardGroups(
        sizes=ShardSizes(),
        copies=group.size(),
        rank=group.rank(),
        levels=(None, None, None, group),
        copied=group,
    )


Steps = Generator[Pending, None, Tensor]


class Reduction:
    """A reduction in progress: a chain of collectives, each started when the previous one is done."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._pending: Pending | None = None
        self._result: Tensor | None = None
        self._next()

    def finish(self) -> Tensor:
        """Wait, and return this rank's part of the sum."""
        while self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
            del pending  # frees its tensors before the next begins
            self._next()
        assert self._result is not None
        return self._result

    def _next(self) -> None:
        try:
            self._pending = next(self._steps)
        except StopIteration as end:
            self._pending, self._result = None, end.value


def reduce_to(x: Tensor, groups: ShardGroups, first: int, last: int, out: Tensor | None = None) -> Steps:
    """Sum x, this rank's part at level `first`, and return its part at level `last`; `last` 4 sums over all
    copies.

    Args:
        out: memory for the result; by default that of x if nothing is split, otherwise new memory.
    """
    for level in range(first, min(last, 3)):
        group = groups.levels[level]
        if group is not None:
            pieces = x.view(group.size(), -1)
            target = (
                out
                if out is not None
                and all(groups.levels[second] is None for second in range(level + 1, min(last, 3)))
                else None
            )
            x, work = start_scatter_sum(pieces, group, target)
            yield work
            del pieces, work
    if last == 4 and groups.levels[3] is not None:
        yield start_sum(x, groups.levels[3])
    if out is not None and not same_place(out, x):
        out.copy_(x)
        return out
    return x


def same_place(a: Tensor, b: Tensor) -> bool:
    """True if two tensors start at the same element of the same storage, allocated or not."""
    first, second = a.untyped_storage(), b.untyped_storage()
    return first._cdata == second._cdata and a.storage_offset() == b.storage_offset()


def reduce_to_first(x: Tensor, group: ProcessGroup) -> Steps:
    """Sum x on the group's first rank, the parameter server; x is unchanged on other ranks."""
    arriving = [torch.empty_like(x) for _ in range(group.size())] if group.rank() == 0 else []
    yield group.gather([arriving] if arriving else [], [x])
    for other in arriving[1:]:
        x.add_(other)
    return x
