"""Time of collectives, by algorithm and by level: inside nodes, and between them.

Rings and trees as in NCCL. A ring over several nodes uses the network cards of all its ranks, so that the
slower of the two levels limits it; a tree has fewer steps. What was measured on the cluster itself
(`Cluster.tables`) replaces the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil, hypot, log2, sqrt
from typing import Any

from stretto.planner.machines.cluster import Cluster, Collective, NetworkLink, NodeGroup
from stretto.planner.time.constants import chip, constants
from stretto.planner.time.measured import interpolate

# of a card's bandwidth in a ring over any number of nodes; assumed, since the largest published figure (0.34,
# `data/collectives_chosen.yaml`) is of 384 nodes
_LEAST_SHARE = 0.3


@dataclass(frozen=True)
class SwitchReduction:
    """All-reduce in the switch (NVLS).

    Attributes:
        ranks: the fewest ranks for which it is used.
        base: seconds of an empty one.
        pipe: seconds that pipelining adds, by the square root of the bytes.
        share: rate of the whole tensor over the link's bandwidth.
    """

    ranks: int
    base: float
    pipe: float
    share: float


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Constants of collectives on one link; `data/collectives_*.yaml` name the sources of the constants.

    Attributes:
        base: seconds of a collective of no bytes and no steps.
        step: seconds of one step of a ring or a tree.
        pipe: seconds by the square root of the bytes: the cost of filling and draining pipelines of the best
            depth.
        share: share of the link's bandwidth that a large ring reaches.
        fewer: decrease of that share, divided by the ranks.
        spread: decrease of that share of a ring between nodes, with every doubling of the nodes beyond two.
        crowded: rate of rings between nodes if several groups share each node, over that of one.
        send: seconds of an empty message in addition to the link's latency.
        send_share: share of the bandwidth that a large message reaches.
        exchange: share of the bandwidth that a rank's messages to all others reach.
        mesh: each pair of devices has a link of its own, so that few ranks have few links.
        by_ranks: share by number of ranks if the wiring makes it uneven, for nodes of `wired` devices.
        switch: reductions in the switch, if the link has them.
    """

    base: float
    step: float
    pipe: float
    share: float
    fewer: float
    spread: float
    crowded: float
    send: float
    send_share: float
    exchange: float
    mesh: bool
    by_ranks: Mapping[int, float]
    wired: int
    switch: SwitchReduction | None

    def ring(self, link: NetworkLink, ranks: int, node: int) -> float:
        """Bytes/s that one rank forwards in a large ring of this size."""
        share = self.share - self.fewer / ranks
        if self.by_ranks and node == self.wired:
            share = self.by_ranks.get(ranks, share)
        if self.mesh and ranks < node:
            share *= (ranks - 1) / (node - 1)
        return share * link.bandwidth

    def across(self, link: NetworkLink, nodes: int, ring: bool = True) -> float:
        """Bytes/s of one network card in a large ring, or tree, over this many nodes."""
        share = self.share - (self.spread * (log2(nodes) - 1) if ring else 0.0)
        return max(share, _LEAST_SHARE) * link.bandwidth


@cache
def link_model(cluster: Cluster, outer: bool) -> LinkModel:
    """The constants of the link inside nodes, or, with `outer`, between them."""
    link = cluster.outer if outer else cluster.inner
    # the entry with the longest name that begins the link's kind, over the defaults of its level
    table: dict[str, dict[str, Any]] = constants("collectives")["links"]
    prefixes = [name for name in table if link.kind.startswith(name)]
    entry = table[max(prefixes, key=len)] if prefixes else {}
    entry = {**table["outer" if outer else "inner"], **entry}
    relayed: Mapping[str, float] = constants("collectives")["relayed"]
    factor = relayed.get(chip(cluster.device), 1.0) if link.kind.startswith("PCIe") else 1.0
    switch = entry.get("switch") if link.sharp else None
    return LinkModel(
        base=entry["base_us"] * 1e-6,
        step=entry["step"] * link.latency,
        pipe=entry["pipe_ns"] * 1e-9,
        share=entry["share"] * factor,
        fewer=entry["fewer"] * factor,
        spread=entry["spread"],
        crowded=entry["crowded"],
        send=entry["send_us"] * 1e-6,
        send_share=entry["send_share"] * factor,
        exchange=entry["exchange"] * factor,
        mesh=entry.get("mesh", False),
        by_ranks=entry.get("by_ranks", {}),
        wired=entry.get("wired", 0),
        switch=None
        if switch is None
        else SwitchReduction(
            switch["ranks"], switch["base_us"] * 1e-6, switch["pipe_ns"] * 1e-9, switch["share"]
        ),
    )


@lru_cache(maxsize=65536)
def collective_seconds(cluster: Cluster, kind: Collective, size: float, group: NodeGroup) -> float:
    """Time of one collective over `group`, while the other groups of its axis do the same.

    Args:
        size: bytes. All-reduce, reduce-scatter, all-gather, broadcast: of the whole tensor, which every rank
            has before or after. All-to-all: of what one rank holds for all others together. Send: of the
            message.
    """
    if group.ranks == 1 or not size:
        return 0.0
    if cluster.tables:
        measured = _measured(cluster, kind, size, group)
        if measured is not None:
            return measured
    if kind == "send":
        link = cluster.inner if group.nodes == 1 else cluster.outer
        model = link_model(cluster, group.nodes > 1)
        return model.send + link.latency + size / (model.send_share * link.bandwidth)
    if kind == "all-to-all":
        return _exchange(cluster, size, group)
    rounds = 2 if kind == "all-reduce" else 1
    passed = size if kind == "broadcast" else size * (group.ranks - 1) / group.ranks
    between = group.nodes - 1
    steps = _steps_seconds(cluster, rounds * (group.ranks - 1 - between), rounds * between)
    wire = rounds * passed / _rate(cluster, group)
    # steps and transfer overlap in a ring over nodes: their time is nearer to the maximum than to the sum
    moving = hypot(steps, wire) if group.nodes > 1 else steps + wire
    best = _fixed(cluster, group, rounds / 2 * size) + moving
    if kind == "all-reduce":
        best = min([best, *_all_reduce_alternatives(cluster, size, group)])
    return best


@lru_cache(maxsize=4096)
def _rate(cluster: Cluster, group: NodeGroup, ring: bool = True) -> float:
    """Bytes/s that one rank forwards in a large ring or tree; the slower of the two levels limits it."""
    local, rate = min(group.local, group.ranks), float("inf")
    if local > 1:
        rate = link_model(cluster, False).ring(cluster.inner, local, cluster.node)
    if group.nodes > 1:
        # one ring starts at every rank of a node, and each crosses the network through another card
        model = link_model(cluster, True)
        crowded = model.crowded if local < cluster.node else 1.0
        rate = min(rate, crowded * local * model.across(cluster.outer, group.nodes, ring))
    return rate


def _steps_seconds(cluster: Cluster, inside: float, outside: float) -> float:
    """Seconds of this many steps of a few bytes, inside nodes and between them."""
    return inside * link_model(cluster, False).step + outside * link_model(cluster, True).step


def _fixed(cluster: Cluster, group: NodeGroup, size: float) -> float:
    """Fixed seconds of a collective: the call, and filling pipelines."""
    slower = link_model(cluster, group.nodes > 1)
    return slower.base + slower.pipe * sqrt(size)


def _all_reduce_alternatives(cluster: Cluster, size: float, group: NodeGroup) -> list[float]:
    """Seconds of an all-reduce by a tree between nodes, or in the switch of a single node."""
    if group.nodes > 1:
        steps = _steps_seconds(cluster, 2 * (group.local - 1), 2 * ceil(log2(group.nodes)))
        return [_fixed(cluster, group, size) + steps + 2 * size / _rate(cluster, group, ring=False)]
    switch = link_model(cluster, False).switch
    if switch is not None and group.ranks >= switch.ranks:
        return [switch.base + switch.pipe * sqrt(size) + size / (switch.share * cluster.inner.bandwidth)]
    return []


def _exchange(cluster: Cluster, size: float, group: NodeGroup) -> float:
    """All-to-all: messages inside the node and between nodes run at the same time."""
    local = min(group.local, group.ranks)
    inner_bytes, outer_bytes = size * (local - 1) / group.ranks, size * (group.ranks - local) / group.ranks
    inner, outer = link_model(cluster, False), link_model(cluster, True)
    share = (
        inner.ring(cluster.inner, local, cluster.node)
        if inner.mesh
        else inner.exchange * cluster.inner.bandwidth
    )
    wire = inner_bytes / share if inner_bytes else 0.0
    if outer_bytes:
        wire = max(wire, outer_bytes / (outer.exchange * cluster.outer.bandwidth))
    # messages to all others are sent concurrently, so that their steps overlap
    steps = _steps_seconds(cluster, ceil(log2(local)), ceil(log2(group.nodes)))
    return _fixed(cluster, group, size) + steps + wire


def _measured(cluster: Cluster, kind: Collective, size: float, group: NodeGroup) -> float | None:
    """Seconds from the cluster's table: the rows of this group, or those of the nearest one, scaled; None if
    no rows are comparable.
    """
    tables: Any = cluster.tables
    for measured in (kind, *_STAND_INS[kind]):
        rows: list[list[float]] = tables.get(measured, [])
        # rows measured inside one node say nothing about links between nodes
        groups = {(int(n), int(on)) for n, on, *_ in rows if (n > on) == (group.nodes > 1)}
        if not groups:
            continue
        ranks, local = min(groups, key=lambda g: _distance(g, group))
        line = sorted((b, seconds) for n, on, b, seconds in rows if (n, on) == (ranks, local))
        # overhead scales with the number of steps, the rest with the bytes that a rank forwards
        start = line[0][1]
        transfer = interpolate(line, size) - start
        steps = _steps(kind, group.ranks) / _steps(measured, ranks)
        return start * steps + transfer * _forwarded(kind, group.ranks) / _forwarded(measured, ranks)
    return None


def _distance(measured: tuple[int, int], group: NodeGroup) -> float:
    # the number of nodes counts first, then the number of ranks
    nodes = -(-measured[0] // measured[1])
    return 10 * abs(log2(nodes / group.nodes)) + abs(log2(measured[0] / group.ranks))


def _forwarded(kind: str, ranks: int) -> float:
    """Bytes that a rank forwards in a ring, over the bytes of the collective."""
    part = 1.0 if kind in ("send", "broadcast") else (ranks - 1) / ranks
    return 2 * part if kind == "all-reduce" else part


def _steps(kind: str, ranks: int) -> int:
    """Consecutive messages of a rank in a ring."""
    return 1 if kind == "send" else (ranks - 1) * (2 if kind == "all-reduce" else 1)


# kinds whose rows stand in for those of a kind that a table lacks
_STAND_INS: dict[Collective, tuple[Collective, ...]] = {
    "all-reduce": ("reduce-scatter", "all-gather"),
    "reduce-scatter": ("all-gather", "all-reduce"),
    "all-gather": ("reduce-scatter", "broadcast", "all-reduce"),
    "all-to-all": ("all-gather", "all-reduce"),
    "broadcast": ("all-gather", "all-reduce"),
    "send": ("broadcast", "all-gather", "all-reduce"),
}
