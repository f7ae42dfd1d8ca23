"""Signs of particular mistakes in what ranks hold: which rows are wrong, and what they would be right as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stretto.engine.parallel.control import gather_json
from stretto.recommender.placement import Placements
from stretto.recommender.verify.holding import Beside, Holding
from stretto.recommender.verify.reference import Snapshot
from stretto.run.verify.compare import NOTHING

_CLOSE = 1e-6


def duplicates_lost(
    beside: Sequence[Beside], held: Sequence[Holding], lookups: Mapping[str, Tensor]
) -> list[str]:
    """Tables that differ, and only in rows that were looked up more than once. Collective."""
    by_number = {one.shard.number: one for one in held}
    wrong, others = set[str](), set[str]()
    for one in beside:
        rows = _wrong_rows(one)
        if bool(rows.any()):
            often = lookups[one.name][by_number[one.shard.number].whole]
            (wrong if bool((often[rows] > 1).all()) else others).add(one.shard.name)
    told: list[list[list[str]]] = gather_json([sorted(wrong), sorted(others)])
    spoilt = {name for _, rank_others in told for name in rank_others}
    return sorted({name for rank_wrong, _ in told for name in rank_wrong} - spoilt)


def own_statistic(
    states: Sequence[Beside],
    held: Sequence[Holding],
    placed: Placements,
    before: Mapping[str, Tensor],
    expected: Snapshot,
) -> list[str]:
    """Tables split by columns whose row statistic is right for each shard's own columns. Collective."""
    by_number = {one.shard.number: one for one in held}
    found = set[str]()
    for one in states:
        name = one.shard.name
        if one.ours.dim() != 1 or placed[name].split != "column" or not bool(_wrong_rows(one).any()):
            continue
        holding = by_number[one.shard.number]
        gradient = holding.part(expected.gradients[name] * expected.clipped)
        alone = holding.part(before[one.name]) + gradient.square().mean(1)
        scale = float(alone.abs().max()) or 1.0
        if float((one.ours - alone).abs().max()) <= _CLOSE * scale:
            found.add(name)
    told: list[list[str]] = gather_json(sorted(found))
    return sorted({name for names in told for name in names})


def _wrong_rows(one: Beside) -> Tensor:
    """[rows] whether they differ."""
    if not one.ours.numel():
        return torch.zeros(len(one.ours), dtype=torch.bool)
    off = (one.ours - one.reference).abs()
    off = off.amax(1) if off.dim() == 2 else off
    scale = float(one.reference.abs().max()) or 1.0
    return ~(off <= NOTHING * scale)
