"""Devices in nodes, nodes in a cluster, and which part of a group of ranks shares a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.planner.machines.device import Device

Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "send"]


@dataclass(frozen=True)
class Link:
    """What connects devices, seen by one device, one direction.

    Attributes:
        bandwidth: bytes/s.
        latency: seconds of a message of no size.
        kind: as "NVLink 3", "InfiniBand HDR"; constants of `planner.time` go by it and by the device.
        sharp: reductions are done in the switch (NVLS, SHARP).
    """

    bandwidth: float
    latency: float
    kind: str = ""
    sharp: bool = False


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host of a node, whose memory and files keep what devices cannot.

    Attributes:
        memory: bytes.
        bandwidth: of all its memory, bytes/s.
        link: between the host and one device, bytes/s in one direction.
        disk: bytes of files.
        disk_bandwidth: bytes/s of them.
    """

    memory: float = 1e12
    bandwidth: float = 2e11
    link: float = 2e10
    disk: float = 7e12
    disk_bandwidth: float = 6e9


@dataclass(frozen=True, eq=False, kw_only=True)
class Cluster:
    """Equal devices in equal nodes. Equal only to itself, so that it may be a key of caches.

    Attributes:
        node: devices of a node.
        nodes: how many there are; None: as many as asked for.
        inner: the link inside a node.
        outer: that between nodes, a device's share of its node's.
        computing: ranks of a node that can compute at once (cores of a CPU); None: all.
        tables: measured collectives (`stretto calibrate`) in place of the constants of `planner.time`: by
            kind, rows of ranks, local ranks, bytes, seconds.
        price: dollars an hour of one device; None: the device's.
        correction: measured over predicted seconds of earlier runs here, their median.
        host: of every node; where nothing is known of it, a usual one.
    """

    name: str
    device: Device
    node: int
    inner: Link
    outer: Link
    nodes: int | None = None
    computing: int | None = None
    tables: Mapping[str, object] = field(default_factory=dict[str, object])
    price: float | None = None
    correction: float = 1.0
    notes: str = ""
    host: Host = field(default_factory=Host)

    @property
    def devices(self) -> int | None:
        """All of them; None: as many as asked for."""
        return None if self.nodes is None else self.nodes * self.node

    def sized(self, devices: int) -> Cluster:
        """This cluster with so many devices: whole nodes, or a part of one.

        Raises:
            StrettoError: it has fewer.
        """
        if self.devices is not None and devices > self.devices:
            raise StrettoError(
                f"cluster {self.name!r} has {self.devices} devices, not {devices}",
                hint=f"at most {self.devices}",
            )
        if devices <= self.node:
            return replace(self, node=devices, nodes=1)
        return replace(self, nodes=-(-devices // self.node))


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, all at once with the groups beside them.

    Attributes:
        ranks: how many.
        local: of them on each node; 1: each on a node of its own.
    """

    ranks: int
    local: int

    @property
    def nodes(self) -> int:
        """Nodes that the group is on."""
        return -(-self.ranks // self.local)


@lru_cache(maxsize=4096)
def group_of(layout: Layout, axes: str, node: int) -> Group:
    """The group of rank 0 over `axes` ("tp", "cp-dp", "ep", "expert_dp", ...) with so many ranks a node."""
    members = layout.group(0, axes)
    return Group(len(members), sum(rank < node for rank in members))
