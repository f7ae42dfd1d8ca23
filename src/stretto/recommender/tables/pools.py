"""Lookups on the rank that stores the rows: fetch the rows of a pool, sum them, collect gradients."""

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
    """A shard with its storage: its local row l is row `base` + l of `store`. For a hash table, `ids` maps
    ids to local rows."""

    shard: TableShard
    store: RowStore
    base: int
    ids: HashIds | None = None

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """Read local rows [start, stop) to the CPU: `weight` [rows, width] and each state by name, [rows,
        width] or [rows]."""
        return self.store.read(self.base + start, self.base + stop)

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Set local rows from `start` on; states without a value are unchanged."""
        self.store.write(self.base + start, values)


InitialValues = Callable[[TableSpec, Tensor, int, int], dict[str, Tensor]]
"""Maps (table, ids or rows [n], first column, end column) to the stored tensors of these rows."""


@dataclass(kw_only=True)
class LocalPool:
    """A pool of this rank with its storage.

    Attributes:
        table: table of the first shard.
        dtype: dtype of the sums.
        ids: for a hash table, its map of ids to rows.
        initial_values: for a hash table, the values of new rows.
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
        """Replace the ids of a request to a hash table by rows. Ids without a row are dropped, so that they
        add zeros to their bag.

        In training, ids are counted, and those that reach the admission threshold get a row.
        """
        assert self.ids is not None
        if not train:
            rows = self.ids.peek(request.rows)
        else:
            rows, fresh_ids, fresh_rows = self.ids.rows(request.rows, step)
            store, shard = self.store, self.pool.shards[0]
            assert isinstance(store, GrowingStore)
            assert self.initial_values is not None
            store.grow(self.ids.extent)
            if len(fresh_rows):
                values = self.initial_values(self.table, fresh_ids, shard.start, shard.stop)
                store.set(fresh_rows, values)
        rows, offsets, scale = drop_missing(rows, request.offsets, request.scale)
        return replace(request, rows=rows, offsets=offsets, scale=scale)


def drop_missing(rows: Tensor, offsets: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return bags without the ids that have no row: -1 in `rows`; arguments as for `Kernels.lookup`."""
    has_row = rows >= 0
    if bool(has_row.all()):
        return rows, offsets, scale
    rows_before = torch.nn.functional.pad(torch.cumsum(has_row, 0), (1, 0))
    return rows[has_row], rows_before[offsets], None if scale is None else scale[has_row]


@dataclass(kw_only=True)
class PoolLookups:
    """The lookups of a batch in one pool of this rank, whose rows are being fetched.

    Attributes:
        slots: [n], slot of each requested row in the store's tensors, once fetched.
        gradient: [bags, width], gradient of the sums, once received.
    """

    local: LocalPool
    request: PoolRequest
    fetched: FetchedRows
    slots: Tensor | None = None
    gradient: Tensor | None = None
    _grouped: Grouped | None = None

    @classmethod
    def start(cls, local: LocalPool, request: PoolRequest) -> PoolLookups:
        """Start fetching the rows."""
        return cls(local=local, request=request, fetched=local.store.fetch(request.rows))

    def sums(self) -> Tensor:
        """Wait for the rows and return the pooled rows [bags, width]."""
        return self.local.kernels.lookup(
            self.local.store.weight,
            self._wait(),
            self.request.offsets,
            self.request.scale,
            self.local.dtype,
        )

    def grouped(self) -> Grouped:
        """Return the lookups grouped by row of the store; needs no gradient."""
        if self._grouped is None:
            self._grouped = self.local.kernels.group(self.request.rows)
        return self._grouped

    def release(self) -> None:
        """Let the store evict the rows."""
        self._wait()  # the store expects a fetch to be completed before it is released
        self.local.store.release(self.fetched)

    def _wait(self) -> Tensor:
        if self.slots is None:
            self.slots = self.fetched.slots()
        return self.slots
