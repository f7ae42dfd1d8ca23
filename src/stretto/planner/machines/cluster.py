"""Devices in nodes, nodes in a cluster, and which part of a group of ranks shares a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf, prod
from typing import Literal, NamedTuple

from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.planner.machines.device import Device

Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "send"]


@dataclass(frozen=True)
class NetworkLink:
    """A connection between devices, per device and direction.

    Attributes:
        bandwidth: bytes/s.
        latency: seconds of an empty message.
        kind: name of the technology, as "NVLink 3", "InfiniBand HDR"; constants of `planner.time` depend on
            it and on the device.
        sharp: reductions are done in the switch (NVLS, SHARP).
    """

    bandwidth: float
    latency: float
    kind: str = ""
    sharp: bool = False


@dataclass(frozen=True, kw_only=True)
class HostMachine:
    """The host of a node, whose memory and files take what is offloaded from devices.

    Attributes:
        memory: bytes.
        bandwidth: bandwidth of all its memory, bytes/s.
        link: between the host and one device, bytes/s in one direction.
        disk: bytes of files.
        disk_bandwidth: bytes/s of files.
    """

    memory: float = 1e12
    bandwidth: float = 2e11
    link: float = 2e10
    disk: float = 7e12
    disk_bandwidth: float = 6e9

    @property
    def stated_memory(self) -> float:
        """Bytes of its memory, or infinite if that is the default."""
        return inf if self.memory == HostMachine.memory else self.memory


@dataclass(frozen=True, eq=False, kw_only=True)
class Cluster:
    """Equal devices in equal nodes. Compared by identity, so that it can be a key of caches.

    Attributes:
        node: devices of a node.
        nodes: number of nodes, or None for as many as requested.
        last: devices of the last node, or None for all of it.
        inner: the link inside a node.
        outer: the link between nodes; of the node's bandwidth, one device's share.
        computing: ranks of a node that can compute at once (cores of a CPU), or None for all.
        tables: measured collectives (`stretto calibrate`) in place of the constants of `planner.time`: by
            kind, rows of ranks, local ranks, bytes, seconds.
        price: dollars an hour of one device, or None for the device's own.
        correction: median of measured over predicted seconds of earlier runs here.
        spread: by source of uncertainty (`planner.estimate.SOURCES`), the relative half width that its
            measurements add, since they varied, were few, or shared the machine with other processes.
        host: the host of every node; a typical one by default.
    """

    name: str
    device: Device
    node: int
    inner: NetworkLink
    outer: NetworkLink
    nodes: int | None = None
    last: int | None = None
    computing: int | None = None
    tables: Mapping[str, object] = field(default_factory=dict[str, object])
    price: float | None = None
    correction: float = 1.0
    spread: Mapping[str, float] = field(default_factory=dict[str, float])
    notes: str = ""
    host: HostMachine = field(default_factory=HostMachine)

    @property
    def devices(self) -> int | None:
        """All devices, or None for as many as requested."""
        if self.nodes is None:
            return None
        return (self.nodes - 1) * self.node + (self.node if self.last is None else self.last)

    def sized(self, devices: int) -> Cluster:
        """This cluster with this number of devices, on as few nodes as possible; the last may be partial.

        Raises:
            StrettoError: it has fewer.
        """
        if self.devices is not None and devices > self.devices:
            raise StrettoError(
                f"cluster {self.name!r} has {self.devices} devices, not {devices}",
                hint=f"at most {self.devices}",
            )
        if devices <= self.node:
            return replace(self, node=devices, nodes=1, last=None)
        return replace(self, nodes=-(-devices // self.node), last=devices % self.node or None)


class NodeGroup(NamedTuple):
    """Ranks that communicate, at the same time as the other groups of their axis.

    Attributes:
        ranks: their number.
        local: number of ranks that share a node; 1 if each is on another node.
    """

    ranks: int
    local: int

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return -(-self.ranks // self.local)


@lru_cache(maxsize=4096)
def group_of(layout: Layout, axes: str, node: int) -> NodeGroup:
    """The group over `axes` ("tp", "cp-dp", "ep", "expert_dp", ...) that spans the most nodes, with `node`
    ranks a node, its ranks shared evenly by these nodes. All groups span as many, unless a node ends inside
    one of several.
    """
    grid, names = layout.grid_of(axes)
    sizes = (*grid.strides.values(), grid.world)
    if grid.world <= node or all(size % node == 0 or node % size == 0 for size in sizes):
        members = [(grid.sizes[name], grid.strides[name]) for name in filter(None, names.split("-"))]
        local = prod(min(size, max(1, node // stride)) for size, stride in members)
        return NodeGroup(prod(size for size, _ in members), local)
    groups = layout.groups(axes)
    offsets = [rank - groups[0][0] for rank in groups[0]]
    starts = {(group[0] - layout.offset) % node for group in groups}
    spans = max(len({(start + offset) // node for offset in offsets}) for start in starts)
    return NodeGroup(len(offsets), -(-len(offsets) // spans))
