"""The update of embedding tables: the rows that a batch saw, on the ranks that have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.optim.tables.rule import TableRule
from stretto.optim.tables.statistic import RowStatistic
from stretto.optim.tables.update import update
from stretto.parallel.tables.batch import TableBatch
from stretto.parallel.tables.held import HeldShard
from stretto.parallel.tables.pools import HeldPool
from stretto.parallel.tables.sharded import ShardedTables


@dataclass
class Summed:
    """The gradients of one pool's rows, each row once.

    Attributes:
        slots: [u], ascending.
        gradient: [u, width].
        rows: [u], the same as rows of the pool's store, where they were asked for.
    """

    held: HeldPool
    slots: Tensor
    gradient: Tensor
    rows: Tensor | None = None


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
        """Update all rows of the batch in place; its gradients have come. Sums of gradients are not kept, but
        for tables that are split by columns.
        """
        kernels = self.tables.kernels
        for lookups in batch.lookups:
            held = lookups.held
            if held.pool.columns and self._statistic is not None:
                continue
            slots, gradient, asked = lookups.slots, lookups.gradient, lookups.asked
            assert slots is not None
            assert gradient is not None
            store = held.store
            update(
                self.rule,
                kernels,
                store.weight,
                store.states,
                slots,
                asked.offsets,
                gradient,
                lr,
                asked.scale,
            )
        for copied in batch.copied:
            slots, offsets, gradient = copied.update_by()
            store = copied.held.store
            update(self.rule, kernels, store.weight, store.states, slots, offsets, gradient, lr)
        if self._statistic is not None and self._statistic.needed:
            self.apply([one for one in self._summed_pools(batch) if one.held.pool.columns], lr)

    def summed(self, batch: TableBatch, rows: bool = False) -> list[Summed]:
        """The gradients of all rows, for what must see them before they are applied.

        Args:
            rows: also say which rows they are.
        """
        found = list(self._summed_pools(batch, rows=rows, everything=True))
        for copied in batch.copied:
            slots, offsets, gradient = copied.update_by()
            grouped = self.tables.kernels.group(slots)
            total = self.tables.kernels.segment_sum(gradient, offsets, grouped)
            which = copied.rows_of(grouped) if rows else None
            found.append(Summed(copied.held, grouped.rows, total, which))
        return found

    def _summed_pools(self, batch: TableBatch, rows: bool = False, everything: bool = False) -> list[Summed]:
        kernels, found = self.tables.kernels, list[Summed]()
        for lookups in batch.lookups:
            if not everything and not lookups.held.pool.columns:
                continue
            assert lookups.slots is not None
            assert lookups.gradient is not None
            # by row, not by slot: parts of one table must list their rows in one order on all ranks
            grouped = kernels.group(lookups.asked.rows)
            total = kernels.segment_sum(lookups.gradient, lookups.asked.offsets, grouped, lookups.asked.scale)
            slots = lookups.slots[grouped.order[grouped.starts[:-1]]]
            found.append(Summed(lookups.held, slots, total, grouped.rows))
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
        squares = dict[int, Tensor]()
        for one in summed:
            if factor != 1.0:
                one.gradient.mul_(factor)
        if self._statistic is not None and self._statistic.needed:
            columns = [one for one in summed if one.held.pool.columns]
            squares = self._statistic.means(columns)
        for one in summed:
            store = one.held.store
            self.rule.apply(store.weight, store.states, one.slots, one.gradient, lr, squares.get(id(one)))


def recorded(summed: list[Summed]) -> list[tuple[HeldShard, Tensor, Tensor]]:
    """The gradients by shard: it, its own rows [u], and their gradient [u, width]."""
    found = list[tuple[HeldShard, Tensor, Tensor]]()
    for one in summed:
        assert one.rows is not None
        for shard in one.held.held:
            last = shard.base + shard.shard.rows if not one.held.pool.hashed else 2**62
            here = (one.rows >= shard.base) & (one.rows < last)
            found.append((shard, one.rows[here] - shard.base, one.gradient[here].clone()))
    return found
