"""The device mesh: this rank's place in a layout, and its process groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from stretto.errors import StrettoError
from stretto.layout.layout import Layout

# Every set of axes that some part of a step communicates over; made at once, since making a group is
# collective. `tp-cp` shares the tokens of a sample, `tp-pp` the dense parameters of a replica.
GROUPS = ("tp", "cp", "dp", "pp", "tp-pp", "tp-cp", "cp-dp")
COPIES = {
    "tp": "cp-dp",
    "expert_tp-ep": "expert_dp",
}  # ranks with the same parameters, for parameters split over these axes
EXPERT_GROUPS = ("ep", "expert_tp", "expert_dp", "expert_tp-ep", "expert_tp-ep-pp")


def make_group(ranks: list[int], timeout: timedelta | None) -> ProcessGroup | None:
    """The group of these ranks; None on other ranks, which must call this too."""
    made = dist.new_group(ranks, timeout=timeout)
    if dist.get_rank() not in ranks:
        return None
    assert isinstance(made, ProcessGroup)
    if dist.get_backend(made) == "gloo":
        # new_group returns once this side is connected. If this rank closed the group before the others are
        # connected, they would see it as dead.
        made.barrier().wait()
    return made


class Mesh:
    """Process groups of one layout, as seen from this rank.

    Must be built on all ranks of the default group at the same time. An axis of size 1 has no group: callers
    skip the collective.
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
        self._made: list[ProcessGroup] = []
        self._splits: dict[tuple[str, int], ProcessGroup | None] = {}
        self._known: dict[tuple[tuple[int, ...], ...], ProcessGroup | None] = {}
        self._groups = {axes: self._shared_group(axes) for axes in (*GROUPS, *EXPERT_GROUPS)}

    def __repr__(self) -> str:
        return f"Mesh({self.layout}: rank {self.rank} of {self.layout.world}, {self.device})"

    def _shared_group(self, axes: str) -> ProcessGroup | None:
        """The group over `axes`; sets of axes with the same ranks share one group."""
        groups = self.layout.groups(axes)
        key = tuple(map(tuple, groups))
        if key not in self._known:
            self._known[key] = self._group(groups)
        return self._known[key]

    def _group(self, groups: list[list[int]]) -> ProcessGroup | None:
        """The one of these groups with this rank. All ranks of the job make all groups, in the same order, as
        torch requires.
        """
        if len(groups[0]) == 1:
            return None
        if len(groups[0]) == self.layout.world:
            return dist.group.WORLD
        mine = None
        for ranks in groups:
            made = make_group(ranks, self.timeout)
            if made is not None:
                mine = made
                self._made.append(made)
        return mine

    def group(self, axes: str) -> ProcessGroup | None:
        """The group over `axes` ("tp", "tp-pp", ...) that holds this rank; None when it is this rank
        alone.
        """
        return self._groups[axes]

    def split(self, axis: str, parts: int) -> ProcessGroup | None:
        """The group of `axis` cut into runs of `parts` neighbours: the run that holds this rank.
        Collective at first use.
        """
        key = (axis, parts)
        if key not in self._splits:
            runs = [
                ranks[i : i + parts]
                for ranks in self.layout.groups(axis)
                for i in range(0, len(ranks), parts)
            ]
            self._splits[key] = self._group(runs)
        return self._splits[key]

    def pair_group(self, holders: tuple[int, ...]) -> ProcessGroup | None:
        """Ranks at the pipeline places `holders` of each pipeline; None on ranks at other places.
        Collective.
        """
        return self._group([[ranks[h] for h in holders] for ranks in self.layout.groups("pp")])

    def partition(self, key: Callable[[int], object]) -> ProcessGroup | None:
        """The group of the ranks with this rank's key; None when it is this rank alone. The key of a rank
        must be the same on every rank, and all keys must have equally many ranks. Collective at first use.
        """
        groups = dict[object, list[int]]()
        for rank in range(self.layout.world):
            groups.setdefault(key(rank), []).append(rank)
        lists = list(groups.values())
        known = tuple(map(tuple, lists))
        if known not in self._known:
            self._known[known] = self._group(lists)
        return self._known[known]

    def size(self, axes: str) -> int:
        """Number of ranks along `axes`: "tp", "ep", or several, as in "expert_tp-ep"."""
        return self.layout.size(axes)

    def index(self, axes: str) -> int:
        """This rank's place along `axes`."""
        return self.layout.index(self.rank, axes)

    def spread(self) -> dict[str, ProcessGroup | None]:
        """For the axes over which parameters are split, all ranks that hold different parts of one copy."""
        return {"tp": self.group("tp-pp"), "expert_tp-ep": self.group("expert_tp-ep-pp")}

    def copies(self, over: str) -> ProcessGroup | None:
        """For parameters split over the axes `over`, the ranks that hold the same parts and see other tokens:
        their gradients are summed.
        """
        return self.group(COPIES[over])

    def close(self) -> None:
        """Destroy the groups; `verify` builds many meshes in one process."""
        for group in self._made:
            dist.destroy_process_group(group)
        # a group that is still referenced would join its threads at or after interpreter exit
        for kept in (self._made, self._groups, self._known, self._splits):
            kept.clear()
