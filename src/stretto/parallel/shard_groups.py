"""The ranks that a rank shares parameters, gradients and optimiser states with."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

from stretto.layout.shards import ShardSizes
from stretto.parallel.mesh import COPIES, Mesh


@dataclass(frozen=True)
class ShardGroups:
    """Of the parameters that are spread over some axes.

    Attributes:
        sizes: of the parts, among `copies` ranks with the same parameters.
        rank: this one's number among them.
        levels: for each digit of the number (`ShardSizes`), the ranks that differ in it alone: parts of
            parameters, of gradients within them, of states within these, and ranks with the same states.
        copied: all of the copies.
        holders: ranks of this pipeline place that hold one copy of parameters and states together.
        counted: ranks of all pipeline places that do.
    """

    sizes: ShardSizes = field(default_factory=ShardSizes)
    copies: int = 1
    rank: int = 0
    levels: tuple[ProcessGroup | None, ...] = (None, None, None, None)
    copied: ProcessGroup | None = None
    holders: ProcessGroup | None = None
    counted: ProcessGroup | None = None

    def span(self, size: int, level: int) -> tuple[int, int]:
        """Start and stop of this rank's part of `size` elements, at levels 0 (all) to 3 (states)."""
        return self.sizes.span(size, self.rank, self.copies, level)


def shard_groups(mesh: Mesh, over: str, sizes: ShardSizes) -> ShardGroups:
    """The groups of parameters that are spread over `over` ("tp", or "expert_tp-ep"). Collective.

    Args:
        sizes: for dense parameters; experts, of which there may be fewer copies, take what divides.
    """
    rows = mesh.layout.groups(COPIES[over])
    copies = len(rows[0])
    sizes = sizes.for_copies(copies)
    # ascending, as torch orders the ranks of a group
    place = {rank: (row, at) for row, ranks in enumerate(rows) for at, rank in enumerate(sorted(ranks))}

    def digits(rank: int) -> tuple[int, ...]:
        return sizes.digits(place[rank][1], copies)

    def others(level: int, rank: int) -> tuple[int, ...]:
        found = digits(rank)
        return (place[rank][0], *found[:level], *found[level + 1 :])

    levels = tuple(
        mesh.partition(lambda rank, level=level: others(level, rank)) if count > 1 else None
        for level, count in enumerate(sizes.levels(copies))
    )
    return ShardGroups(
        sizes,
        copies,
        place[mesh.rank][1],
        levels,
        mesh.copies(over),
        mesh.partition(lambda rank: (mesh.layout.index(rank, "pp"), digits(rank)[3])),
        mesh.partition(lambda rank: digits(rank)[3]),
    )


def one_group(group: ProcessGroup | None) -> ShardGroups:
    """Copies in one group, each with all of the states."""
    if group is None:
        return ShardGroups()
    return ShardGroups(ShardSizes(), group.size(), group.rank(), (None, None, None, group), group)
