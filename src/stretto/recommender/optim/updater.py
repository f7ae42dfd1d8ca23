"""Applies a table optimiser to the rows that a batch looked up, on the ranks that store them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.recommender.optim.rules import Adagrad, LazyAdam, RowwiseAdagrad, Sgd, SplitSgd, TableRule
from stretto.recommender.tables.exchange import exchange
from stretto.recommender.tables.kernels.cpu import CompiledKernels
from stretto.recommender.tables.kernels.plain import Grouped, Kernels, bags_of, sum_by_row
from stretto.recommender.tables.pools import LocalPool, LocalShard, Lookups
from stretto.recommender.tables.shard_map import Pool, ShardMap
from stretto.recommender.tables.sharded import ShardedTables, TableBatch


@dataclass
class PoolSquares:
    """Unique rows [u] of a pool in a step, ascending, and the sum of squares [u] of their gradients, over the
    columns of this shard.
    """

    pool: Pool
    rows: Tensor
    squares: Tensor


class RowMeanSquares:
    """Mean squares of whole rows' gradients, where the columns of a table are split over ranks.

    Args:
        empty: a tensor without elements, of the gradients' dtype and device.

    Attributes:
        needed: whether any rank has column shards.
    """

    def __init__(self, shard_map: ShardMap, rank: int, group: ProcessGroup | None, empty: Tensor) -> None:
        self._shard_map = shard_map
        self._rank = rank
        self._group = group
        self._empty = empty
        self._ranks = {  # of each table that is split by columns
            number: sorted({part.rank for part in parts})
            for number, parts in enumerate(shard_map.parts)
            if len(parts) > 1 and not shard_map.by_rows[number]
        }
        self.needed = bool(self._ranks)

    def means(self, squares_of: Sequence[PoolSquares]) -> list[Tensor]:
        """The mean squares [u] over all columns, of each of this rank's pools of column shards. Collective
        over all ranks.

        Args:
            squares_of: of every pool of column shards of this rank.
        """
        spans = [_row_ranges(each) for each in squares_of]
        sums = dict[int, Tensor]()
        for each, shards in zip(squares_of, spans, strict=True):
            for table, first, last in shards:
                part = each.squares[first:last]
                sums[table] = sums[table] + part if table in sums else part
        totals = self._sum_over_ranks(sums)
        return [torch.cat([totals[table] for table, _, _ in shards]) for shards in spans]

    def _sum_over_ranks(self, sums: dict[int, Tensor]) -> dict[int, Tensor]:
        """The means by table, from the sums over this rank's columns."""
        world = self._shard_map.world
        shared = [
            [t for t in sorted(sums) if rank in self._ranks[t] and rank != self._rank]
            for rank in range(world)
        ]
        pieces = [sums[table] for tables in shared for table in tables]
        sizes = [sum(len(sums[table]) for table in tables) for tables in shared]
        arrived = dict[tuple[int, int], Tensor]()
        if self._group is not None:
            send = torch.cat(pieces) if pieces else self._empty
            for rank, (part, tables) in enumerate(
                zip(exchange(self._group, send, sizes, sizes).split(), shared, strict=True)
            ):
                each = part.split([len(sums[table]) for table in tables])
                arrived |= {(table, rank): piece for table, piece in zip(tables, each, strict=True)}
        totals = dict[int, Tensor]()
        for table, local_sum in sums.items():
            total = torch.zeros_like(local_sum)
            for rank in self._ranks[table]:
                total += local_sum if rank == self._rank else arrived[table, rank]
            totals[table] = total / self._shard_map.tables[table].dim
        return totals


def _row_ranges(each: PoolSquares) -> list[tuple[int, int, int]]:
    """For each shard of the pool: its table, and the range of `rows` that belongs to it."""
    pool = each.pool
    if pool.hashed:
        return [(pool.shards[0].table, 0, len(each.rows))]
    edges = torch.tensor([*pool.bases, pool.rows], device=each.rows.device)
    at = torch.searchsorted(each.rows, edges).tolist()
    return [(shard.table, at[i], at[i + 1]) for i, shard in enumerate(pool.shards)]


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
def update(
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
    """Updates in place the rows that were looked up, each once, by their summed gradients.

    Args:
        slots, offsets, scale: as passed to the lookup: [n], [bags + 1], [n].
        gradient: [bags, width], of the sums that the lookup returned.
        grouped: `kernels.group(slots)`, if it was computed before.
        mean_square: [u], of the whole rows in the order of `grouped.rows`, where this store has only some of
            their columns and the rule has a `row_statistic`; already times `factor` squared.
        factor: multiplies all gradients, for clipping.
    """
    if not len(slots):
        return
    grouped = kernels.group(slots) if grouped is None else grouped
    if _can_fuse(rule, kernels, weight, states):
        assert isinstance(kernels, CompiledKernels)
        names, state_names = _FUSED[type(rule)]
        kernels.update(
            rule=rule.name,
            numbers=(float(lr), float(factor), *(float(getattr(rule, name)) for name in names)),
            weight=weight,
            states=[states[name] for name in state_names],
            grouped=grouped,
            offsets=offsets,
            gradient=gradient.to(_gradient_dtype(weight, gradient)),
            scale=scale,
            mean_square=mean_square,
        )
        return
    gradient = gradient.to(_gradient_dtype(weight, gradient))
    bags = bags_of(offsets)
    for first, part in _chunks(grouped):
        total = sum_by_row(gradient, bags, part, scale).mul_(factor)
        means = None if mean_square is None else mean_square[first : first + len(part.rows)]
        rule.apply(weight, states, part.rows, total, lr, means)


def _chunks(grouped: Grouped) -> Iterator[tuple[int, Grouped]]:
    """Chunks of the rows with the number of the first: on a CPU as many as fit in its cache."""
    if grouped.rows.device.type != "cpu" or len(grouped.rows) <= _CHUNK_ROWS:
        yield 0, grouped
        return
    for first in range(0, len(grouped.rows), _CHUNK_ROWS):
        starts = grouped.starts[first : first + _CHUNK_ROWS + 1]
        run = slice(int(starts[0]), int(starts[-1]))
        yield (
            first,
            Grouped(grouped.rows[first : first + _CHUNK_ROWS], grouped.order[run], starts - starts[0]),
        )


def _gradient_dtype(weight: Tensor, gradient: Tensor) -> torch.dtype:
    """The dtype to sum gradients in: that of the weight; of a split weight float32, or float64 if the
    gradients are.
    """
    if weight.dtype != torch.bfloat16:
        return weight.dtype
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32


def _can_fuse(rule: TableRule, kernels: Kernels, weight: Tensor, states: dict[str, Tensor]) -> bool:
    """Whether a fused update exists: for exactly these rules, since a subclass may override the update, and
    for contiguous tensors on the CPU.
    """
    wanted = (torch.bfloat16,) if type(rule) is SplitSgd else (torch.float32, torch.float64)
    return (
        isinstance(kernels, CompiledKernels)
        and type(rule) in _FUSED
        and weight.dtype in wanted
        and all(
            tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in (weight, *states.values())
        )
    )


@dataclass
class PoolGradient:
    """The gradients of a pool's unique rows.

    Attributes:
        slots: [u] in the store's tensors.
        gradient: [u, width].
        rows: [u] of the pool's store; ascending in column shards.
    """

    local: LocalPool
    slots: Tensor
    gradient: Tensor
    rows: Tensor


class TableUpdater:
    """Applies an optimiser to the rows of a batch.

    Args:
        group: of all ranks, for the row statistics of column shards.
    """

    def __init__(self, tables: ShardedTables, rule: TableRule, group: ProcessGroup | None) -> None:
        self.tables, self.rule = tables, rule
        self._statistic = None
        if rule.row_statistic:
            empty = torch.empty(0, dtype=tables.dtype, device=tables.device)
            self._statistic = RowMeanSquares(tables.shard_map, tables.rank, group, empty)

    def update(self, batch: TableBatch, lr: float) -> None:
        """Updates all rows of a batch whose gradients were received; row gradients are not materialised."""
        columns = [each for each in batch.lookups if self._needs_row_statistic(each)]
        for lookups in batch.lookups:
            if not self._needs_row_statistic(lookups):
                self._update(lookups, lr)
        for lookups in batch.replicated:
            slots, offsets, gradient, scale = lookups.update_by()
            store, kernels = lookups.local.store, self.tables.kernels
            update(
                rule=self.rule,
                kernels=kernels,
                weight=store.weight,
                states=store.states,
                slots=slots,
                offsets=offsets,
                gradient=gradient,
                lr=lr,
                scale=scale,
            )
        if self._statistic is not None and self._statistic.needed:
            means = self._statistic.means([_pool_squares(lookups) for lookups in columns])
            for lookups, squares in zip(columns, means, strict=True):
                self._update(lookups, lr, squares)

    def _needs_row_statistic(self, lookups: Lookups) -> bool:
        return lookups.local.pool.column_split and self._statistic is not None

    def _update(self, lookups: Lookups, lr: float, squares: Tensor | None = None) -> None:
        """Updates one pool; `squares`: mean squares of whole rows, in the order of rows."""
        slots = lookups.slots
        gradient = lookups.gradient
        grouped = lookups.grouped()
        assert slots is not None
        assert gradient is not None
        if slots is not lookups.request.rows:  # a cache, whose slots are not in the order of rows
            place = slots[grouped.first()]
            squares = None if squares is None else squares[torch.argsort(place)]
            grouped = lookups.local.kernels.group(slots)
        store, request = lookups.local.store, lookups.request
        arguments = (store.weight, store.states, slots, request.offsets, gradient, lr, request.scale)
        update(self.rule, lookups.local.kernels, *arguments, grouped=grouped, mean_square=squares)

    def pool_gradients(self, batch: TableBatch) -> list[PoolGradient]:
        """The gradients of all rows, for clipping and for verification, which need them before the update."""
        sums = self._sharded_gradients(batch)
        for lookups in batch.replicated:
            slots, offsets, gradient, scale = lookups.update_by()
            grouped = self.tables.kernels.group(slots)
            total = self.tables.kernels.segment_sum(gradient, offsets, grouped, scale)
            sums.append(PoolGradient(lookups.local, grouped.rows, total, lookups.rows_of(grouped)))
        return sums

    def _sharded_gradients(self, batch: TableBatch) -> list[PoolGradient]:
        sums = list[PoolGradient]()
        for lookups in batch.lookups:
            assert lookups.slots is not None
            assert lookups.gradient is not None
            grouped, request = lookups.grouped(), lookups.request
            total = lookups.local.kernels.segment_sum(
                lookups.gradient, request.offsets, grouped, request.scale
            )
            sums.append(PoolGradient(lookups.local, lookups.slots[grouped.first()], total, grouped.rows))
        return sums

    def norm_squared(self, pool_gradients: list[PoolGradient]) -> Tensor:
        """The squared norm of this rank's part of the gradients; replicated tables count on rank 0 only."""
        squares = [
            each.gradient.double().square().sum()
            for each in pool_gradients
            if not each.local.pool.replicated or self.tables.rank == 0
        ]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def apply(self, pool_gradients: list[PoolGradient], lr: float, factor: float = 1.0) -> None:
        """Updates all rows by their gradients times `factor`, which scales them in place."""
        if factor != 1.0:
            for each in pool_gradients:
                each.gradient.mul_(factor)
        squares = dict[int, Tensor]()
        if self._statistic is not None and self._statistic.needed:
            columns = [each for each in pool_gradients if each.local.pool.column_split]
            squares_of = [
                PoolSquares(each.local.pool, each.rows, each.gradient.square().sum(1)) for each in columns
            ]
            means = self._statistic.means(squares_of)
            squares = {id(each): mean for each, mean in zip(columns, means, strict=True)}
        for each in pool_gradients:
            store = each.local.store
            self.rule.apply(store.weight, store.states, each.slots, each.gradient, lr, squares.get(id(each)))


def _pool_squares(lookups: Lookups) -> PoolSquares:
    """The squares of a pool's rows, without materialising their gradients."""
    assert lookups.gradient is not None
    grouped, request = lookups.grouped(), lookups.request
    squares = lookups.local.kernels.squares(lookups.gradient, request.offsets, grouped, request.scale)
    return PoolSquares(lookups.local.pool, grouped.rows, squares)


def gradients_by_shard(pool_gradients: list[PoolGradient]) -> list[tuple[LocalShard, Tensor, Tensor]]:
    """For each shard: it, its local rows [u], and their gradient [u, width]."""
    records = list[tuple[LocalShard, Tensor, Tensor]]()
    for each in pool_gradients:
        for shard in each.local.shards:
            last = shard.base + shard.shard.rows if not each.local.pool.hashed else 2**62
            here = (each.rows >= shard.base) & (each.rows < last)
            records.append((shard, each.rows[here] - shard.base, each.gradient[here].clone()))
    return records
