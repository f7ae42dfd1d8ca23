"""Places all tables with one split, each on the least loaded ranks: longest processing time first."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Literal, get_args

from stretto.errors import StrettoError, nearest
from stretto.recommender.placement import (
    Place,
    Split,
    TablePlacement,
    TableSpec,
    check_placements,
)

UniformSplit = Literal["table", "column", "row", "table-row", "data"]
UNIFORM: tuple[UniformSplit, ...] = get_args(UniformSplit)
NARROWEST = 4
"""Columns that a part of a table has at least: 16 bytes in 32 bits, the shortest run that is worth a read."""


def uniform(
    tables: Sequence[TableSpec],
    split: str,
    world: int,
    ranks_per_node: int | None = None,
    place: Place = "device",
    cache: float = 0.1,
) -> dict[str, TablePlacement]:
    """Placements that split all tables in one way.

    Args:
        split: `table`: whole, the one with most to look up first, each on the rank with least so far
            (Graham 1969). `column`: over as many ranks as divide its columns into runs of four or more.
            `row`: over all ranks. `table-row`: over the ranks of the node with least so far. `data`: copies.
        ranks_per_node: of `table-row`; None: all ranks are on one node.

    Raises:
        StrettoError: no such split; `data` of a table whose ids are given out by one owner.
    """
    node = ranks_per_node or world
    known: dict[str, Split] = {name: "row" if name == "table-row" else name for name in UNIFORM}
    if split not in known:
        near = nearest(split, UNIFORM)
        raise StrettoError(
            f"placement {split!r} is not known",
            hint=f"did you mean {near}?" if near else f"{', '.join(UNIFORM)}, auto, or a YAML file",
        )
    load = [0.0] * world
    placements = dict[str, TablePlacement]()
    for table in sorted(tables, key=lambda t: (-traffic(t), t.name)):
        ranks = _ranks(table, split, load, node)
        for rank in ranks:
            load[rank] += traffic(table) / len(ranks)
        placements[table.name] = TablePlacement(known[split], ranks, place, cache)
    ordered = {table.name: placements[table.name] for table in tables}
    check_placements(tables, ordered, world)
    return ordered


def traffic(table: TableSpec) -> float:
    """Numbers of a sample that are read and sent: of its rows, and of their sum."""
    return (table.hot + 1.0) * table.dim


def column_parts(dim: int, most: int) -> int:
    """Into how many equal runs of columns a table is cut: at most so many, each of `NARROWEST` or more."""
    return max(k for k in range(1, most + 1) if dim % k == 0 and (k == 1 or dim // k >= NARROWEST))


def _ranks(table: TableSpec, split: str, load: list[float], node: int) -> tuple[int, ...]:
    world = len(load)
    if split == "data":
        return ()
    if split == "row":
        return tuple(range(world))
    if split == "table-row":
        nodes = range(ceil(world / node))
        parts = [range(n * node, min(world, (n + 1) * node)) for n in nodes]
        return tuple(min(parts, key=lambda ranks: sum(load[r] for r in ranks) / len(ranks)))
    parts = 1 if split == "table" else column_parts(table.dim, world)
    return tuple(sorted(sorted(range(world), key=lambda rank: (load[rank], rank))[:parts]))
