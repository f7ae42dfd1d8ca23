"""How long a collective takes, by algorithm and by level: inside nodes, and between them."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from stretto.cost.machine.cluster import Cluster, Group

Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "send"]


@lru_cache(maxsize=65536)
def collective_seconds(cluster: Cluster, kind: Collective, size: float, group: Group) -> float:
    """Time of one collective over `group`, while the groups beside it do the same.

    `size` is bytes: of the whole tensor, which every rank has before or after (all-reduce, reduce-scatter,
    all-gather, broadcast); of what a rank holds, a part of it for each (all-to-all); of the message (send).
    """
    if group.ranks == 1 or not size:
        return 0.0
    link = cluster.inner if group.nodes == 1 else cluster.outer
    if kind == "send":
        return size / (0.8 * link.bandwidth) + link.latency
    factor = 2.0 if kind == "all-reduce" else 1.0
    part = (group.ranks - 1) / group.ranks
    return factor * (part * size / (0.75 * link.bandwidth) + (group.ranks - 1) * link.latency)
