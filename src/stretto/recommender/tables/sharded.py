"""The embedding tables of a job, sharded over its ranks: lookups forward, gradients backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.errors import StrettoError
from stretto.recommender.placement import Placements, TableSpec, divisor_of, physical_tables
from stretto.recommender.stores.cached import build_store
from stretto.recommender.stores.store import GrowingStore, StateSpec
from stretto.recommender.tables.exchange import (
    PendingReceive,
    Requests,
    batch_layouts,
    concatenate,
    exchange,
)
from stretto.recommender.tables.ids import quotient
from stretto.recommender.tables.ids.hash import HashIds
from stretto.recommender.tables.initial import initial_rows
from stretto.recommender.tables.jagged import Bags, Jagged, split_features
from stretto.recommender.tables.kernels.plain import Kernels, bags_of
from stretto.recommender.tables.lookup_plan import LookupPlan, LookupPlanner, plan_pooled, plan_rows
from stretto.recommender.tables.pools import LocalPool, LocalShard, PoolLookups
from stretto.recommender.tables.replicated import ReplicatedLookups
from stretto.recommender.tables.shard_map import Pool, map_shards


@dataclass
class _Feature:
    """A feature's bags of ids, and the stored tables of its lookups: one, or the quotient and the remainder
    table.

    `vectors`: for quotient and remainder, the row of each id [n, dim] in both tables.
    """

    bags: Bags
    tables: tuple[int, ...]
    mean: Tensor | None  # [samples, 1]: factors that turn sums into means
    vectors: tuple[Tensor, Tensor] | None = None


class TableBatch:
    """The lookups of one batch. Every rank makes the same calls, in this order: the constructor,
    `send_rows`, `fetch`, `answer`, `vectors`; then in training `send_gradient`, `receive_gradient`, the
    update by `lookups` and `replicated`, and `release`.

    Args:
        ids: ids of this rank's samples.
        train: True if an update will follow; otherwise hash tables count no ids.
        step: number of updates before this batch, the clock by which hash tables age ids.
    """

    def __init__(self, tables: ShardedTables, ids: Jagged, train: bool, step: int) -> None:
        self.tables = tables
        self.train = train
        self.step = step
        self.samples = ids.samples
        self.lookups = list[PoolLookups]()
        self._features = list[_Feature]()
        self._plans: list[LookupPlan | None] = [None] * len(tables.shard_map.tables)
        stored = 0
        for spec, bags in zip(tables.features, split_features(ids, tables.dtype), strict=True):
            mean = None
            if spec.pooling == "mean" and bags.hot != 1:
                mean = (1.0 / bags.lengths.clamp(min=1).to(tables.dtype)).unsqueeze(1)
            if spec.ids == "quotient-remainder":
                self._features.append(_Feature(bags, (stored, stored + 1), mean))
                for rows in quotient.rows_of(bags.ids, spec.rows, divisor_of(spec)):
                    self._plan(stored, bags.with_ids(rows), single=True)
                    stored += 1
            else:
                self._features.append(_Feature(bags, (stored,), mean))
                rows = bags if spec.ids == "hash" else bags.with_ids(bags.ids % spec.rows)
                self._plan(stored, rows, single=False)
                stored += 1
        shard_map = tables.shard_map
        bags_to = [
            [self._plan_of(shard.table).parts[shard.part] for shard in route] for route in shard_map.routes
        ]
        self._requests = Requests(
            shard_map=shard_map,
            rank=tables.rank,
            group=tables.requests,
            bags_to=bags_to,
            dtype=tables.dtype,
            scaled=ids.weights is not None,
            layouts=tables.layouts,
            device=tables.device,
        )
        self._bags_to = [[bags.samples for bags in to] for to in bags_to]
        self.replicated = [
            ReplicatedLookups(
                local,
                [self._plan_of(shard.table).parts[0] for shard in local.pool.shards],
                tables.requests,
                train,
                tables.wire,
            )
            for local in tables.replicated_pools
        ]
        self._replies: PendingReceive | None = None
        self._gradients: PendingReceive | None = None
        self._fetched = False

    def _plan(self, table: int, bags: Bags, single: bool) -> None:
        """Plan the lookups of one table; for a replicated table, those on this rank's copy. With `single`,
        rows are needed one by one, because they are multiplied before they are summed."""
        tables = self.tables
        parts, by_rows = len(tables.shard_map.parts[table]), tables.shard_map.by_rows[table]
        hashed = tables.shard_map.tables[table].ids == "hash"
        if single:
            plan = plan_rows(bags, max(parts, 1), by_rows, False, tables.kernels)
        elif parts == 0 or tables.shard_map.world == 1:
            plan = plan_pooled(bags, max(parts, 1), by_rows, hashed, tables.kernels)
        else:
            plan = tables.planner.plan(
                table=table, bags=bags, parts=parts, by_rows=by_rows, hashed=hashed, kernels=tables.kernels
            )
        self._plans[table] = plan

    def _plan_of(self, table: int) -> LookupPlan:
        plan = self._plans[table]
        assert plan is not None
        return plan

    def send_rows(self) -> None:
        """Send the requested rows, once the sizes of all requests are known."""
        self._requests.send_rows()
        for lookups in self.replicated:
            lookups.send_rows()

    def fetch(self) -> None:
        """Receive the requests to this rank's shards and start fetching their rows. Hash tables assign rows
        to new ids in this call, so it must come after the update of the previous batch."""
        if self._fetched:
            return
        self._fetched = True
        for local, request in zip(self.tables.pools, self._requests.receive(), strict=True):
            by_rows = request if local.ids is None else local.admit(request, self.step, self.train)
            self.lookups.append(PoolLookups.start(local, by_rows))
        for lookups in self.replicated:
            lookups.fetch()

    def answer(self) -> None:
        """Pool the rows requested from this rank and send the sums."""
        sums = [lookups.sums() for lookups in self.lookups]
        bags_by_pool = [lookups.request.bags for lookups in self.lookups]
        widths = [lookups.local.pool.width for lookups in self.lookups]
        world, wire = self.tables.shard_map.world, self.tables.wire
        pieces = list[Tensor]()
        if len(sums) == 1:
            pieces = [sums[0].flatten()]
        else:
            split = [pool_sums.split(bags) for pool_sums, bags in zip(sums, bags_by_pool, strict=True)]
            pieces = [pool_sums[source].flatten() for source in range(world) for pool_sums in split]
        self._reply_sizes = [
            sum(bags[source] * width for bags, width in zip(bags_by_pool, widths, strict=True))
            for source in range(world)
        ]
        self._vector_sizes = [
            sum(bags * shard.width for bags, shard in zip(bags_to, route, strict=True))
            for bags_to, route in zip(self._bags_to, self.tables.shard_map.routes, strict=True)
        ]
        send = concatenate(pieces, wire, self.tables.device)
        self._replies = exchange(self.tables.vectors, send, self._reply_sizes, self._vector_sizes)

    def vectors(self) -> Tensor:
        """Wait for the replies and return the pooled vectors [samples, features, dim]."""
        tables = self.tables
        replicated = {
            shard.table: sums
            for lookups in self.replicated
            for shard, sums in zip(lookups.local.pool.shards, lookups.sums(), strict=True)
        }
        assert self._replies is not None
        flat = self._replies.wait().to(tables.dtype)
        self._replies = None
        # the reply of each shard of each table, from the concatenated replies of all ranks
        replies: list[list[Tensor]] = [[flat[:0]] * len(parts) for parts in tables.shard_map.parts]
        position = 0
        for bags_to, route in zip(self._bags_to, tables.shard_map.routes, strict=True):
            for bags, shard in zip(bags_to, route, strict=True):
                size = bags * shard.width
                block = flat[position : position + size].view(bags, shard.width)
                replies[shard.table][shard.part] = block
                position += size
        if self._is_one_block(replies):
            first = replies[0][0]
            strides = (first.numel(), tables.dim, 1)
            return first.as_strided((len(replies), self.samples, tables.dim), strides).transpose(0, 1)
        pooled = torch.empty(
            self.samples, len(self._features), tables.dim, dtype=tables.dtype, device=tables.device
        )
        for index, feature in enumerate(self._features):
            gathered = [
                replicated[table].to(tables.dtype)
                if table in replicated
                else self._plan_of(table).gather(replies[table])
                for table in feature.tables
            ]
            if len(gathered) == 1:
                sums = self._plan_of(feature.tables[0]).pool(gathered[0], tables.kernels)
            else:
                rows_by_id = list[Tensor]()
                for table, rows in zip(feature.tables, gathered, strict=True):
                    inverse = self._plan_of(table).inverse
                    assert inverse is not None
                    rows_by_id.append(rows.index_select(0, inverse))
                feature.vectors = (rows_by_id[0], rows_by_id[1])
                product = quotient.combine(*feature.vectors)
                all_rows = torch.arange(len(product), device=product.device)
                sums = tables.kernels.lookup(product, all_rows, feature.bags.offsets, feature.bags.scale)
            pooled[:, index] = sums if feature.mean is None else sums * feature.mean
        return pooled

    def _is_one_block(self, replies: list[list[Tensor]]) -> bool:
        """True if one process has every table unsplit in one store: the replies are the result, uncopied."""
        return (
            self.tables.shard_map.world == 1
            and len(self.tables.pools) == 1
            and not self.replicated
            and all(len(parts) == 1 for parts in replies)
            and all(len(feature.tables) == 1 and feature.mean is None for feature in self._features)
        )

    def send_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of `vectors` to the owners of the rows."""
        tables = self.tables
        outgoing: list[list[Tensor]] = [[] for _ in tables.shard_map.tables]
        table_gradients = dict[int, Tensor]()  # gradients of the results of `gather`
        for index, feature in enumerate(self._features):
            of_sums = gradient[:, index]
            of_sums = of_sums if feature.mean is None else of_sums * feature.mean
            gathered = list[Tensor]()
            if feature.vectors is None:
                gathered.append(self._plan_of(feature.tables[0]).unpool(of_sums, tables.kernels))
            else:
                bags = bags_of(feature.bags.offsets, len(feature.bags.ids))
                of_products = of_sums.index_select(0, bags)
                if feature.bags.scale is not None:
                    of_products = of_products * feature.bags.scale.unsqueeze(1)
                pair = quotient.combine_backward(of_products, *feature.vectors)
                for table, part in zip(feature.tables, pair, strict=True):
                    inverse = self._plan_of(table).inverse
                    assert inverse is not None
                    gathered.append(torch.empty_like(part).index_copy_(0, inverse, part))
            for table, part in zip(feature.tables, gathered, strict=True):
                table_gradients[table] = part
                if parts := tables.shard_map.parts[table]:
                    outgoing[table] = self._plan_of(table).scatter(part, [shard.width for shard in parts])
        pieces = [
            outgoing[shard.table][shard.part].reshape(-1)
            for route in tables.shard_map.routes
            for shard in route
        ]
        send = concatenate(pieces, tables.wire, tables.device)
        self._gradients = exchange(tables.vectors, send, self._vector_sizes, self._reply_sizes)
        for lookups in self.replicated:
            lookups.send_gradient([table_gradients[shard.table] for shard in lookups.local.pool.shards])

    def receive_gradient(self) -> None:
        """Wait for the gradients of this rank's answers, and set them in `lookups`."""
        assert self._gradients is not None
        flat, world = self._gradients.wait(), self.tables.shard_map.world
        self._gradients = None
        pieces: list[list[Tensor]] = [[] for _ in self.lookups]
        start = 0
        for source in range(world):
            for pool, lookups in enumerate(self.lookups):
                bags, width = lookups.request.bags[source], lookups.local.pool.width
                pieces[pool].append(flat[start : start + bags * width].view(bags, width))
                start += bags * width
        for lookups, piece in zip(self.lookups, pieces, strict=True):
            lookups.gradient = (piece[0] if len(piece) == 1 else torch.cat(piece)).to(self.tables.dtype)

    def drop(self) -> None:
        """Abandon a batch; completes its exchanges, since the other ranks wait for them."""
        self.send_rows()
        if self._fetched or not self.tables.hashed:
            self.fetch()
            self.release()
        else:
            self._requests.receive()

    def refuse(self) -> None:
        """Complete the gradient exchanges of replicated tables without an update."""
        for lookups in self.replicated:
            lookups.receive_update()

    def release(self) -> None:
        """Let the stores evict the rows."""
        for lookups in (*self.lookups, *self.replicated):
            lookups.release()


Encode = Callable[[Tensor], dict[str, Tensor]]
_INITIAL_ROWS = 1 << 16  # rows initialised at a time


class ShardedTables:
    """This rank's shards of all tables, and its connection to the other ranks'.

    Args:
        features: one table for each categorical feature, all of one dim.
        placements: placement of each stored table (`physical_tables`).
        requests, vectors: process groups of all ranks, for ids and for vectors; None with one rank.
        dtype: dtype of the sums and of the job.
        weights: dtype in which rows are stored and looked up; by default `dtype`.
        wire_dtype: dtype of sums and gradients between ranks; by default `dtype`.
        states: states of the update rule, by name.
        encode: converts values of rows to the stored tensors; by default `weight` alone.
        seed: seed of the initial values.
        fresh: set initial values; otherwise a checkpoint is loaded afterwards.
        folder: folder for tables on disk.

    Raises:
        StrettoError: a placement that does not fit, or too little memory or disk space.
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
        self.features = tuple(features)
        self.kernels = kernels
        self.rank = rank
        self.requests, self.vectors = requests, vectors
        self.dtype, self.device = dtype, torch.device(device)
        self.wire = dtype if world == 1 or wire_dtype is None else wire_dtype
        self.dim = features[0].dim
        self._stored = physical_tables(features)
        # for each stored table, the number of rows that sets the range of its initial values
        self._initial_rows = {
            table.name: quotient.initial_rows_of_table(feature.rows)
            if feature.ids == "quotient-remainder"
            else feature.rows
            for feature in features
            for table in physical_tables([feature])
        }
        self.shard_map = map_shards(self._stored, placements, world)
        self.layouts = batch_layouts(self.shard_map, rank)
        self.planner = LookupPlanner(len(self._stored))
        self._weights = weights or dtype
        self._states = dict(states or {})
        self._folder = folder
        self._encode = encode or _identity
        self._seed = seed
        self._fresh = fresh
        self.pools = [self._open(pool) for pool in self.shard_map.pools[rank]]
        self.replicated_pools = [self._open(pool) for pool in self.shard_map.replicated[rank]]
        # empty maps of the hash tables that other ranks store: eviction is decided by all ranks together
        self._remote_ids = {
            table.name: HashIds(table, self.device)
            for table, parts in zip(self._stored, self.shard_map.parts, strict=True)
            if table.ids == "hash" and all(part.rank != rank for part in parts)
        }

    @property
    def local_shards(self) -> list[LocalShard]:
        """This rank's shards, replicated tables included."""
        return [shard for pool in (*self.pools, *self.replicated_pools) for shard in pool.shards]

    def begin(self, ids: Jagged, train: bool = True, step: int = 0) -> TableBatch:
        """Send the headers of a batch. All ranks begin the same batches in the same order."""
        return TableBatch(self, ids, train, step)

    @property
    def hashed(self) -> bool:
        """True if there are hash tables, which assign rows batch after batch."""
        return any(table.ids == "hash" for table in self._stored)

    def evict(self, step: int) -> None:
        """Evict rows of hash tables before the ids of `step` arrive. Collective over all ranks."""
        hashed = {local.table.name: local.ids for local in self.pools if local.ids is not None}
        for table, by_rows in zip(self._stored, self.shard_map.by_rows, strict=True):
            if table.ids != "hash":
                continue
            ids = hashed.get(table.name) or self._remote_ids.get(table.name)
            if ids is not None and (by_rows or table.name in hashed):
                ids.evict(step, self.requests if by_rows else None)

    def close(self) -> None:
        """Free memory and remove files."""
        for local in (*self.pools, *self.replicated_pools):
            local.store.close()

    def _open(self, pool: Pool) -> LocalPool:
        """Create the store of a pool, with initial values if they are wanted."""
        first = pool.shards[0]
        table = self._stored[first.table]
        if not pool.hashed:
            store = build_store(
                place=first.place,
                rows=pool.rows,
                width=pool.width,
                dtype=self._weights,
                states=self._states,
                device=self.device,
                cache=first.cache,
                folder=self._folder,
                rank=self.rank,
            )
        elif first.place == "device":
            store = GrowingStore(0, pool.width, self._weights, self._states, self.device)
        else:
            raise StrettoError(
                f"table {first.name}: place {first.place} with ids: hash, whose tables grow",
                hint="place: device, or ids: modulo",
            )
        local = LocalPool(
            pool=pool,
            store=store,
            kernels=self.kernels,
            table=table,
            dtype=self.dtype,
            ids=HashIds(table, self.device) if pool.hashed else None,
            initial_values=self._initial_values,
        )
        if self._fresh and not pool.hashed:
            for stored in local.shards:
                shard = stored.shard
                for start in range(0, shard.rows, _INITIAL_ROWS):
                    rows = torch.arange(start, min(start + _INITIAL_ROWS, shard.rows))
                    rows = rows * shard.modulus + shard.residue
                    values = self._initial_values(self._stored[shard.table], rows, shard.start, shard.stop)
                    stored.write(start, values)
        return local

    def _initial_values(self, table: TableSpec, rows: Tensor, start: int, stop: int) -> dict[str, Tensor]:
        """Stored tensors of new rows (for a hash table: of ids), columns [start, stop)."""
        values = initial_rows(
            seed=self._seed,
            name=table.name,
            rows_of_table=self._initial_rows[table.name],
            rows=rows,
            start=start,
            stop=stop,
            dim=table.dim,
            dtype=torch.float64,
        )
        return self._encode(values.to(self.dtype))


def _identity(values: Tensor) -> dict[str, Tensor]:
    return {"weight": values}
