"""Which shards each rank stores, and the order of shards in every exchange; the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from stretto.recommender.placement import Placements, TableShard, TableSpec, shards_of


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Shards that one rank keeps in one store, run after run of rows.

    columns: they are runs of columns, whose row statistics are of several ranks.
    copied: they are copies that every rank has.
    hashed: of one hash table alone, which grows.
    """

    rank: int
    shards: tuple[TableShard, ...]
    columns: bool
    copied: bool
    hashed: bool

    @property
    def width(self) -> int:
        """Columns of all its shards."""
        return self.shards[0].width

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def bases(self) -> list[int]:
        """The store's row at which each shard begins."""
        return [0, *accumulate(shard.rows for shard in self.shards)][:-1]


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """All shards of a job.

    pools: of each rank, those that others ask.
    copies: of every rank, those that it asks alone.
    routes: for each rank, its shards in the order in which requests and answers hold them: pool by pool.
    parts: for each table, its shards by part; of a copied table none.
    """

    tables: tuple[TableSpec, ...]
    world: int
    pools: tuple[tuple[Pool, ...], ...]
    copies: tuple[tuple[Pool, ...], ...]
    routes: tuple[tuple[TableShard, ...], ...] = field(repr=False)
    parts: tuple[tuple[TableShard, ...], ...] = field(repr=False)
    by_rows: tuple[bool, ...] = field(repr=False)

    @property
    def wide(self) -> bool:
        """Whether rows need 64 bits on their way."""
        largest = max((shard.rows for route in self.routes for shard in route), default=0)
        return largest >= 2**31 or any(table.ids == "hash" for table in self.tables)


def wire(tables: Sequence[TableSpec], placements: Placements, world: int) -> Wiring:
    """The wiring of tables as they are stored.

    Raises:
        StrettoError: a placement that does not fit.
    """
    shards = shards_of(tables, placements, world)
    splits = [placements[table.name].split for table in tables]
    grouped: list[dict[object, list[TableShard]]] = [{} for _ in range(world)]
    for shard in shards:
        split, table = splits[shard.table], tables[shard.table]
        hashed = table.name if table.ids == "hash" else ""
        columns = split == "column" and shard.width < table.dim
        key = (split == "data", shard.width, shard.place, shard.cache, columns, hashed)
        grouped[shard.rank].setdefault(key, []).append(shard)
    pools = [[_pool(key, held) for key, held in of.items()] for of in grouped]
    asked = tuple(tuple(pool for pool in of if not pool.copied) for of in pools)
    parts = tuple(
        () if split == "data" else tuple(shard for shard in shards if shard.table == number)
        for number, split in enumerate(splits)
    )
    return Wiring(
        tables=tuple(tables),
        world=world,
        pools=asked,
        copies=tuple(tuple(pool for pool in of if pool.copied) for of in pools),
        routes=tuple(tuple(shard for pool in of for shard in pool.shards) for of in asked),
        parts=parts,
        by_rows=tuple(split == "row" and len(held) > 1 for split, held in zip(splits, parts, strict=True)),
    )


def _pool(key: object, shards: Sequence[TableShard]) -> Pool:
    assert isinstance(key, tuple)
    return Pool(
        rank=shards[0].rank,
        shards=tuple(shards),
        columns=bool(key[4]),
        copied=bool(key[0]),
        hashed=bool(key[5]),
    )
