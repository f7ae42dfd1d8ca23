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
class Holding:
    """One shard.

    Attributes:
        whole: [n] rows of the reference's table that belong to it.
        own: [k] its own numbers of those rows that it has; of a hash table ids may be without one.
        at: [k] where in `whole` they are.
    """

    held: LocalShard
    whole: Tensor
    own: Tensor
    at: Tensor

    @property
    def shard(self) -> TableShard:
        return self.held.shard

    def part(self, table: Tensor) -> Tensor:
        """Of a whole tensor [rows, dim] or [rows] what belongs to the shard."""
        rows = table[self.whole]
        return rows[:, self.shard.start : self.shard.stop] if table.dim() == 2 else rows

    def spread(self, values: Tensor) -> Tensor:
        """Own rows' values [own rows, ...] in the order of `whole`, float64; zeros where there is none."""
        whole = torch.zeros(len(self.whole), *values.shape[1:], dtype=torch.float64)
        whole[self.at] = values.double()[self.own]
        return whole

    def read(self) -> dict[str, Tensor]:
        """`weight` and states of all own rows, as they are kept."""
        return self.held.read(0, int(self.own.max()) + 1 if len(self.own) else 0)


def holdings(recommender: Recommender, known: Mapping[str, Tensor]) -> list[Holding]:
    """This rank's shards.

    Args:
        known: of each hash table the ids that the reference's rows stand for.
    """
    shards, parts = list[Holding](), recommender.tables.shard_map.parts
    for pool in (*recommender.tables.pools, *recommender.tables.replicated_pools):
        for held in pool.shards:
            shard = held.shard
            if pool.ids is None:
                rows = torch.arange(shard.rows)
                shards.append(Holding(held, rows * shard.modulus + shard.residue, rows, rows))
                continue
            ids, by_rows = known[shard.name], recommender.tables.shard_map.by_rows[shard.table]
            mine = owner(ids, len(parts[shard.table])) == shard.part if by_rows else ids >= 0
            state = pool.ids.state()
            there = state["rows"] >= 0
            whole = torch.nonzero(mine).flatten()
            at = torch.searchsorted(ids[whole], state["ids"][there])
            shards.append(Holding(held, whole, state["rows"][there], at))
    return shards


@dataclass(frozen=True)
class Beside:
    """Ours and the reference's of one shard's quantity."""

    name: str
    shard: TableShard
    ours: Tensor
    reference: Tensor


def gradients_beside(
    recommender: Recommender, held: Sequence[Holding], expected: Mapping[str, Tensor]
) -> Iterator[Beside]:
    """The tables' gradients of the last step, each row's as often as it was recorded."""
    by_number = {one.shard.number: one for one in held}
    dense = {
        number: torch.zeros(len(one.whole), one.shard.width, dtype=torch.float64)
        for number, one in by_number.items()
    }
    for shard, rows, gradient in recommender.recorded:
        one = by_number[shard.shard.number]
        place = torch.full((int(one.own.max()) + 1 if len(one.own) else 0,), -1)
        place[one.own] = one.at
        dense[shard.shard.number].index_add_(0, place[rows.cpu()], gradient.double().cpu())
    for number, one in by_number.items():
        yield Beside(one.shard.name, one.shard, dense[number], one.part(expected[one.shard.name]))


def rows_beside(
    recommender: Recommender,
    held: Sequence[Holding],
    tables: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
) -> tuple[list[Beside], list[Beside]]:
    """Values of rows, and their states."""
    values, kept = list[Beside](), list[Beside]()
    for one in held:
        name, read = one.shard.name, one.read()
        ours = one.spread(recommender.rule.decode(read))
        values.append(Beside(name, one.shard, ours, one.part(tables[name])))
        for key, state in read.items():
            if f"{name}.{key}" in states:
                reference = one.part(states[f"{name}.{key}"])
                kept.append(Beside(f"{name}.{key}", one.shard, one.spread(state), reference))
    return values, kept


def pairs_of(beside: Sequence[Beside], names: Sequence[str]) -> dict[str, Pairs]:
    """By name, in an order that is the same on every rank."""
    pairs: dict[str, Pairs] = {name: [] for name in names}
    for one in beside:
        if one.ours.numel():
            pairs[one.name].append((one.ours, one.reference))
    return pairs
