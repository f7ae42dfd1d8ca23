"""Places all tables with the same split on the least loaded ranks, longest processing time first (LPT)."""

from __future__ import annotations

from collections.abc import Sequence
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
"""Minimum columns of a column shard: 16 bytes in FP32, the shortest read worth issuing."""


def uniform(
    tables: Sequence[TableSpec],
    split: str,
    world: int,
    ranks_per_node: int | None = None,
    place: Place = "device",
    cache: float = 0.1,
) -> dict[str, TablePlacement]:
    """Return placements with the same split for all tables.

    Args:
        split: `table`: unsplit, in order of decreasing traffic, each on the least loaded rank (Graham 1969).
            `column`: the largest number of equal column-wise shards of at least `NARROWEST` columns. `row`:
            over all ranks. `table-row`: over the ranks of the least loaded node. `data`: replicated.
        ranks_per_node: ranks of a node, for `table-row`; None if all ranks are on one node.

    Raises:
        StrettoError: unknown split, or `data` for a table whose rows are assigned to ids by a single rank.
    """
    node = ranks_per_node or world
    splits: dict[str, Split] = {name: "row" if name == "table-row" else name for name in UNIFORM}
    if split not in splits:
        similar = nearest(split, UNIFORM)
        raise StrettoError(
            f"no placement {split!r}",
            hint=f"did you mean {similar}?" if similar else f"{', '.join(UNIFORM)}, auto, or a YAML file",
        )
    load = [0.0] * world
    placements = dict[str, TablePlacement]()
    for table in sorted(tables, key=lambda t: (-traffic(t), t.name)):
        if split == "data":
            ranks = ()
        elif split == "row":
            ranks = tuple(range(world))
        elif split == "table-row":
            nodes = [range(first, min(world, first + node)) for first in range(0, world, node)]
            ranks = tuple(min(nodes, key=lambda ranks: sum(load[r] for r in ranks) / len(ranks)))
        else:
            parts = 1 if split == "table" else column_parts(table.dim, world)
            ranks = tuple(sorted(sorted(range(world), key=lambda rank: (load[rank], rank))[:parts]))
        for rank in ranks:
            load[rank] += traffic(table) / len(ranks)
        placements[table.name] = TablePlacement(splits[split], ranks, place, cache)
    ordered = {table.name: placements[table.name] for table in tables}
    check_placements(tables, ordered, world)
    return ordered


def traffic(table: TableSpec) -> float:
    """Elements read and sent per sample: its rows and the pooled embedding."""
    return (table.hot + 1.0) * table.dim


def column_parts(dim: int, ranks: int) -> int:
    """The largest number of equal column shards, up to `ranks`, with at least `NARROWEST` columns each."""
    return max(k for k in range(1, ranks + 1) if dim % k == 0 and (k == 1 or dim // k >= NARROWEST))
