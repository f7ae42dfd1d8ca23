"""The update of embedding tables: the rows that a batch saw, on the ranks that have them."""

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
from stretto.recommender.tables.pools import HeldPool, HeldShard, Lookups
from stretto.recommender.tables.shard_map import Pool, Wiring
from stretto.recommender.tables.sharded import ShardedTables, TableBatch


@dataclass
class Seen:
    """Rows [u] of a pool that a step saw, ascending, and the squares [u] of their gradients' own columns."""

    pool: Pool
    rows: Tensor
    squares: Tensor


class RowStatistic:
    """Adds up squares over the parts of tables that are split by columns.

    Args:
        empty: a tensor without elements, of the gradients' type and device.

    Attributes:
        needed: there are such tables, on whichever rank.
    """

    def __init__(self, wiring: Wiring, rank: int, group: ProcessGroup | None, empty: Tensor) -> None:
        self._wiring = wiring
        self._rank = rank
        self._group = group
        self._empty = empty
        self._ranks = {  # of each table that is split by columns
            number: sorted({part.rank for part in parts})
            for number, parts in enumerate(wiring.parts)
            if len(parts) > 1 and not wiring.by_rows[number]
        }
        self.needed = bool(self._ranks)

    def means(self, seen: Sequence[Seen]) -> list[Tensor]:
        """The mean squares [u] over whole rows, of each of this rank's pools of column shards. Collective
        over all ranks.

        Args:
            seen: of all pools of column shards that this rank has.
        """
        spans = [_spans(one) for one in seen]
        sums = dict[int, Tensor]()
        for one, shards in zip(seen, spans, strict=True):
            for table, first, last in shards:
                part = one.squares[first:last]
                sums[table] = sums[table] + part if table in sums else part
        totals = self._added(sums)
        return [torch.cat([totals[table] for table, _, _ in shards]) for shards in spans]

    def _added(self, sums: dict[int, Tensor]) -> dict[int, Tensor]:
        """The means by table, from this rank's squares."""
        world = self._wiring.world
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
        for table, mine in sums.items():
            total = torch.zeros_like(mine)
            for rank in self._ranks[table]:
                total += mine if rank == self._rank else arrived[table, rank]
            totals[table] = total / self._wiring.tables[table].dim
        return totals


def _spans(one: Seen) -> list[tuple[int, int, int]]:
    """Of each shard of the pool: its table, and where its rows begin and end."""
    pool = one.pool
    if pool.hashed:
        return [(pool.shards[0].table, 0, len(one.rows))]
    edges = torch.tensor([*pool.bases, pool.rows], device=one.rows.device)
    at = torch.searchsorted(one.rows, edges).tolist()
    return [(shard.table, at[i], at[i + 1]) for i, shard in enumerate(pool.shards)]


_AT_ONCE = 4096  # rows, without compiled kernels

# of a compiled rule: its numbers beside the rate, and its states, in the compiled function's order
_COMPILED: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {
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
    """Update in place the rows that were looked up, each once, by its summed gradient.

    Args:
        slots, offsets, scale: as the lookup had them: [n], [bags + 1], [n].
        gradient: [bags, width], of what the lookup returned.
        grouped: `kernels.group(slots)`, where it is known already.
        mean_square: [u], of the whole rows in the order of `grouped.rows`, where this store has a part of
            their columns and the rule has a `row_statistic`; already times `factor` squared.
        factor: of all gradients, as clipping wants.
    """
    if not len(slots):
        return
    grouped = kernels.group(slots) if grouped is None else grouped
    if _is_compiled(rule, kernels, weight, states):
        assert isinstance(kernels, CompiledKernels)
        names, kept = _COMPILED[type(rule)]
        kernels.update(
            rule=rule.name,
            numbers=(float(lr), float(factor), *(float(getattr(rule, name)) for name in names)),
            weight=weight,
            states=[states[name] for name in kept],
            grouped=grouped,
            offsets=offsets,
            gradient=gradient.to(_of_gradient(weight, gradient)),
            scale=scale,
            mean_square=mean_square,
        )
        return
    gradient = gradient.to(_of_gradient(weight, gradient))
    bags = bags_of(offsets)
    for first, part in _parts(grouped):
        total = sum_by_row(gradient, bags, part, scale).mul_(factor)
        means = None if mean_square is None else mean_square[first : first + len(part.rows)]
        rule.apply(weight, states, part.rows, total, lr, means)


def _parts(grouped: Grouped) -> Iterator[tuple[int, Grouped]]:
    """Some rows after others, with the number of the first: on a CPU as many as caches hold sums of."""
    if grouped.rows.device.type != "cpu" or len(grouped.rows) <= _AT_ONCE:
        yield 0, grouped
        return
    for first in range(0, len(grouped.rows), _AT_ONCE):
        starts = grouped.starts[first : first + _AT_ONCE + 1]
        run = slice(int(starts[0]), int(starts[-1]))
        yield (
            first,
            Grouped(grouped.rows[first : first + _AT_ONCE], grouped.order[run], starts - starts[0]),
        )


def _of_gradient(weight: Tensor, gradient: Tensor) -> torch.dtype:
    """The weight's type; of a split weight float32, or float64 where gradients are."""
    if weight.dtype != torch.bfloat16:
        return weight.dtype
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32


def _is_compiled(rule: TableRule, kernels: Kernels, weight: Tensor, states: dict[str, Tensor]) -> bool:
    """Exactly these rules (one that derives from them may do something else), in memory in one run."""
    wanted = (torch.bfloat16,) if type(rule) is SplitSgd else (torch.float32, torch.float64)
    return (
        isinstance(kernels, CompiledKernels)
        and type(rule) in _COMPILED
        and weight.dtype in wanted
        and all(
            tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in (weight, *states.values())
        )
    )


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
            update(
                rule=self.rule,
                kernels=kernels,
                weight=store.weight,
                states=store.states,
                slots=slots,
                offsets=offsets,
                gradient=gradient,
                lr=lr,
            )
        if self._statistic is not None and self._statistic.needed:
            means = self._statistic.means([_seen(lookups) for lookups in columns])
            for lookups, squares in zip(columns, means, strict=True):
                self._update(lookups, lr, squares)

    def _is_split(self, lookups: Lookups) -> bool:
        return lookups.held.pool.columns and self._statistic is not None

    def _update(self, lookups: Lookups, lr: float, squares: Tensor | None = None) -> None:
        """Of one pool; `squares`: the mean squares of whole rows, in the order of rows."""
        slots = lookups.slots
        gradient = lookups.gradient
        grouped = lookups.grouped()
        assert slots is not None
        assert gradient is not None
        if slots is not lookups.asked.rows:  # of a cache, whose slots are in an order of their own
            place = slots[grouped.first()]
            squares = None if squares is None else squares[torch.argsort(place)]
            grouped = lookups.held.kernels.group(slots)
        store, asked = lookups.held.store, lookups.asked
        arguments = (store.weight, store.states, slots, asked.offsets, gradient, lr, asked.scale)
        update(self.rule, lookups.held.kernels, *arguments, grouped=grouped, mean_square=squares)

    def summed(self, batch: TableBatch) -> list[Summed]:
        """The gradients of all rows, for what must see them before they are applied."""
        sums = self._summed_pools(batch)
        for copied in batch.copied:
            slots, offsets, gradient = copied.update_by()
            grouped = self.tables.kernels.group(slots)
            total = self.tables.kernels.segment_sum(gradient, offsets, grouped)
            sums.append(Summed(copied.held, grouped.rows, total, copied.rows_of(grouped)))
        return sums

    def _summed_pools(self, batch: TableBatch) -> list[Summed]:
        sums = list[Summed]()
        for lookups in batch.lookups:
            assert lookups.slots is not None
            assert lookups.gradient is not None
            grouped, asked = lookups.grouped(), lookups.asked
            total = lookups.held.kernels.segment_sum(lookups.gradient, asked.offsets, grouped, asked.scale)
            sums.append(Summed(lookups.held, lookups.slots[grouped.first()], total, grouped.rows))
        return sums

    def norm_squared(self, summed: list[Summed]) -> Tensor:
        """The sum of squares of this rank's part of the tables' gradients; copies count on the first rank."""
        squares = [
            one.gradient.double().square().sum()
            for one in summed
            if not one.held.pool.copied or self.tables.rank == 0
        ]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def apply(self, summed: list[Summed], lr: float, factor: float = 1.0) -> None:
        """Update by summed gradients times `factor`."""
        if factor != 1.0:
            for one in summed:
                one.gradient.mul_(factor)
        squares = dict[int, Tensor]()
        if self._statistic is not None and self._statistic.needed:
            columns = [one for one in summed if one.held.pool.columns]
            seen = [Seen(one.held.pool, one.rows, one.gradient.square().sum(1)) for one in columns]
            means = self._statistic.means(seen)
            squares = {id(one): mean for one, mean in zip(columns, means, strict=True)}
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
    records = list[tuple[HeldShard, Tensor, Tensor]]()
    for one in summed:
        for shard in one.held.held:
            last = shard.base + shard.shard.rows if not one.held.pool.hashed else 2**62
            here = (one.rows >= shard.base) & (one.rows < last)
            records.append((shard, one.rows[here] - shard.base, one.gradient[here].clone()))
    return records
