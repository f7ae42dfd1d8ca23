"""Placement options of a table, and the load that each puts on the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from stretto.recommender.placement import Place, Split, TablePlacement, TableSpec
from stretto.recommender.planner.table_times import (
    Load,
    TablePart,
    Work,
    copied_load,
    part_load,
    requester_seconds,
    ship_rows,
)
from stretto.recommender.planner.uniform import NARROWEST
from stretto.recommender.popularity import Popularity

Scope = Literal["any", "node", "all"]
CACHES = (0.01, 0.1)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to place a table.

    Attributes:
        parts: load of each part on its rank; for a replicated table a single entry that holds for all ranks.
        scope: `any`: any ranks, one per part; `node`: all ranks of one node; `all`: all ranks.
        lookup, update: seconds on every requesting rank to pool the rows or partial sums it receives.
        gathered: bytes of the all-gather of a replicated table's unique rows.
        rows_shipped: True if unique rows are sent between ranks instead of pooled embeddings.
        alike: True if every rank has a part and all parts but the first are equal.
    """

    split: Split
    place: Place
    cache: float
    parts: tuple[Load, ...]
    scope: Scope
    lookup: float = 0.0
    update: float = 0.0
    gathered: float = 0.0
    rows_shipped: bool = False
    alike: bool = field(init=False)

    def __post_init__(self) -> None:
        even = all(part == self.parts[-1] for part in self.parts[1:])
        object.__setattr__(self, "alike", self.scope == "all" and even)

    def placement(self, ranks: Sequence[int]) -> TablePlacement:
        """Return the placement that assigns the parts to these ranks, in order."""
        return TablePlacement(
            self.split, () if self.split == "data" else tuple(ranks), self.place, self.cache
        )

    @property
    def description(self) -> str:
        """The split and its number of parts, such as "row over 8"."""
        if self.split in ("table", "data"):
            return self.split
        return f"{self.split} over {len(self.parts)}"


def options_of(
    table: TableSpec,
    popularity: Popularity,
    work: Work,
    places: Sequence[Place] = ("device",),
    splits: Sequence[Split] = ("table", "column", "row", "data"),
) -> list[Option]:
    """Return all options worth trying in these places; table-wise if none of `splits` is possible."""
    hashed = table.ids == "hash"
    counts: list[tuple[Split, int]] = [("table", 1)]
    if work.ranks > 1:
        parts = 2
        while parts <= work.ranks and not hashed:
            if table.dim % parts == 0 and table.dim // parts >= NARROWEST:
                counts.append(("column", parts))
            parts *= 2
        for parts in (2, 4, work.local, work.ranks):
            if 1 < parts <= min(work.ranks, table.rows):
                counts.append(("row", parts))
        if not hashed:
            counts.append(("data", 0))
    possible = [option for option in dict.fromkeys(counts) if option[0] in splits]
    options = list[Option]()
    # tables that grow with new ids stay on the device
    for place in places if not hashed else ("device",):
        for cache in (0.1,) if place == "device" else CACHES:
            for split, parts in possible or counts[:1]:
                # the ranks are placeholders, one per part
                placement = TablePlacement(split, tuple(range(parts)), place, cache)
                options.append(option_of(table, popularity, work, placement))
    return options


def option_of(table: TableSpec, popularity: Popularity, work: Work, placement: TablePlacement) -> Option:
    """Return the option for a placement."""
    parts = len(placement.ranks)
    if placement.split == "data":
        load, gathered = copied_load(work, table.rows, table.dim, popularity)
        return Option(
            split="data",
            place=placement.place,
            cache=placement.cache,
            parts=(load,),
            scope="all",
            gathered=gathered,
        )
    by_rows = parts if placement.split == "row" else 1
    shipped = table.ids != "hash" and ship_rows(work, popularity, by_rows)
    loads = list[Load]()
    busiest = popularity.busiest(parts) if placement.split == "row" else 1.0
    for part in range(parts):
        rows = table.rows
        width = table.dim
        share = 1.0
        if placement.split == "column":
            width = table.dim * (part + 1) // parts - table.dim * part // parts
        if placement.split == "row":
            rows = -(-table.rows // parts)  # some shards have one row less, which is ignored
            share = busiest if part == 0 else (1.0 - busiest) / (parts - 1) if parts > 1 else 1.0
        table_part = TablePart(
            rows=rows,
            width=width,
            share=share,
            popularity=popularity,
            place=placement.place,
            cache=placement.cache,
            parts=by_rows,
        )
        loads.append(part_load(work, table_part, shipped))
    lookup, update = requester_seconds(work, table.dim, popularity, 0 if shipped else by_rows)
    scope: Scope = "all" if len(set(placement.ranks)) == work.ranks > 1 else "any"
    if placement.split == "row" and 1 < parts == work.local < work.ranks:
        scope = "node"
    if placement.split == "column" and parts > 1 and work.optimizer == "rowwise_adagrad":
        # column-wise shards also exchange squared gradient norms, one FP32 value per row
        squares = 4.0 * popularity.unique(work.batch * popularity.hot) * (parts - 1) / parts
        loads = [load._replace(sent=load.sent + squares) for load in loads]
    return Option(
        split=placement.split,
        place=placement.place,
        cache=placement.cache,
        parts=tuple(loads),
        scope=scope,
        lookup=lookup,
        update=update,
        rows_shipped=shipped,
    )
