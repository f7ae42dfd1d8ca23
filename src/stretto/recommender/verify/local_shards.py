"""The shards on this rank, matched with the rows and columns of the reference's whole tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.recommender.placement import TableShard
from stretto.recommender.tables.pools import LocalShard
from stretto.recommender.tables.splitmix import owner
from stretto.recommender.train.engine import Recommender
from stretto.run.verify.compare import Pairs


@dataclass(frozen=True)
class ShardRows:
    """One shard.

    Attributes:
        whole: [n] rows of the reference's table that belong to it.
        own: [k] its own numbers of those rows that it has; of a hash table ids may be without one.
        at: [k] where in `whole` they are.
    """

    local: LocalShard
    table_rows: Tensor
    local_rows: Tensor
    positions: Tensor

    @property
    def shard(self) -> TableShard:
        return self.local.shard

    def of_table(self, table: Tensor) -> Tensor:
        """Of a whole tensor [rows, dim] or [rows] what belongs to the shard."""
        rows = table[self.table_rows]
        return rows[:, self.shard.start : self.shard.stop] if table.dim() == 2 else rows

    def to_table_order(self, values: Tensor) -> Tensor:
        """Own rows' values [own rows, ...] in the order of `whole`, float64; zeros where there is none."""
        spread = torch.zeros(len(self.table_rows), *values.shape[1:], dtype=torch.float64)
        spread[self.positions] = values.double()[self.local_rows]
        return spread

    def read(self) -> dict[str, Tensor]:
        """`weight` and states of all own rows, as they are kept."""
        return self.local.read(0, int(self.local_rows.max()) + 1 if len(self.local_rows) else 0)


def shard_rows(recommender: Recommender, known: Mapping[str, Tensor]) -> list[ShardRows]:
    """This rank's shards.

    Args:
        known: of each hash table the ids that the reference's rows stand for.
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
    """Ours and the reference's of one shard's quantity."""

    name: str
    shard: TableShard
    ours: Tensor
    reference: Tensor


def compare_gradients(
    recommender: Recommender, shards: Sequence[ShardRows], expected: Mapping[str, Tensor]
) -> Iterator[Compared]:
    """The tables' gradients of the last step, each row's as often as it was recorded."""
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
    """Values of rows, and their states."""
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
    """By name, in an order that is the same on every rank."""
    pairs: dict[str, Pairs] = {name: [] for name in names}
    for one in beside:
        if one.ours.numel():
            pairs[one.name].append((one.ours, one.reference))
    return pairs
