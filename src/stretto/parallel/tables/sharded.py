"""Embedding tables of a job, over its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.errors import StrettoError
from stretto.layout.tables import Placements, TableSpec, physical_tables
from stretto.offload.rows.build import build_store
from stretto.offload.rows.store import RowStore, StateSpec
from stretto.parallel.tables.asking import Chooser
from stretto.parallel.tables.batch import TableBatch
from stretto.parallel.tables.held import HeldShard
from stretto.parallel.tables.ids.growing import GrowingStore
from stretto.parallel.tables.ids.hash import HashIds
from stretto.parallel.tables.ids.quotient import initial_rows_of_table
from stretto.parallel.tables.initial import initial_rows
from stretto.parallel.tables.jagged import Jagged
from stretto.parallel.tables.kernels.face import Kernels
from stretto.parallel.tables.pools import HeldPool
from stretto.parallel.tables.requests import layouts
from stretto.parallel.tables.wiring import Pool, wire

Encode = Callable[[Tensor], dict[str, Tensor]]
_AT_ONCE = 1 << 16  # rows that are initialised at a time


class ShardedTables:
    """What one rank has of all tables, and its way to the rest.

    Args:
        features: one table for each categorical feature, all of one dim.
        placements: of each table as it is stored.
        requests, vectors: groups of all ranks, for ids and for what is looked up; None where there is one.
        dtype: of the sums and of the job.
        weights: type that rows are kept and looked up in; None: `dtype`.
        wire: type of sums and gradients between ranks.
        states: of the update rule, by name.
        encode: values of rows to what a store keeps of them.
        seed: of the initial values.
        fresh: with initial values; otherwise a checkpoint follows.
        folder: for tables on disk.

    Raises:
        StrettoError: a placement that does not fit, or memory or disk that is too small.
    """

    def __init__(
        self,
        features: Sequence[TableSpec],
        placements: Placements,
        kernels: Kernels,
        *,
        rank: int = 0,
        world: int = 1,
        requests: ProcessGroup | None = None,
        vectors: ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        weights: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        states: Mapping[str, StateSpec] | None = None,
        encode: Encode | None = None,
        seed: int = 0,
        fresh: bool = True,
        folder: Path | None = None,
    ) -> None:
        self.features, self.kernels, self.rank = tuple(features), kernels, rank
        self.requests, self.vectors = requests, vectors
        self.dtype, self.device = dtype, torch.device(device)
        self.wire = dtype if world == 1 or wire_dtype is None else wire_dtype
        self.dim = features[0].dim
        self._stored = physical_tables(features)
        self._fanouts = _fanouts(features)
        self.wiring = wire(self._stored, placements, world)
        self.layouts = layouts(self.wiring, rank)
        self.chooser = Chooser(len(self._stored))
        self._weights, self._states, self._folder = weights or dtype, dict(states or {}), folder
        self._encode, self._seed, self._fresh = encode or _as_they_are, seed, fresh
        self.pools = [self._hold(pool) for pool in self.wiring.pools[rank]]
        self.copies = [self._hold(pool) for pool in self.wiring.copies[rank]]
        self._absent = {  # hash tables that other ranks have: all decide together which ids go
            table.name: HashIds(table, self.device)
            for number, table in enumerate(self._stored)
            if table.ids == "hash" and all(part.rank != rank for part in self.wiring.parts[number])
        }

    @property
    def held(self) -> list[HeldShard]:
        """This rank's shards, copies included."""
        return [shard for pool in (*self.pools, *self.copies) for shard in pool.held]

    def begin(self, ids: Jagged, train: bool = True, step: int = 0) -> TableBatch:
        """Send the headers of a batch. All ranks begin the same batches in one order."""
        return TableBatch(self, ids, train, step)

    @property
    def hashed(self) -> bool:
        """Whether some ids have rows of their own, which are given out one batch after another."""
        return any(table.ids == "hash" for table in self._stored)

    def evict(self, step: int) -> None:
        """Before the ids of `step` come: let hash tables take rows back. All ranks together."""
        own = {held.table.name: held.ids for held in self.pools if held.ids is not None}
        for table, by_rows in zip(self._stored, self.wiring.by_rows, strict=True):
            if table.ids != "hash":
                continue
            ids = own.get(table.name) or self._absent.get(table.name)
            if ids is not None and (by_rows or table.name in own):
                ids.evict(step, self.requests if by_rows else None)

    def close(self) -> None:
        """Give back memory and files."""
        for held in (*self.pools, *self.copies):
            held.store.close()

    def _hold(self, pool: Pool) -> HeldPool:
        store = self._store(pool)
        table = self._stored[pool.shards[0].table]
        if pool.hashed:
            return HeldPool(
                pool, store, self.kernels, table, self.dtype, HashIds(table, self.device), self._values
            )
        held = HeldPool(pool, store, self.kernels, table, self.dtype)
        if self._fresh:
            for shard in held.held:
                self._initialise(shard)
        return held

    def _store(self, pool: Pool) -> RowStore:
        first = pool.shards[0]
        if pool.hashed:
            if first.place != "device":
                raise StrettoError(
                    f"table {first.name}: place {first.place} with ids: hash, whose tables grow",
                    hint="place: device, or ids: modulo",
                )
            return GrowingStore(0, pool.width, self._weights, self._states, self.device)
        return build_store(
            first.place,
            pool.rows,
            pool.width,
            self._weights,
            self._states,
            self.device,
            first.cache,
            self._folder,
            self.rank,
        )

    def _initialise(self, held: HeldShard) -> None:
        shard = held.shard
        for first in range(0, shard.rows, _AT_ONCE):
            own = torch.arange(first, min(first + _AT_ONCE, shard.rows))
            table = self._stored[shard.table]
            held.write(
                first, self._values(table, own * shard.modulus + shard.residue, shard.start, shard.stop)
            )

    def _values(self, table: TableSpec, rows: Tensor, start: int, stop: int) -> dict[str, Tensor]:
        """What a store keeps of new rows, or of ids of a hash table."""
        spread = self._fanouts[table.name]
        values = initial_rows(self._seed, table.name, spread, rows, start, stop, table.dim, torch.float64)
        return self._encode(values.to(self.dtype))


def _as_they_are(values: Tensor) -> dict[str, Tensor]:
    return {"weight": values}


def _fanouts(features: Sequence[TableSpec]) -> dict[str, float]:
    """For each stored table the rows that a plain table with its initial values would have."""
    found = dict[str, float]()
    for feature in features:
        product = feature.ids == "quotient-remainder"
        for table in physical_tables([feature]):
            found[table.name] = initial_rows_of_table(feature.rows) if product else feature.rows
    return found
