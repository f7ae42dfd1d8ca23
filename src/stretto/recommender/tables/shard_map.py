"""The shards that each rank stores, and the order of shards in every exchange; the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from stretto.recommender.placement import Placements, TableShard, TableSpec, shards_of


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Shards of one width that a rank stores together, one range of rows after another.

    column_split: True for column-wise shards, whose per-row statistics involve several ranks.
    replicated: True for copies, which every rank has.
    hashed: True for the shard of a hash table, whose store grows.
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
        """First row of each shard in the store."""
        return [0, *accumulate(shard.rows for shard in self.shards)][:-1]


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """The shards of all tables of a job.

    pools: for each rank, the pools to which all ranks send requests.
    replicated: for each rank, its pools of replicated tables.
    routes: for each rank, its shards in the order of requests and replies: pool by pool.
    parts: for each table, its shards; none if it is replicated.
    by_rows: for each table, True if its rows are split over several shards.
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
        """True if the row numbers of requests exceed 32 bits."""
        largest = max((shard.rows for route in self.routes for shard in route), default=0)
        return largest >= 2**31 or any(table.ids == "hash" for table in self.tables)


def map_shards(tables: Sequence[TableSpec], placements: Placements, world: int) -> ShardMap:
    """Map stored tables (`physical_tables`) to shards on `world` ranks.

    Raises:
        StrettoError: a placement does not fit its table or the ranks.
    """
    shards = shards_of(tables, placements, world)
    splits = [placements[table.name].split for table in tables]
    grouped: list[dict[tuple[object, ...], list[TableShard]]] = [{} for _ in range(world)]
    for shard in shards:
        split, table = splits[shard.table], tables[shard.table]
        hashed = table.name if table.ids == "hash" else ""
        column_split = split == "column" and shard.width < table.dim
        key = (split == "data", column_split, hashed, shard.width, shard.place, shard.cache)
        grouped[shard.rank].setdefault(key, []).append(shard)
    pools = [
        [
            Pool(
                rank=rank,
                shards=tuple(pool_shards),
                replicated=bool(key[0]),
                column_split=bool(key[1]),
                hashed=bool(key[2]),
            )
            for key, pool_shards in groups.items()
        ]
        for rank, groups in enumerate(grouped)
    ]
    sharded = tuple(tuple(pool for pool in rank_pools if not pool.replicated) for rank_pools in pools)
    parts = tuple(
        () if split == "data" else tuple(shard for shard in shards if shard.table == table)
        for table, split in enumerate(splits)
    )
    return ShardMap(
        tables=tuple(tables),
        world=world,
        pools=sharded,
        replicated=tuple(tuple(pool for pool in rank_pools if pool.replicated) for rank_pools in pools),
        routes=tuple(tuple(shard for pool in rank_pools for shard in pool.shards) for rank_pools in sharded),
        parts=parts,
        by_rows=tuple(
            split == "row" and len(shards) > 1 for split, shards in zip(splits, parts, strict=True)
        ),
    )
