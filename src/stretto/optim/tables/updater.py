"""The update of embedding tables: the rows that a batch saw, on the ranks that have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.optim.tables.rule import TableRule
from stretto.optim.tables.statistic import RowStatistic, Seen
from stretto.optim.tables.update import update
from stretto.parallel.tables.batch import TableBatch
from stretto.parallel.tables.held import HeldShard
from stretto.parallel.tables.pools import HeldPool, Lookups
from stretto.parallel.tables.sharded import ShardedTables


@dataclass
class Summed:
    """The gradients of one pool's rows, each row once.

    Attributes:
        slots: [u].
        gradient: [u, width].
        rows: [u], the same as rows of the pool's store, ascending where columns are split.
    """

    held: HeldPool
    slots: Tensor
    gradient: Tensor
    rows: Tensor


class TableUpdater:
    """Applies a rule to what a batch looked up.

    Args:
        group: of all ranks, for statistics of rows that are split by columns.
    """

    def __init__(self, tables: ShardedTables, rule: TableRule, group: ProcessGroup | None) -> None:
        self.tables, self.rule = tables, rule
        self._statistic = None
        if rule.row_statistic:
            empty = torch.empty(0, dtype=tables.dtype, device=tables.device)
            self._statistic = RowStatistic(tables.wiring, tables.rank, group, empty)

    def update(self, batch: TableBatch, lr: float) -> None:
        """Update all rows of the batch in place; its gradients have come. No row's gradient is kept."""
        columns = [one for one in batch.lookups if self._is_split(one)]
        for lookups in batch.lookups:
            if not self._is_split(lookups):
                self._update(lookups, lr)
        for copied in batch.copied:
            slots, offsets, gradient = copied.update_by()
            store, kernels = copied.held.store, self.tables.kernels
            update(self.rule, kernels, store.weight, store.states, slots, offsets, gradient, lr)
        if self._statistic is not None and self._statistic.needed:
            found = self._statistic.means([_seen(lookups) for lookups in columns])
            for lookups, squares in zip(columns, found, strict=True):
                self._update(lookups, lr, squares)

    def _is_split(self, lookups: Lookups) -> bool:
        return lookups.held.pool.columns and self._statistic is not None

    def _update(self, lookups: Lookups, lr: float, squares: Tensor | None = None) -> None:
        """Of one pool; `squares`: the mean squares of whole rows, in the order of rows."""
        slots, gradient, grouped = lookups.slots, lookups.gradient, lookups.grouped()
        assert slots is not None
        assert gradient is not None
        if slots is not lookups.asked.rows:  # of a cache, whose slots are in an order of their own
            place = slots[grouped.first()]
            squares = None if squares is None else squares[torch.argsort(place)]
            grouped = lookups.held.kernels.group(slots)
        store, asked = lookups.held.store, lookups.asked
        given = (store.weight, store.states, slots, asked.offsets, gradient, lr, asked.scale)
        update(self.rule, lookups.held.kernels, *given, grouped=grouped, mean_square=squares)

    def summed(self, batch: TableBatch) -> list[Summed]:
        """The gradients of all rows, for what must see them before they are applied."""
        found = self._summed_pools(batch)
        for copied in batch.copied:
            slots, offsets, gradient = copied.update_by()
            grouped = self.tables.kernels.group(slots)
            total = self.tables.kernels.segment_sum(gradient, offsets, grouped)
            found.append(Summed(copied.held, grouped.rows, total, copied.rows_of(grouped)))
        return found

    def _summed_pools(self, batch: TableBatch) -> list[Summed]:
        found = list[Summed]()
        for lookups in batch.lookups:
            assert lookups.slots is not None
            assert lookups.gradient is not None
            grouped, asked = lookups.grouped(), lookups.asked
            total = lookups.held.kernels.segment_sum(lookups.gradient, asked.offsets, grouped, asked.scale)
            found.append(Summed(lookups.held, lookups.slots[grouped.first()], total, grouped.rows))
        return found

    def norm_squared(self, summed: list[Summed]) -> Tensor:
        """The sum of squares of this rank's part of the tables' gradients; copies count on the first rank."""
        own = [
            one.gradient.double().square().sum()
            for one in summed
            if not one.held.pool.copied or self.tables.rank == 0
        ]
        return torch.stack(own).sum() if own else torch.zeros((), dtype=torch.float64)

    def apply(self, summed: list[Summed], lr: float, factor: float = 1.0) -> None:
        """Update by summed gradients times `factor`."""
        if factor != 1.0:
            for one in summed:
                one.gradient.mul_(factor)
        squares = dict[int, Tensor]()
        if self._statistic is not None and self._statistic.needed:
            columns = [one for one in summed if one.held.pool.columns]
            seen = [Seen(one.held.pool, one.rows, one.gradient.square().sum(1)) for one in columns]
            found = self._statistic.means(seen)
            squares = {id(one): mean for one, mean in zip(columns, found, strict=True)}
        for one in summed:
            store = one.held.store
            self.rule.apply(store.weight, store.states, one.slots, one.gradient, lr, squares.get(id(one)))


def _seen(lookups: Lookups) -> Seen:
    """The squares of a pool's rows, whose gradients are not kept."""
    assert lookups.gradient is not None
    grouped, asked = lookups.grouped(), lookups.asked
    squares = lookups.held.kernels.squares(lookups.gradient, asked.offsets, grouped, asked.scale)
    return Seen(lookups.held.pool, grouped.rows, squares)


def recorded(summed: list[Summed]) -> list[tuple[HeldShard, Tensor, Tensor]]:
    """The gradients by shard: it, its own rows [u], and their gradient [u, width]."""
    found = list[tuple[HeldShard, Tensor, Tensor]]()
    for one in summed:
        for shard in one.held.held:
            last = shard.base + shard.shard.rows if not one.held.pool.hashed else 2**62
            here = (one.rows >= shard.base) & (one.rows < last)
            found.append((shard, one.rows[here] - shard.base, one.gradient[here].clone()))
    return found
