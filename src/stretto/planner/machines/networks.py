"""Networks between nodes in the words of papers: "8x200 Gb/s RoCE", "InfiniBand HDR", "800 Gbit a node"."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from stretto.errors import StrettoError
from stretto.planner.machines.cluster import Cluster, NetworkLink

GBIT = 1e9 / 8  # bytes/s
# kinds of links between nodes: seconds of an empty message, roughly
LATENCIES = {
    "InfiniBand EDR": 15e-6,
    "InfiniBand HDR": 15e-6,
    "InfiniBand NDR": 15e-6,
    "InfiniBand XDR": 15e-6,
    "RoCE": 15e-6,
    "EFA": 25e-6,
    "Omni-Path": 15e-6,
    "Slingshot": 15e-6,
    "Ethernet": 30e-6,
    "DCN": 50e-6,
}
# InfiniBand's generations: Gbit/s of a card
_GENERATIONS = {"EDR": 100.0, "HDR": 200.0, "NDR": 400.0, "XDR": 800.0}
_KINDS = (  # a word of a kind, and the kind
    (r"omni-?path|\bopa\b", "Omni-Path"),
    (r"roce|spectrum-?x|rdma over", "RoCE"),
    (r"\befa\b|elastic fabric", "EFA"),
    (r"slingshot", "Slingshot"),
    (r"\bdcn\b", "DCN"),
    (r"infini-?band|\bib\b|\b(?:edr|hdr|ndr|xdr)\d*\b|quantum|connectx", "InfiniBand"),
    (r"ethernet|\beth\b|\btcp\b|gb?e\b", "Ethernet"),
)
_INSIDE = re.compile(r"nv-?link|nv-?switch|pcie|xgmi|infinity fabric|hccs|\bici\b", re.IGNORECASE)
_SEPARATORS = re.compile(r",(?!\d{3})|[;+|]|\band\b|\bwith\b")
_SPLIT = re.compile(r"\b(?:hdr|ndr|xdr)(\d{2,3})\b", re.IGNORECASE)  # cards of half the rate: HDR100, NDR200
_NONE = re.compile(r"^(?:none|no|single[- ]node|1 node|intra[- ]node(?: only)?|n/?a)\b", re.IGNORECASE)
_SPEED = re.compile(
    r"(?:(?P<count>\d+)\s*[x×*]\s*)?(?P<number>\d[\d,]*(?:\.\d+)?)\s*"
    r"(?P<unit>[TG]B/?ps|[TG]B/s|[TG]bit/?s?|[TG]bp?s?/?s?|[TG](?:igabit)?(?:be|E)?)(?![a-z0-9])(?:\s*(?:/|per)\s*s\b)?",
)
_PER_NODE = re.compile(r"(?:per|a|each|/|node-)\s*(?:node|server|machine|host|box)\b|total", re.IGNORECASE)
_PER_DEVICE = re.compile(
    r"(?:per|a|each|/)\s*(?:gpu|device|accelerator|npu|tpu|card|chip|rank)\b", re.IGNORECASE
)


@dataclass(frozen=True)
class NamedNetwork:
    """The links of a node to other nodes, as a text describes them.

    Attributes:
        kind: name in the catalogue, "InfiniBand" if its generation is open, or None if unknown.
        cards: network cards of a node, or None if unknown.
        rate: bytes/s in one direction, of one card or of `per`, or None if unknown.
        per: what the rate is of if no number of cards is stated, or None if that is not stated either.
    """

    kind: str | None
    cards: int | None
    rate: float | None
    per: Literal["node", "device"] | None

    def link(self, cluster: Cluster) -> NetworkLink:
        """The link between nodes of a cluster that has this network, in the share of one device."""
        kind = self._kind(cluster)
        share = self._share(cluster, kind)
        if share is None:
            share = cluster.outer.bandwidth
        same_kind = kind == cluster.outer.kind
        return (
            replace(cluster.outer, bandwidth=share)
            if same_kind
            else NetworkLink(share, LATENCIES[kind], kind)
        )

    def _share(self, cluster: Cluster, kind: str) -> float | None:
        """Bytes/s of one device. A rate stated neither per device nor per node is taken per device if it
        equals the cluster's usual share of one, else per node. Without a rate there are as many cards as
        usual, of the generation that is named.
        """
        if self.rate is None:
            new, old = (
                _GENERATIONS.get(name.removeprefix("InfiniBand ")) for name in (kind, cluster.outer.kind)
            )
            return cluster.outer.bandwidth * new / old if old and new else None
        if self.cards is not None:
            return self.cards * self.rate / cluster.node
        is_default_share = abs(self.rate / cluster.outer.bandwidth - 1) < 0.05
        shared = self.per == "device" or (self.per is None and is_default_share and self.kind != "Ethernet")
        return self.rate if shared else self.rate / cluster.node

    def _kind(self, cluster: Cluster) -> str:
        """The kind in the catalogue; InfiniBand's generation follows from a card's rate."""
        if self.kind is None:
            return cluster.outer.kind
        if self.kind != "InfiniBand":
            return self.kind
        if self.rate is not None:
            for generation, gbits in _GENERATIONS.items():
                if abs(self.rate / (gbits * GBIT) - 1) < 0.05:
                    return f"InfiniBand {generation}"
        kind = cluster.outer.kind
        return kind if kind.startswith("InfiniBand") else "InfiniBand HDR"


def parse_network(text: str) -> NamedNetwork | None:
    """Parse a text about the network between nodes; None if it says that no network exists. Links inside the
    node (NVLink, PCIe, ...) that it names too are not read.

    Raises:
        StrettoError: it names neither a kind nor a speed.
    """
    if _NONE.search(text.strip()):
        return None
    parts = [part for part in _SEPARATORS.split(text) if not _INSIDE.search(part)]
    network_text = " ".join(parts)
    kind = next((name for pattern, name in _KINDS if re.search(pattern, network_text, re.IGNORECASE)), None)
    generation = next(
        (g for g in _GENERATIONS if re.search(rf"\b{g}(?:\d*)\b", network_text, re.IGNORECASE)), None
    )
    if kind == "InfiniBand" and generation is not None:
        kind = f"InfiniBand {generation}"
    speed = _SPEED.search(network_text)
    if kind is None and speed is None:
        if not parts:
            return None
        raise StrettoError(
            f"network {text!r} names no kind and no speed",
            hint=f"as in '8x200 Gb/s RoCE', '800 Gbit a node', or one of {', '.join(LATENCIES)}",
        )
    counted = re.search(r"(\d+)\s*[x×*]\s*[a-z]", network_text, re.IGNORECASE)  # 8x NDR, 8x CX-6 200 Gb/s
    if counted is None:
        counted = re.search(r"[a-z]\s*[x×*]\s*(\d+)\b", network_text, re.IGNORECASE)  # 200 Gb/s x 8
    cards = int(counted[1]) if counted else None
    each = _GENERATIONS[generation] * GBIT if generation is not None else None
    if speed is None:
        short = _SPLIT.search(network_text)
        rate = float(short[1]) * GBIT if short else each if cards else None
        return NamedNetwork(kind, cards, rate, "device" if short else None)
    # bytes/s of one: a capital B is bytes, as in GB/s; all else is bits
    unit = speed["unit"]
    scale = 1000.0 if unit[0] == "T" else 1.0
    rate = float(speed["number"].replace(",", "")) * (scale * (1e9 if re.match(r".B", unit) else GBIT))
    per = "node" if _PER_NODE.search(network_text) else "device" if _PER_DEVICE.search(network_text) else None
    if speed["count"]:
        cards = int(speed["count"])
    elif cards and each and rate > 1.5 * each:  # 4x HDR (800 Gb/s)
        return NamedNetwork(kind, None, rate, "node")
    return NamedNetwork(kind, cards, rate, per)
