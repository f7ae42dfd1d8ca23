"""Applies a table optimiser to the rows that a batch looked up, on the ranks that store them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.device import moved
from stretto.recommender.optim.rules import Adagrad, LazyAdam, RowwiseAdagrad, Sgd, SplitSgd, TableRule
from stretto.recommender.tables.exchange import exchange
from stretto.recommender.tables.kernels.cpu import CompiledKernels
from stretto.recommender.tables.kernels.plain import Grouped, Kernels, bags_of, sum_by_row
from stretto.recommender.tables.pools import LocalPool, LocalShard, PoolLookups
from stretto.recommender.tables.shard_map import Pool, ShardMap
from stretto.recommender.tables.sharded import ShardedTables, TableBatch


class PoolSquares(NamedTuple):
    """Unique rows [u] of a pool in a step, ascending, and the sum of squares [u] of their gradients over the
    columns of this shard."""

    pool: Pool
    rows: Tensor
    squares: Tensor


class RowMeanSquares:
    """Mean squares of rows' gradients over all columns, for tables that are split column-wise over ranks.

    Args:
        empty: a tensor without elements, of the gradients' dtype and device.

    Attributes:
        needed: True if any rank has column-wise shards.
    """

    def __init__(self, shard_map: ShardMap, rank: int, group: ProcessGroup | None, empty: Tensor) -> None:
        self._shard_map = shard_map
        self._rank = rank
        self._group = group
        self._empty = empty
        self._ranks = {  # ranks of each table that is split column-wise
            table: sorted({part.rank for part in parts})
            for table, parts in enumerate(shard_map.parts)
            if len(parts) > 1 and not shard_map.by_rows[table]
        }
        self.needed = bool(self._ranks)

    def means(self, pools: Sequence[PoolSquares]) -> list[Tensor]:
        """Return the mean squares [u] over all columns of the table, for each of `pools`. Collective.

        Args:
            pools: all pools of column-wise shards of this rank.
        """
        ranges = list[list[tuple[int, int, int]]]()  # for each shard of each pool: table, range of `rows`
        sums = dict[int, Tensor]()
        for pool, rows, squares in pools:
            if pool.hashed:
                shards = [(pool.shards[0].table, 0, len(rows))]
            else:
                edges = moved(torch.tensor([*pool.bases, pool.rows]), rows.device)
                cuts = torch.bucketize(edges, rows).tolist()
                shards = [(shard.table, cuts[i], cuts[i + 1]) for i, shard in enumerate(pool.shards)]
            for table, first, last in shards:
                part = squares[first:last]
                sums[table] = sums[table] + part if table in sums else part
            ranges.append(shards)
        # exchange the sums of each table with the other ranks that have columns of it
        shared = [
            [t for t in sorted(sums) if rank in self._ranks[t] and rank != self._rank]
            for rank in range(self._shard_map.world)
        ]
        pieces = [sums[table] for tables in shared for table in tables]
        sizes = [sum(len(sums[table]) for table in tables) for tables in shared]
        received = dict[tuple[int, int], Tensor]()
        if self._group is not None:
            send = torch.cat(pieces) if pieces else self._empty
            from_ranks = exchange(self._group, send, sizes, sizes).split()
            for rank, (part, tables) in enumerate(zip(from_ranks, shared, strict=True)):
                parts = part.split([len(sums[table]) for table in tables])
                received |= {(table, rank): piece for table, piece in zip(tables, parts, strict=True)}
        means = dict[int, Tensor]()
        for table, local_sum in sums.items():
            total = torch.zeros_like(local_sum)
            for rank in self._ranks[table]:
                total += local_sum if rank == self._rank else received[table, rank]
            means[table] = total / self._shard_map.tables[table].dim
        return [torch.cat([means[table] for table, _, _ in shards]) for shards in ranges]


_CHUNK_ROWS = 4096  # rows updated at a time without compiled kernels, so that their gradients stay in cache

# rules with a fused compiled update: their options and states, in the order of the compiled function
_FUSED: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Sgd: ((), ()),
    Adagrad: (("eps",), ("sum",)),
    RowwiseAdagrad: (("eps",), ("sum",)),
    LazyAdam: (("beta1", "beta2", "eps"), ("first", "second", "count")),
    SplitSgd: ((), ("low",)),
}


@torch.no_grad()
def update_rows(
    rule: TableRule,
    kernels: Kernels,
    weight: Tensor,
    states: dict[str, Tensor],
    slots: Tensor,
    offsets: Tensor,
    gradient: Tensor,
    lr: float,
    scale: Tensor | None = None,
    *,
    grouped: Grouped | None = None,
    mean_square: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """Update the rows that were looked up, each once, in place by their summed gradients.

    Args:
        slots, offsets, scale: as passed to the lookup: [n], [bags + 1], [n].
        gradient: [bags, width], gradient of the sums that the lookup returned.
        grouped: `kernels.group(slots)`, if it was computed before.
        mean_square: [u], mean squares over all columns in the order of `grouped.rows`, if this store has only
            some of the columns and the rule has a `row_statistic`; already times `factor` squared.
        factor: multiplies all gradients, for clipping.
    """
    if not len(slots):
        return
    grouped = kernels.group(slots) if grouped is None else grouped
    # gradients are summed in the dtype of the weight; for a split weight in float32, or float64 if they are
    dtype = weight.dtype
    if dtype == torch.bfloat16:
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    gradient = gradient.to(dtype)
    # fused updates exist for exactly these rules, since a subclass may override the update, and for
    # contiguous tensors on the CPU
    dtypes = (torch.bfloat16,) if type(rule) is SplitSgd else (torch.float32, torch.float64)
    tensors = (weight, *states.values())
    if (
        isinstance(kernels, CompiledKernels)
        and type(rule) in _FUSED
        and weight.dtype in dtypes
        and all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors)
    ):
        names, state_names = _FUSED[type(rule)]
        kernels.update(
            rule=rule.name,
            options=(float(lr), float(factor), *(float(getattr(rule, name)) for name in names)),
            weight=weight,
            states=[states[name] for name in state_names],
            grouped=grouped,
            offsets=offsets,
            gradient=gradient,
            scale=scale,
            mean_square=mean_square,
        )
        return
    bags = bags_of(offsets, len(slots))
    rows = len(grouped.rows)
    # on a CPU, chunks of rows that fit in its cache
    chunk = _CHUNK_ROWS if grouped.rows.device.type == "cpu" and rows > _CHUNK_ROWS else rows
    for first in range(0, rows, chunk):
        part = grouped
        if chunk < rows:
            starts = grouped.starts[first : first + chunk + 1]
            lookups = slice(int(starts[0]), int(starts[-1]))
            part = Grouped(grouped.rows[first : first + chunk], grouped.order[lookups], starts - starts[0])
        total = sum_by_row(gradient, bags, part, scale).mul_(factor)
        means = None if mean_square is None else mean_square[first : first + len(part.rows)]
        rule.apply(weight, states, part.rows, total, lr=lr, mean_square=means)


class PoolGradient(NamedTuple):
    """The gradients of a pool's unique rows.

    Attributes:
        slots: [u], slot of each row in the store's tensors.
        gradient: [u, width].
        rows: [u], rows of the pool's store; ascending in column-wise shards.
    """

    local: LocalPool
    slots: Tensor
    gradient: Tensor
    rows: Tensor


class TableUpdater:
    """Applies an optimiser to the rows of a batch.

    Args:
        group: all ranks, for the row statistics of column-wise shards.
    """

    def __init__(self, tables: ShardedTables, rule: TableRule, group: ProcessGroup | None) -> None:
        self.tables, self.rule = tables, rule
        self._statistic = None
        if rule.row_statistic:
            empty = torch.empty(0, dtype=tables.dtype, device=tables.device)
            self._statistic = RowMeanSquares(tables.shard_map, tables.rank, group, empty)

    def update(self, batch: TableBatch, lr: float) -> None:
        """Update all rows of a batch whose gradients were received; row gradients are not materialised."""
        columns = [lookups for lookups in batch.lookups if self._needs_row_statistic(lookups)]
        for lookups in batch.lookups:
            if not self._needs_row_statistic(lookups):
                self._update_pool(lookups, lr)
        for lookups in batch.replicated:
            slots, offsets, gradient, scale = lookups.receive_update()
            store = lookups.local.store
            update_rows(
                rule=self.rule,
                kernels=self.tables.kernels,
                weight=store.weight,
                states=store.states,
                slots=slots,
                offsets=offsets,
                gradient=gradient,
                lr=lr,
                scale=scale,
            )
        if self._statistic is not None and self._statistic.needed:
            pools = list[PoolSquares]()
            for lookups in columns:  # the gradients of rows are not materialised
                assert lookups.gradient is not None
                grouped, request = lookups.grouped(), lookups.request
                squares = lookups.local.kernels.squares(
                    lookups.gradient, request.offsets, grouped, request.scale
                )
                pools.append(PoolSquares(lookups.local.pool, grouped.rows, squares))
            for lookups, means in zip(columns, self._statistic.means(pools), strict=True):
                self._update_pool(lookups, lr, means)

    def _needs_row_statistic(self, lookups: PoolLookups) -> bool:
        return lookups.local.pool.column_split and self._statistic is not None

    def _update_pool(self, lookups: PoolLookups, lr: float, mean_square: Tensor | None = None) -> None:
        """Update one pool; `mean_square` is over all columns, in the order of rows."""
        slots = lookups.slots
        gradient = lookups.gradient
        grouped = lookups.grouped()
        assert slots is not None
        assert gradient is not None
        if slots is not lookups.request.rows:  # a cache, whose slots are not in the order of rows
            if mean_square is not None:
                mean_square = mean_square[torch.argsort(slots[grouped.first()])]
            grouped = lookups.local.kernels.group(slots)
        store, request = lookups.local.store, lookups.request
        update_rows(
            rule=self.rule,
            kernels=lookups.local.kernels,
            weight=store.weight,
            states=store.states,
            slots=slots,
            offsets=request.offsets,
            gradient=gradient,
            lr=lr,
            scale=request.scale,
            grouped=grouped,
            mean_square=mean_square,
        )

    def pool_gradients(self, batch: TableBatch) -> list[PoolGradient]:
        """Return the gradients of all rows, which clipping and verification need before the update."""
        sums = list[PoolGradient]()
        for lookups in batch.lookups:
            assert lookups.slots is not None
            assert lookups.gradient is not None
            grouped, request = lookups.grouped(), lookups.request
            total = lookups.local.kernels.segment_sum(
                lookups.gradient, request.offsets, grouped, request.scale
            )
            sums.append(PoolGradient(lookups.local, lookups.slots[grouped.first()], total, grouped.rows))
        for lookups in batch.replicated:
            slots, offsets, gradient, scale = lookups.receive_update()
            grouped = self.tables.kernels.group(slots)
            total = self.tables.kernels.segment_sum(gradient, offsets, grouped, scale)
            sums.append(PoolGradient(lookups.local, grouped.rows, total, lookups.rows_of(grouped)))
        return sums

    def norm_squared(self, pool_gradients: list[PoolGradient]) -> Tensor:
        """Return the squared norm of this rank's gradients; replicated tables count on rank 0 only."""
        squares = [
            part.gradient.double().square().sum()
            for part in pool_gradients
            if not part.local.pool.replicated or self.tables.rank == 0
        ]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def apply(self, pool_gradients: list[PoolGradient], lr: float, factor: float = 1.0) -> None:
        """Update all rows by their gradients times `factor`, which scales them in place."""
        if factor != 1.0:
            for part in pool_gradients:
                part.gradient.mul_(factor)
        means = dict[int, Tensor]()
        if self._statistic is not None and self._statistic.needed:
            columns = [part for part in pool_gradients if part.local.pool.column_split]
            pools = [
                PoolSquares(part.local.pool, part.rows, part.gradient.square().sum(1)) for part in columns
            ]
            means = {id(part): mean for part, mean in zip(columns, self._statistic.means(pools), strict=True)}
        for part in pool_gradients:
            store = part.local.store
            self.rule.apply(
                store.weight,
                store.states,
                part.slots,
                part.gradient,
                lr=lr,
                mean_square=means.get(id(part)),
            )


def gradients_by_shard(pool_gradients: list[PoolGradient]) -> list[tuple[LocalShard, Tensor, Tensor]]:
    """For each shard: the shard, its local rows [u], and their gradient [u, width]."""
    records = list[tuple[LocalShard, Tensor, Tensor]]()
    for part in pool_gradients:
        for shard in part.local.shards:
            last = shard.base + shard.shard.rows if not part.local.pool.hashed else 2**62
            mask = (part.rows >= shard.base) & (part.rows < last)
            records.append((shard, part.rows[mask] - shard.base, part.gradient[mask].clone()))
    return records
