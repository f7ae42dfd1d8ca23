"""Which shards each rank stores, and the order of shards in every exchange; the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from stretto.recommender.placement import Placements, TableShard, TableSpec, shards_of


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Shards of one width that a rank keeps in one store, one range of rows after another.

    column_split: they are column shards, whose per-row statistics involve several ranks.
    replicated: they are copies, which every rank has.
    hashed: the shard of one hash table, whose store grows.
    """

    rank: int
    shards: tuple[TableShard, ...]
    column_split: bool
    replicated: bool
    hashed: bool

    @property
    def width(self) -> int:
        """Columns of every shard."""
        return self.shards[0].width

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def bases(self) -> list[int]:
        """The row of the store at which each shard begins."""
        return [0, *accumulate(shard.rows for shard in self.shards)][:-1]


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """The shards of all tables of a job.

    pools: of each rank, the pools that all ranks send requests to.
    replicated: of each rank, its copies of tables.
    routes: of each rank, its shards in the order in which requests and replies list them: pool by pool.
    parts: of each table, its shards; of a replicated table none.
    by_rows: of each table, whether its rows are split over several shards.
    """

    tables: tuple[TableSpec, ...]
    world: int
    pools: tuple[tuple[Pool, ...], ...]
    replicated: tuple[tuple[Pool, ...], ...]
    routes: tuple[tuple[TableShard, ...], ...] = field(repr=False)
    parts: tuple[tuple[TableShard, ...], ...] = field(repr=False)
    by_rows: tuple[bool, ...] = field(repr=False)

    @property
    def needs_int64(self) -> bool:
        """Whether the row numbers of requests exceed 32 bits."""
        largest = max((shard.rows for route in self.routes for shard in route), default=0)
        return largest >= 2**31 or any(table.ids == "hash" for table in self.tables)


def map_shards(tables: Sequence[TableSpec], placements: Placements, world: int) -> ShardMap:
    """The shards of stored tables (`physical_tables`) on `world` ranks.

    Raises:
        StrettoError: a placement does not fit its table or the ranks.
    """
    shards = shards_of(tables, placements, world)
    splits = [placements[table.name].split for table in tables]
    grouped: list[dict[object, list[TableShard]]] = [{} for _ in range(world)]
    for shard in shards:
        split, table = splits[shard.table], tables[shard.table]
        hashed = table.name if table.ids == "hash" else ""
        column_split = split == "column" and shard.width < table.dim
        key = (split == "data", shard.width, shard.place, shard.cache, column_split, hashed)
        grouped[shard.rank].setdefault(key, []).append(shard)
    pools = [[_pool(key, of_key) for key, of_key in of_rank.items()] for of_rank in grouped]
    sharded = tuple(tuple(pool for pool in of_rank if not pool.replicated) for of_rank in pools)
    parts = tuple(
        () if split == "data" else tuple(shard for shard in shards if shard.table == number)
        for number, split in enumerate(splits)
    )
    return ShardMap(
        tables=tuple(tables),
        world=world,
        pools=sharded,
        replicated=tuple(tuple(pool for pool in of_rank if pool.replicated) for of_rank in pools),
        routes=tuple(tuple(shard for pool in of_rank for shard in pool.shards) for of_rank in sharded),
        parts=parts,
        by_rows=tuple(
            split == "row" and len(of_table) > 1 for split, of_table in zip(splits, parts, strict=True)
        ),
    )


def _pool(key: object, shards: Sequence[TableShard]) -> Pool:
    assert isinstance(key, tuple)
    return Pool(
        rank=shards[0].rank,
        shards=tuple(shards),
        column_split=bool(key[4]),
        replicated=bool(key[0]),
        hashed=bool(key[5]),
    )
