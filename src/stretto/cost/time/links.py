"""How collectives run on a kind of link: constants by the link's name, and what of a ring it carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import log2
from typing import Any

from stretto.cost.machine.cluster import Cluster, Link
from stretto.cost.time.constants import chip, constants


@dataclass(frozen=True)
class InSwitch:
    """Reductions in the switch: of how many ranks on, seconds of an empty one, those that pipelining adds by
    the root of the bytes, and the whole tensor's rate over the link's.
    """

    ranks: int
    base: float
    pipe: float
    share: float


@dataclass(frozen=True)
class Ways:
    """How collectives run on one link; `data/collectives_*.yaml` say from where that is known.

    Attributes:
        base: seconds of a collective of no bytes and no steps.
        step: seconds of one step of a ring or a tree.
        pipe: seconds by the root of the bytes: what filling and emptying pipelines of the best depth costs.
        share: of the link's bandwidth that a large ring reaches.
        fewer: by how much less of it, over the ranks.
        spread: by how much less a ring between nodes reaches with every doubling of their number beyond two.
        send: seconds of an empty message beside the link's latency; send_share: rate of a large one.
        exchange: share of the bandwidth that a rank's messages to all others reach.
        mesh: one link to each peer, so that few ranks have few links.
        by_ranks: share by number of ranks, where the wiring makes it uneven; of nodes of that many devices.
    """

    base: float
    step: float
    pipe: float
    share: float
    fewer: float
    spread: float
    send: float
    send_share: float
    exchange: float
    mesh: bool
    by_ranks: Mapping[int, float]
    wired: int
    switch: InSwitch | None

    def ring(self, link: Link, ranks: int, node: int) -> float:
        """Bytes/s of a large ring of so many ranks, those that one rank passes on."""
        share = self.share - self.fewer / ranks
        if self.by_ranks and node == self.wired:
            share = self.by_ranks.get(ranks, share)
        if self.mesh and ranks < node:
            share *= (ranks - 1) / (node - 1)
        return share * link.bandwidth

    def across(self, link: Link, nodes: int, ring: bool = True) -> float:
        """Bytes/s of a card in a large ring over so many nodes, or in a tree."""
        return (self.share - (self.spread * (log2(nodes) - 1) if ring else 0.0)) * link.bandwidth


@cache
def ways(cluster: Cluster, outer: bool) -> Ways:
    """The constants of the link inside nodes, or of that between them."""
    link = cluster.outer if outer else cluster.inner
    entry = _entry(link.kind, outer)
    relayed: Mapping[str, float] = constants("collectives")["relayed"]
    factor = relayed.get(chip(cluster.device), 1.0) if link.kind.startswith("PCIe") else 1.0
    switch = entry.get("switch") if link.sharp else None
    return Ways(
        base=entry["base_us"] * 1e-6,
        step=entry["step"] * link.latency,
        pipe=entry["pipe_ns"] * 1e-9,
        share=entry["share"] * factor,
        fewer=entry["fewer"] * factor,
        spread=entry["spread"],
        send=entry["send_us"] * 1e-6,
        send_share=entry["send_share"] * factor,
        exchange=entry["exchange"] * factor,
        mesh=entry.get("mesh", False),
        by_ranks=entry.get("by_ranks", {}),
        wired=entry.get("wired", 0),
        switch=None
        if switch is None
        else InSwitch(switch["ranks"], switch["base_us"] * 1e-6, switch["pipe_ns"] * 1e-9, switch["share"]),
    )


def _entry(kind: str, outer: bool) -> dict[str, Any]:
    """What is known of the longest name that the link's begins with, over what holds for its level."""
    table: dict[str, dict[str, Any]] = constants("collectives")["links"]
    known = [name for name in table if kind.startswith(name)]
    found = table[max(known, key=len)] if known else {}
    return {**table["outer" if outer else "inner"], **found}
