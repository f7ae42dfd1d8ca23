"""The shards of this rank beside the rows and columns of the reference's full tables, and what wrong rows
have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.engine.parallel.control import gather_json
from stretto.recommender.placement import Placements, TableShard
from stretto.recommender.tables.pools import LocalShard
from stretto.recommender.tables.splitmix import owner
from stretto.recommender.train.engine import Recommender
from stretto.verify.compare import NOTHING, Pairs, Snapshot
from stretto.verify.evidence import WrongShard


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


def shard_rows(recommender: Recommender, hash_ids: Mapping[str, Tensor]) -> list[ShardRows]:
    """The shards of this rank.

    Args:
        hash_ids: for each hash table, the id of each row of the reference's table.
    """
    shards, parts = list[ShardRows](), recommender.tables.shard_map.parts
    for pool in (*recommender.tables.pools, *recommender.tables.replicated_pools):
        for local in pool.shards:
            shard = local.shard
            if pool.ids is None:
                rows = torch.arange(shard.rows)
                shards.append(ShardRows(local, rows * shard.modulus + shard.residue, rows, rows))
                continue
            ids, by_rows = hash_ids[shard.name], recommender.tables.shard_map.by_rows[shard.table]
            selected = owner(ids, len(parts[shard.table])) == shard.part if by_rows else ids >= 0
            state = pool.ids.state()
            occupied = state["rows"] >= 0
            table_rows = torch.nonzero(selected).flatten()
            at = torch.searchsorted(ids[table_rows], state["ids"][occupied])
            shards.append(ShardRows(local, table_rows, state["rows"][occupied], at))
    return shards


@dataclass(frozen=True)
class Compared:
    """A tensor of one shard beside the reference's: rows [n, width] or their states [n]."""

    name: str
    shard: TableShard
    actual: Tensor
    reference: Tensor

    def wrong_rows(self) -> Tensor:
        """[n] True for rows that differ."""
        if not self.actual.numel():
            return torch.zeros(len(self.actual), dtype=torch.bool)
        off = (self.actual - self.reference).abs()
        off = off.amax(1) if off.dim() == 2 else off
        return ~(off <= NOTHING * max(float(self.reference.abs().max()), 1e-6))


def compare_gradients(
    recommender: Recommender, shards: Sequence[ShardRows], expected: Mapping[str, Tensor]
) -> Iterator[Compared]:
    """The tables' gradients of the last step, summed over all records of a row."""
    by_number = {piece.shard.number: piece for piece in shards}
    dense = {
        number: torch.zeros(len(piece.table_rows), piece.shard.width, dtype=torch.float64)
        for number, piece in by_number.items()
    }
    for shard, rows, gradient in recommender.recorded:
        piece = by_number[shard.shard.number]
        place = torch.full((int(piece.local_rows.max()) + 1 if len(piece.local_rows) else 0,), -1)
        place[piece.local_rows] = piece.positions
        dense[shard.shard.number].index_add_(0, place[rows.cpu()], gradient.double().cpu())
    for number, piece in by_number.items():
        yield Compared(
            piece.shard.name, piece.shard, dense[number], piece.of_table(expected[piece.shard.name])
        )


def compare_rows(
    recommender: Recommender,
    shards: Sequence[ShardRows],
    weights: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
) -> tuple[list[Compared], list[Compared]]:
    """The values of rows, and their states."""
    values, compared_states = list[Compared](), list[Compared]()
    for piece in shards:
        name, read = piece.shard.name, piece.read()
        actual = piece.to_table_order(recommender.rule.decode(read))
        values.append(Compared(name, piece.shard, actual, piece.of_table(weights[name])))
        for key, state in read.items():
            if f"{name}.{key}" in states:
                reference = piece.of_table(states[f"{name}.{key}"])
                compared_states.append(
                    Compared(f"{name}.{key}", piece.shard, piece.to_table_order(state), reference)
                )
    return values, compared_states


def pairs_by_name(compared: Sequence[Compared]) -> dict[str, Pairs]:
    """Return the pairs of each name."""
    pairs = dict[str, Pairs]()
    for tensor in compared:
        if tensor.actual.numel():
            pairs.setdefault(tensor.name, []).append((tensor.actual, tensor.reference))
    return pairs


_CLOSE = 1e-6


def duplicates_lost(
    compared: Sequence[Compared], shards: Sequence[ShardRows], lookups: Mapping[str, Tensor]
) -> list[str]:
    """Tables that differ only in rows that were looked up more than once. Collective."""
    by_number = {piece.shard.number: piece for piece in shards}
    wrong, others = set[str](), set[str]()
    for tensor in compared:
        rows = tensor.wrong_rows()
        if bool(rows.any()):
            often = lookups[tensor.name][by_number[tensor.shard.number].table_rows]
            (wrong if bool((often[rows] > 1).all()) else others).add(tensor.shard.name)
    gathered: list[list[list[str]]] = gather_json([sorted(wrong), sorted(others)])
    right = {name for _, rank_others in gathered for name in rank_others}
    return sorted({name for rank_wrong, _ in gathered for name in rank_wrong} - right)


def local_statistic(
    states: Sequence[Compared],
    shards: Sequence[ShardRows],
    placed: Placements,
    before: Mapping[str, Tensor],
    expected: Snapshot,
    clipped: float,
) -> list[str]:
    """Column-split tables whose row statistic is the mean over each shard's columns only. Collective.

    Args:
        before: the states before the step.
        clipped: the factor by which gradients are clipped.
    """
    by_number = {piece.shard.number: piece for piece in shards}
    wrong = set[str]()
    for tensor in states:
        name = tensor.shard.name
        if tensor.actual.dim() != 1 or placed[name].split != "column" or not bool(tensor.wrong_rows().any()):
            continue
        shard = by_number[tensor.shard.number]
        gradient = shard.of_table(expected.gradients[name] * clipped)
        alone = shard.of_table(before[tensor.name]) + gradient.square().mean(1)
        if float((tensor.actual - alone).abs().max()) <= _CLOSE * (float(alone.abs().max()) or 1.0):
            wrong.add(name)
    gathered: list[list[str]] = gather_json(sorted(wrong))
    return sorted({name for names in gathered for name in names})


def wrong_shards(compared: Sequence[Compared], placed: Placements) -> list[WrongShard]:
    """The shards that differ, of all ranks. Collective."""
    wrong = {(t.shard.name, t.shard.part, t.shard.rank) for t in compared if bool(t.wrong_rows().any())}
    gathered: list[list[tuple[str, int, int]]] = gather_json([list(shard) for shard in sorted(wrong)])
    return [
        WrongShard(name, part, len(placed[name].ranks) or len(gathered), rank)
        for rank_wrong in gathered
        for name, part, rank in rank_wrong
    ]
