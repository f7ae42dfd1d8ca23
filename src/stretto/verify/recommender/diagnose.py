"""What wrong rows of a recommender's tables have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from stretto.engine.parallel.control import gather_json
from stretto.recommender.placement import Placements
from stretto.verify.compare import Snapshot
from stretto.verify.evidence import WrongShard
from stretto.verify.recommender.local_shards import Compared, ShardRows

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
