"""The device mesh: this rank's coordinates in a layout, and its process groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from stretto.errors import StrettoError
from stretto.layout.layout import Layout

# All sets of axes that a step communicates over. Their groups are created together, since creating a group is
# collective. The ranks of `tp-cp` share the tokens of a sample.
GROUPS = ("tp", "cp", "dp", "pp", "tp-cp", "cp-dp")
EXPERT_GROUPS = ("ep", "expert_tp", "expert_dp", "expert_tp-ep")
# the axes along which parameters that are split over the keys' axes are replicated
COPIES = {"tp": "cp-dp", "expert_tp-ep": "expert_dp"}


def make_group(ranks: list[int], timeout: timedelta | None) -> ProcessGroup | None:
    """Return the group of these ranks, or None on other ranks, which must also call this."""
    group = dist.new_group(ranks, timeout=timeout)
    if dist.get_rank() not in ranks:
        return None
    assert isinstance(group, ProcessGroup)
    if dist.get_backend(group) == "gloo":
        # new_group returns once this rank is connected. Without the barrier it could close the group before
        # the others are connected, and they would fail.
        group.barrier().wait()
    return group


class Mesh:
    """Process groups of one layout that contain this rank. The constructor is collective.

    An axis of size 1 has no group (None): callers then skip the collective.
    """

    def __init__(
        self, layout: Layout, device: torch.device | str = "cpu", timeout: timedelta | None = None
    ) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if layout.world != world:
            raise StrettoError(
                f"layout {layout.describe()} is for {layout.world} ranks, {world} are running",
                hint=f"start {layout.world} ranks, or change the layout",
            )
        self.layout = layout
        self.device = torch.device(device)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.coordinates = layout.coordinates(self.rank)
        self.timeout = timeout
        self._created: list[ProcessGroup] = []
        self._splits: dict[tuple[str, int], ProcessGroup | None] = {}
        self._by_ranks: dict[tuple[tuple[int, ...], ...], ProcessGroup | None] = {}
        self._groups = {axes: self._shared(self.layout.groups(axes)) for axes in (*GROUPS, *EXPERT_GROUPS)}

    def __repr__(self) -> str:
        return f"Mesh({self.layout}: rank {self.rank} of {self.layout.world}, {self.device})"

    def _shared(self, groups: list[list[int]]) -> ProcessGroup | None:
        """Return the group of `_new`, created only once for the same sets of ranks."""
        key = tuple(map(tuple, groups))
        if key not in self._by_ranks:
            self._by_ranks[key] = self._new(groups)
        return self._by_ranks[key]

    def _new(self, groups: list[list[int]], separate: bool = False) -> ProcessGroup | None:
        """Create these groups, all of one size, and return the one with this rank, or None if it is alone or
        in none. All ranks of the job create all groups in the same order, as torch requires. The group of all
        ranks is the default one, unless it must be `separate`.
        """
        if len(groups[0]) == 1:
            return None
        if len(groups[0]) == self.layout.world and not separate:
            return dist.group.WORLD
        own_group = None
        for ranks in groups:
            group = make_group(ranks, self.timeout)
            if group is not None:
                own_group = group
                self._created.append(group)
        return own_group

    def group(self, axes: str) -> ProcessGroup | None:
        """Return this rank's group over `axes` ("tp", "tp-cp", ...), or None if the rank is alone."""
        return self._groups[axes]

    def split(self, axis: str, parts: int) -> ProcessGroup | None:
        """Cut each group of `axis` into runs of `parts` neighbours, and return the run with this rank.
        Collective at first use.
        """
        key = (axis, parts)
        if key not in self._splits:
            runs = [
                ranks[i : i + parts]
                for ranks in self.layout.groups(axis)
                for i in range(0, len(ranks), parts)
            ]
            self._splits[key] = self._new(runs)
        return self._splits[key]

    def pair_group(self, holders: tuple[int, ...]) -> ProcessGroup | None:
        """Return the group of the pipeline ranks `holders` of this rank's pipeline, or None on its other
        ranks. Collective.
        """
        return self._new([[ranks[h] for h in holders] for ranks in self.layout.groups("pp")])

    def partition(self, key: Callable[[int], object], *, separate: bool = False) -> ProcessGroup | None:
        """Return the group of the ranks with this rank's key, or None if it is alone. All ranks must compute
        the same key for a rank, and all keys must have equally many ranks. Collective at first use.

        Args:
            separate: create a new group, whose messages do not queue behind those of other groups with the
                same ranks: on accelerators each group has a separate stream. Collective at each use.
        """
        groups = dict[object, list[int]]()
        for rank in range(self.layout.world):
            groups.setdefault(key(rank), []).append(rank)
        rows = list(groups.values())
        return self._new(rows, separate) if separate else self._shared(rows)

    def size(self, axes: str) -> int:
        """Return the number of ranks along `axes`: "tp", "ep", or several, as in "expert_tp-ep"."""
        return self.layout.size(axes)

    def index(self, axes: str) -> int:
        """Return this rank's index along `axes`."""
        return self.layout.index(self.rank, axes)

    def copies(self, over: str) -> ProcessGroup | None:
        """Return the ranks that hold the same parts of parameters split over the axes `over`, and process
        different tokens: their gradients are summed.
        """
        return self.group(COPIES[over])

    def close(self) -> None:
        """Destroy the groups; `verify` builds many meshes in one process."""
        for group in self._created:
            dist.destroy_process_group(group)
        # drop the references: a group that is referenced at interpreter exit joins its threads only then
        for groups in (self._created, self._groups, self._by_ranks, self._splits):
            groups.clear()
