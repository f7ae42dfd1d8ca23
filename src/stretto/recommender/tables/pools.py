"""The owner's side of lookups: fetch the requested rows of a pool, sum them, and route their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.recommender.placement import TableShard, TableSpec
from stretto.recommender.stores.store import Fetched, GrowingStore, RowStore
from stretto.recommender.tables.exchange import Asked
from stretto.recommender.tables.ids.hash import HashIds
from stretto.recommender.tables.kernels.plain import Grouped, Kernels
from stretto.recommender.tables.shard_map import Pool


@dataclass(frozen=True)
class HeldShard:
    """The shard's own row l is row `base` + l of `store`; of a hash table, `ids` says whose row that is."""

    shard: TableShard
    store: RowStore
    base: int
    ids: HashIds | None = None

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """Own rows [start, stop) on the CPU: `weight` [rows, width] and each state by name, [rows, width] or
        [rows].
        """
        return self.store.read(self.base + start, self.base + stop)

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Set own rows from `start` on; what is not named stays."""
        self.store.write(self.base + start, values)


Values = Callable[[TableSpec, Tensor, int, int], dict[str, Tensor]]  # of ids of a table's columns


@dataclass(kw_only=True)
class HeldPool:
    """A pool with what it holds.

    Attributes:
        dtype: of sums.
        ids: of a hash table, which row an id has.
        values: initial values of new rows of a hash table.
    """

    pool: Pool
    store: RowStore
    kernels: Kernels
    table: TableSpec
    dtype: torch.dtype
    ids: HashIds | None = None
    values: Values | None = None

    @property
    def held(self) -> list[HeldShard]:
        """Its shards."""
        return [
            HeldShard(shard, self.store, base, self.ids)
            for shard, base in zip(self.pool.shards, self.pool.bases, strict=True)
        ]

    def admit(self, asked: Asked, step: int, train: bool) -> Asked:
        """What a hash table is asked for, by rows: ids without a row are left out, which is zeros."""
        assert self.ids is not None
        if not train:
            rows = self.ids.peek(asked.rows)
        else:
            admitted = self.ids.rows(asked.rows, step)
            rows = admitted.rows
            self._begin(self.ids.extent, admitted.fresh_ids, admitted.fresh_rows)
        known = rows >= 0
        if bool(known.all()):
            return replace(asked, rows=rows)
        before = torch.nn.functional.pad(torch.cumsum(known, 0), (1, 0))
        scale = None if asked.scale is None else asked.scale[known]
        return replace(asked, rows=rows[known], offsets=before[asked.offsets], scale=scale)

    def _begin(self, extent: int, ids: Tensor, rows: Tensor) -> None:
        """Initial values of rows that are new, in a store of `extent` rows."""
        store, shard = self.store, self.pool.shards[0]
        assert isinstance(store, GrowingStore)
        assert self.values is not None
        store.grow(extent)
        if not len(rows):
            return
        store.set(rows, self.values(self.table, ids, shard.start, shard.stop))


@dataclass(kw_only=True)
class Lookups:
    """What a batch asks of one pool, with its rows on their way or there.

    Attributes:
        gradient: [bags, width] once it has come; of what was answered.
    """

    held: HeldPool
    asked: Asked
    fetched: Fetched
    slots: Tensor | None = None
    gradient: Tensor | None = None
    _grouped: Grouped | None = None

    @classmethod
    def of(cls, held: HeldPool, asked: Asked) -> Lookups:
        """Begin to bring the rows."""
        return cls(held=held, asked=asked, fetched=held.store.fetch(asked.rows))

    def sums(self) -> Tensor:
        """[bags, width]."""
        if self.slots is None:
            self.slots = self.fetched.slots()
        return self.held.kernels.lookup(
            self.held.store.weight, self.slots, self.asked.offsets, self.asked.scale, self.held.dtype
        )

    def grouped(self) -> Grouped:
        """The lookups by row of the store, for which no gradient is needed yet."""
        if self._grouped is None:
            self._grouped = self.held.kernels.group(self.asked.rows)
        return self._grouped

    def release(self) -> None:
        """Nobody needs the rows any more."""
        if self.slots is None:
            self.slots = self.fetched.slots()  # what was begun is finished
        self.held.store.release(self.fetched)
