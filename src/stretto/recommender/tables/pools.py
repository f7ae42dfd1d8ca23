"""The owner's side of lookups: fetch the requested rows of a pool, sum them, and collect their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.recommender.placement import TableShard, TableSpec
from stretto.recommender.stores.store import FetchedRows, GrowingStore, RowStore
from stretto.recommender.tables.exchange import PoolRequest
from stretto.recommender.tables.ids.hash import HashIds
from stretto.recommender.tables.kernels.plain import Grouped, Kernels
from stretto.recommender.tables.shard_map import Pool


@dataclass(frozen=True)
class LocalShard:
    """A shard with its storage: its local row l is row `base` + l of `store`. Of a hash table, `ids` maps ids
    to local rows.
    """

    shard: TableShard
    store: RowStore
    base: int
    ids: HashIds | None = None

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """Local rows [start, stop) on the CPU: `weight` [rows, width] and each state by name, [rows, width]
        or [rows].
        """
        return self.store.read(self.base + start, self.base + stop)

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Sets local rows from `start` on; states without a value are kept."""
        self.store.write(self.base + start, values)


InitialValues = Callable[[TableSpec, Tensor, int, int], dict[str, Tensor]]
"""(table, ids or rows [n], first column, column after the last) to what a store keeps of these rows."""


@dataclass(kw_only=True)
class LocalPool:
    """A pool of this rank with its storage.

    Attributes:
        table: of the first shard.
        dtype: of the sums.
        ids: of a hash table, its map of ids to rows.
        initial_values: of a hash table, the values of rows that are new.
    """

    pool: Pool
    store: RowStore
    kernels: Kernels
    table: TableSpec
    dtype: torch.dtype
    ids: HashIds | None = None
    initial_values: InitialValues | None = None

    @property
    def shards(self) -> list[LocalShard]:
        return [
            LocalShard(shard, self.store, base, self.ids)
            for shard, base in zip(self.pool.shards, self.pool.bases, strict=True)
        ]

    def admit(self, request: PoolRequest, step: int, train: bool) -> PoolRequest:
        """A request of a hash table, by rows in place of ids. Ids without a row are dropped, so that they add
        zeros to their bag.

        In training, ids are counted, and those that reach the admission threshold get a row.
        """
        assert self.ids is not None
        if not train:
            rows = self.ids.peek(request.rows)
        else:
            admitted = self.ids.rows(request.rows, step)
            rows = admitted.rows
            self._initialise(self.ids.extent, admitted.fresh_ids, admitted.fresh_rows)
        has_row = rows >= 0
        if bool(has_row.all()):
            return replace(request, rows=rows)
        kept_before = torch.nn.functional.pad(torch.cumsum(has_row, 0), (1, 0))
        scale = None if request.scale is None else request.scale[has_row]
        return replace(request, rows=rows[has_row], offsets=kept_before[request.offsets], scale=scale)

    def _initialise(self, extent: int, ids: Tensor, rows: Tensor) -> None:
        """Grows the store to `extent` rows and sets the initial values of new ones."""
        store, shard = self.store, self.pool.shards[0]
        assert isinstance(store, GrowingStore)
        assert self.initial_values is not None
        store.grow(extent)
        if len(rows):
            store.set(rows, self.initial_values(self.table, ids, shard.start, shard.stop))


@dataclass(kw_only=True)
class Lookups:
    """The lookups of a batch in one pool of this rank, whose rows are being fetched or are there.

    Attributes:
        slots: [n] where in the store's tensors each requested row is, once fetched.
        gradient: [bags, width], of the sums, once received.
    """

    local: LocalPool
    request: PoolRequest
    fetched: FetchedRows
    slots: Tensor | None = None
    gradient: Tensor | None = None
    _grouped: Grouped | None = None

    @classmethod
    def start(cls, local: LocalPool, request: PoolRequest) -> Lookups:
        """Starts fetching the rows."""
        return cls(local=local, request=request, fetched=local.store.fetch(request.rows))

    def sums(self) -> Tensor:
        """The pooled rows [bags, width]. Waits for the rows."""
        return self.local.kernels.lookup(
            self.local.store.weight,
            self._wait(),
            self.request.offsets,
            self.request.scale,
            self.local.dtype,
        )

    def grouped(self) -> Grouped:
        """The lookups grouped by row of the store; needs no gradient."""
        if self._grouped is None:
            self._grouped = self.local.kernels.group(self.request.rows)
        return self._grouped

    def release(self) -> None:
        """Lets the store evict the rows."""
        self._wait()  # the store expects a fetch to be completed before it is released
        self.local.store.release(self.fetched)

    def _wait(self) -> Tensor:
        if self.slots is None:
            self.slots = self.fetched.slots()
        return self.slots
