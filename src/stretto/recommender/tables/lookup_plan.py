"""How the lookups of one table are sent to its shards, and how the replies are combined.

A shard replies to bags of its rows with their sums. A rank requests either pooled vectors, one per sample, of
which each row-wise shard returns a partial sum that the requester adds up; or single rows, which it pools
itself. Single rows are the smaller reply if a sample has few ids, or ids repeat in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.recommender.tables.jagged import VARYING, Bags
from stretto.recommender.tables.kernels.plain import Divided, Kernels, divide_by
from stretto.recommender.tables.splitmix import owner


@dataclass(kw_only=True)
class LookupPlan:
    """The requests to the shards of one table for a batch.

    Attributes:
        bags: the table's rows of each sample.
        parts: the bags requested from each shard.
        by_rows: True if the shards have different rows; otherwise all get the same request (column-wise).
        inverse: with single rows, [n], the position of each id's row in the concatenated replies; None if the
            replies are pooled vectors.
        unique_rows: with single rows, their number over all shards.
    """

    bags: Bags
    parts: list[Bags]
    by_rows: bool
    inverse: Tensor | None = None
    unique_rows: int = 0

    def gather(self, replies: Sequence[Tensor]) -> Tensor:
        """Combine the shards' replies to [samples, dim], or to single rows [unique_rows, dim]."""
        if len(replies) == 1:
            return replies[0]
        if not self.by_rows:
            return torch.cat(list(replies), 1)
        if self.inverse is not None:
            return torch.cat(list(replies))
        total = replies[0] + replies[1]
        for reply in replies[2:]:
            total += reply
        return total

    def scatter(self, gradient: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """Return the gradient of each shard's reply from that of `gather`'s result."""
        if len(self.parts) == 1:
            return [gradient]
        if not self.by_rows:
            return list(gradient.split(list(widths), 1))
        if self.inverse is not None:
            return list(gradient.split([part.samples for part in self.parts]))
        return [gradient] * len(self.parts)

    def pool(self, vectors: Tensor, kernels: Kernels) -> Tensor:
        """Return the pooled vectors of the samples [samples, dim] from `gather`'s result."""
        if self.inverse is None:
            return vectors
        if self.bags.single:
            return vectors.index_select(0, self.inverse)
        return kernels.lookup(vectors, self.inverse, self.bags.offsets, self.bags.scale)

    def unpool(self, gradient: Tensor, kernels: Kernels) -> Tensor:
        """Return the gradient of `gather`'s result from that of the pooled vectors."""
        if self.inverse is None:
            return gradient
        grouped = kernels.group(self.inverse, self.unique_rows)
        return kernels.segment_sum(gradient, self.bags.offsets, grouped, self.bags.scale)


def plan_pooled(bags: Bags, parts: int, by_rows: bool, hashed: bool, kernels: Kernels) -> LookupPlan:
    """Request pooled vectors from every shard."""
    if not by_rows:
        return LookupPlan(bags=bags, parts=[bags] * parts, by_rows=False)
    divided = _divide(bags.ids, bags.offsets, parts, hashed, kernels)
    sizes = divided.lengths.sum(1).tolist()
    scales = [None] * parts if bags.scale is None else bags.scale[divided.order].split(sizes)
    pieces = [
        Bags(ids=rows, samples=bags.samples, hot=VARYING, lengths=lengths, scale=scale)
        for rows, lengths, scale in zip(divided.local_rows.split(sizes), divided.lengths, scales, strict=True)
    ]
    return LookupPlan(bags=bags, parts=pieces, by_rows=True)


def plan_rows(
    bags: Bags, parts: int, by_rows: bool, deduplicate: bool, kernels: Kernels, hashed: bool = False
) -> LookupPlan:
    """Request single rows: with `deduplicate` each row once, otherwise one for every id."""
    rows, inverse = bags.ids, None
    if deduplicate:
        grouped = kernels.group(rows)
        rows, inverse = grouped.rows, torch.empty_like(bags.ids)
        repeats = torch.diff(grouped.starts)
        inverse[grouped.order] = torch.repeat_interleave(
            torch.arange(len(rows), device=rows.device), repeats, output_size=len(inverse)
        )
    if not by_rows:
        inverse = torch.arange(len(rows), device=rows.device) if inverse is None else inverse
        singles = [_singles(rows)] * parts
    else:
        one_bag = torch.arange(2, device=rows.device) * len(rows)
        divided = _divide(rows, one_bag, parts, hashed, kernels)
        position = torch.empty_like(divided.order)
        position[divided.order] = torch.arange(len(rows), device=rows.device)
        inverse = position if inverse is None else position[inverse]
        singles = [_singles(piece) for piece in divided.local_rows.split(divided.lengths[:, 0].tolist())]
    return LookupPlan(bags=bags, parts=singles, by_rows=by_rows, inverse=inverse, unique_rows=len(rows))


def _divide(rows: Tensor, offsets: Tensor, parts: int, hashed: bool, kernels: Kernels) -> Divided:
    """Divide lookups by the shard that stores their row, or that owns their id."""
    if hashed:
        return divide_by(owner(rows, parts), rows, offsets, parts)
    return kernels.divide(rows, offsets, parts)


def _singles(rows: Tensor) -> Bags:
    return Bags(ids=rows, samples=len(rows), hot=1, lengths=torch.ones_like(rows))


class LookupPlanner:
    """Chooses the smaller reply for each table: pooled vectors or single rows.

    The choice needs the share of unique rows, which is measured on every `MEASURE_EVERY`th batch of a table.
    """

    MEASURE_EVERY = 64

    def __init__(self, tables: int) -> None:
        self._batches = [0] * tables
        self._unique_share = [1.0] * tables  # unique rows over lookups

    def plan(
        self, table: int, bags: Bags, parts: int, by_rows: bool, hashed: bool, kernels: Kernels
    ) -> LookupPlan:
        """Plan a batch of one table in `parts` shards.

        Counted in rows, pooled vectors are one per sample and row-wise shard, single rows one per unique row.
        Ids of a hash table are never deduplicated, because their owner counts every occurrence.
        """
        lookups = len(bags.ids)
        pooled = bags.samples * (parts if by_rows else 1)
        if hashed:
            if by_rows and lookups < pooled:
                return plan_rows(
                    bags=bags, parts=parts, by_rows=by_rows, deduplicate=False, kernels=kernels, hashed=hashed
                )
            return plan_pooled(bags, parts, by_rows, hashed, kernels)
        if lookups and self._batches[table] % self.MEASURE_EVERY == 0:
            self._unique_share[table] = len(torch.unique(bags.ids)) / lookups
        self._batches[table] += 1
        unique_share = self._unique_share[table]
        if min(lookups, unique_share * lookups) < 0.9 * pooled:
            return plan_rows(bags, parts, by_rows, unique_share < 0.8, kernels)
        return plan_pooled(bags, parts, by_rows, hashed, kernels)
