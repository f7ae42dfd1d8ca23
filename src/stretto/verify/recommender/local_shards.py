"""Matches the shards of this rank with the rows and columns of the reference's whole tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.recommender.placement import TableShard
from stretto.recommender.tables.pools import LocalShard
from stretto.recommender.tables.splitmix import owner
from stretto.recommender.train.engine import Recommender
from stretto.verify.compare import Pairs


@dataclass(frozen=True)
class ShardRows:
    """A shard and its rows.

    Attributes:
        table_rows: [n] rows of the reference's table that belong to the shard.
        local_rows: [k] the local rows that exist: in a hash table, an id may have none.
        positions: [k] their positions in `table_rows`.
    """

    local: LocalShard
    table_rows: Tensor
    local_rows: Tensor
    positions: Tensor

    @property
    def shard(self) -> TableShard:
        return self.local.shard

    def of_table(self, table: Tensor) -> Tensor:
        """The shard of a whole table's tensor [rows, dim] or [rows]."""
        rows = table[self.table_rows]
        return rows[:, self.shard.start : self.shard.stop] if table.dim() == 2 else rows

    def to_table_order(self, values: Tensor) -> Tensor:
        """Values of all local rows [rows, ...] in the order of `table_rows`, float64; zeros where a row does
        not exist.
        """
        spread = torch.zeros(len(self.table_rows), *values.shape[1:], dtype=torch.float64)
        spread[self.positions] = values.double()[self.local_rows]
        return spread

    def read(self) -> dict[str, Tensor]:
        """`weight` and states of all local rows, as stored."""
        return self.local.read(0, int(self.local_rows.max()) + 1 if len(self.local_rows) else 0)


def shard_rows(recommender: Recommender, known: Mapping[str, Tensor]) -> list[ShardRows]:
    """The shards of this rank.

    Args:
        known: for each hash table, the id of each row of the reference's table.
    """
    shards, parts = list[ShardRows](), recommender.tables.shard_map.parts
    for pool in (*recommender.tables.pools, *recommender.tables.replicated_pools):
        for held in pool.shards:
            shard = held.shard
            if pool.ids is None:
                rows = torch.arange(shard.rows)
                shards.append(ShardRows(held, rows * shard.modulus + shard.residue, rows, rows))
                continue
            ids, by_rows = known[shard.name], recommender.tables.shard_map.by_rows[shard.table]
            mine = owner(ids, len(parts[shard.table])) == shard.part if by_rows else ids >= 0
            state = pool.ids.state()
            there = state["rows"] >= 0
            whole = torch.nonzero(mine).flatten()
            at = torch.searchsorted(ids[whole], state["ids"][there])
            shards.append(ShardRows(held, whole, state["rows"][there], at))
    return shards


@dataclass(frozen=True)
class Compared:
    """A tensor of one shard beside that of the reference."""

    name: str
    shard: TableShard
    ours: Tensor
    reference: Tensor


def compare_gradients(
    recommender: Recommender, shards: Sequence[ShardRows], expected: Mapping[str, Tensor]
) -> Iterator[Compared]:
    """The tables' gradients of the last step, summed over all records of a row."""
    by_number = {one.shard.number: one for one in shards}
    dense = {
        number: torch.zeros(len(one.table_rows), one.shard.width, dtype=torch.float64)
        for number, one in by_number.items()
    }
    for shard, rows, gradient in recommender.recorded:
        one = by_number[shard.shard.number]
        place = torch.full((int(one.local_rows.max()) + 1 if len(one.local_rows) else 0,), -1)
        place[one.local_rows] = one.positions
        dense[shard.shard.number].index_add_(0, place[rows.cpu()], gradient.double().cpu())
    for number, one in by_number.items():
        yield Compared(one.shard.name, one.shard, dense[number], one.of_table(expected[one.shard.name]))


def compare_rows(
    recommender: Recommender,
    shards: Sequence[ShardRows],
    tables: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
) -> tuple[list[Compared], list[Compared]]:
    """The values of rows, and their states."""
    values, kept = list[Compared](), list[Compared]()
    for one in shards:
        name, read = one.shard.name, one.read()
        ours = one.to_table_order(recommender.rule.decode(read))
        values.append(Compared(name, one.shard, ours, one.of_table(tables[name])))
        for key, state in read.items():
            if f"{name}.{key}" in states:
                reference = one.of_table(states[f"{name}.{key}"])
                kept.append(Compared(f"{name}.{key}", one.shard, one.to_table_order(state), reference))
    return values, kept


def pairs_by_name(beside: Sequence[Compared], names: Sequence[str]) -> dict[str, Pairs]:
    """Pairs by name, in the same order on every rank."""
    pairs: dict[str, Pairs] = {name: [] for name in names}
    for one in beside:
        if one.ours.numel():
            pairs[one.name].append((one.ours, one.reference))
    return pairs
