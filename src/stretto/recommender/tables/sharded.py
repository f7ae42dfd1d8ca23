"""The embedding tables of a job, sharded over its ranks: lookups forward, gradients backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto.recommender.placement import divisor_of
from stretto.recommender.tables.exchange import Arriving, Requests, exchange, joined
from stretto.recommender.tables.ids import quotient
from stretto.recommender.tables.jagged import Bags, Jagged, features_of
from stretto.recommender.tables.lookup_plan import Ask, ask_rows, ask_samples
from stretto.recommender.tables.pools import Lookups
from stretto.recommender.tables.replicated import CopiedLookups

if TYPE_CHECKING:
    from stretto.recommender.tables.sharded import ShardedTables
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch.distributed import ProcessGroup

from stretto.errors import StrettoError
from stretto.recommender.placement import Placements, TableSpec, physical_tables
from stretto.recommender.stores.build import build_store
from stretto.recommender.stores.store import GrowingStore, RowStore, StateSpec
from stretto.recommender.tables.exchange import layouts
from stretto.recommender.tables.ids.hash import HashIds
from stretto.recommender.tables.ids.quotient import initial_rows_of_table
from stretto.recommender.tables.initial import initial_rows
from stretto.recommender.tables.kernels.plain import Kernels
from stretto.recommender.tables.lookup_plan import Chooser
from stretto.recommender.tables.pools import HeldPool, HeldShard
from stretto.recommender.tables.shard_map import Pool, wire


@dataclass
class _Use:
    """A feature's bags of ids, and the tables that they are looked up in: one, or quotient's and remainder's.

    `vectors`: of a product, those of both tables for each id.
    """

    bags: Bags
    tables: tuple[int, ...]
    mean: Tensor | None  # [samples, 1]: what sums are multiplied with
    vectors: tuple[Tensor, Tensor] | None = None


class TableBatch:
    """A batch's way. Every rank takes the same steps, in this order: begin, `send_rows`, `fetch`, `answer`,
    `vectors`; in training then `send_gradient`, the update of `lookups` and `copied`, `release`.

    Args:
        ids: of this rank's samples.
        train: an update will follow; otherwise ids of hash tables are not counted.
        step: number of updates before, by which hash tables tell the age of ids.
    """

    def __init__(self, tables: ShardedTables, ids: Jagged, train: bool, step: int) -> None:
        self.tables = tables
        self.train = train
        self.step = step
        self.samples = ids.samples
        self.lookups = list[Lookups]()
        self._uses = list[_Use]()
        self._asks: list[Ask | None] = [None] * len(tables.wiring.tables)
        self._begin(ids)
        wiring = tables.wiring
        asked = [[self._part(shard.table, shard.part) for shard in route] for route in wiring.routes]
        self._requests = Requests(
            wiring=wiring,
            rank=tables.rank,
            group=tables.requests,
            asked=asked,
            dtype=tables.dtype,
            scaled=ids.weights is not None,
            caches=tables.layouts,
            device=tables.device,
        )
        self._bags_to = [[bags.samples for bags in to] for to in asked]
        self.copied = [
            CopiedLookups(
                held,
                [self._copied_bags(s.table) for s in held.pool.shards],
                tables.requests,
                train,
                tables.wire,
            )
            for held in tables.copies
        ]
        self._answers: Arriving | None = None
        self._returning: Arriving | None = None
        self._fetched = False

    def _begin(self, ids: Jagged) -> None:
        """Ids to rows, and what to ask each table for."""
        stored = 0
        for spec, bags in zip(self.tables.features, features_of(ids, self.tables.dtype), strict=True):
            mean = None
            if spec.pooling == "mean" and bags.hot != 1:
                mean = (1.0 / bags.lengths.clamp(min=1).to(self.tables.dtype)).unsqueeze(1)
            if spec.ids == "quotient-remainder":
                self._uses.append(_Use(bags, (stored, stored + 1), mean))
                parts = quotient.rows_of(bags.ids, spec.rows, divisor_of(spec))
                for number, rows in enumerate(parts):
                    self._ask(stored + number, bags.of(rows), single=True)
            else:
                self._uses.append(_Use(bags, (stored,), mean))
                local = bags if spec.ids == "hash" else bags.of(bags.ids % spec.rows)
                self._ask(stored, local, single=False)
            stored += len(self._uses[-1].tables)

    def _ask(self, table: int, bags: Bags, single: bool) -> None:
        """Of a copied table, what will be looked up here."""
        tables = self.tables
        parts, by_rows = len(tables.wiring.parts[table]), tables.wiring.by_rows[table]
        hashed = tables.wiring.tables[table].ids == "hash"
        if single:
            ask = ask_rows(bags, max(parts, 1), by_rows, False, tables.kernels)
        elif parts == 0 or tables.wiring.world == 1:
            ask = ask_samples(bags, max(parts, 1), by_rows, hashed, tables.kernels)
        else:
            ask = tables.chooser.ask(
                table=table, bags=bags, parts=parts, by_rows=by_rows, hashed=hashed, kernels=tables.kernels
            )
        self._asks[table] = ask

    def _of(self, table: int) -> Ask:
        ask = self._asks[table]
        assert ask is not None
        return ask

    def _part(self, table: int, part: int) -> Bags:
        return self._of(table).parts[part]

    def _copied_bags(self, table: int) -> Bags:
        return self._of(table).parts[0]

    def send_rows(self) -> None:
        """Once it is known how many: send rows."""
        self._requests.send_rows()
        for copied in self.copied:
            copied.send_rows()

    def fetch(self) -> None:
        """Once rows that are asked of this rank are there: begin to bring them. Of hash tables, give rows to
        new ids: after the update of the batch before.
        """
        if self._fetched:
            return
        self._fetched = True
        for held, asked in zip(self.tables.pools, self._requests.receive(), strict=True):
            known = asked if held.ids is None else held.admit(asked, self.step, self.train)
            self.lookups.append(Lookups.of(held, known))
        for copied in self.copied:
            copied.fetch()

    def answer(self) -> None:
        """Sums of what is asked of this rank, sent."""
        sums = [lookups.sums() for lookups in self.lookups]
        bags_of = [lookups.asked.bags for lookups in self.lookups]
        widths = [lookups.held.pool.width for lookups in self.lookups]
        world, wire = self.tables.wiring.world, self.tables.wire
        pieces = list[Tensor]()
        if len(sums) == 1:
            pieces = [sums[0].flatten()]
        else:
            split = [sum_.split(bags) for sum_, bags in zip(sums, bags_of, strict=True)]
            pieces = [sum_[source].flatten() for source in range(world) for sum_ in split]
        self._sizes_from = [
            sum(bags[source] * width for bags, width in zip(bags_of, widths, strict=True))
            for source in range(world)
        ]
        self._sizes_to = [
            sum(bags * shard.width for bags, shard in zip(sum_, route, strict=True))
            for sum_, route in zip(self._bags_to, self.tables.wiring.routes, strict=True)
        ]
        send = joined(pieces, wire, self.tables.device)
        self._answers = exchange(self.tables.vectors, send, self._sizes_from, self._sizes_to)

    def vectors(self) -> Tensor:
        """Of each sample and feature [samples, features, dim]. Waits for the answers."""
        tables = self.tables
        copied = {
            shard.table: sums
            for copy in self.copied
            for shard, sums in zip(copy.held.pool.shards, copy.sums(), strict=True)
        }
        assert self._answers is not None
        blocks = self._blocks(self._answers.wait().to(tables.dtype))
        self._answers = None
        flat = self._flat(blocks)
        if flat is not None:
            return flat
        pooled = torch.empty(
            self.samples, len(self._uses), tables.dim, dtype=tables.dtype, device=tables.device
        )
        for feature, use in enumerate(self._uses):
            parts = [
                copied[table].to(tables.dtype) if table in copied else self._of(table).gather(blocks[table])
                for table in use.tables
            ]
            sums = self._sums(use, parts)
            pooled[:, feature] = sums if use.mean is None else sums * use.mean
        return pooled

    def _blocks(self, flat: Tensor) -> list[list[Tensor]]:
        """The answer of each shard of each table, from all ranks' answers one after another."""
        blocks: list[list[Tensor]] = [[flat[:0]] * len(parts) for parts in self.tables.wiring.parts]
        at = 0
        for bags_to, route in zip(self._bags_to, self.tables.wiring.routes, strict=True):
            for bags, shard in zip(bags_to, route, strict=True):
                size = bags * shard.width
                blocks[shard.table][shard.part] = flat[at : at + size].view(bags, shard.width)
                at += size
        return blocks

    def _flat(self, blocks: list[list[Tensor]]) -> Tensor | None:
        """The answers as they are, where one process has every table whole in one store."""
        tables = self.tables
        if (
            tables.wiring.world > 1
            or len(tables.pools) != 1
            or self.copied
            or any(len(b) != 1 for b in blocks)
        ):
            return None
        if any(len(use.tables) > 1 or use.mean is not None for use in self._uses):
            return None
        first = blocks[0][0]
        whole = first.as_strided((len(blocks), self.samples, tables.dim), (first.numel(), tables.dim, 1))
        return whole.transpose(0, 1)

    def _sums(self, use: _Use, parts: list[Tensor]) -> Tensor:
        """The feature's sums [samples, dim] from what was gathered of its tables."""
        kernels = self.tables.kernels
        if len(parts) == 1:
            return self._of(use.tables[0]).pool(parts[0], kernels)
        pair = tuple(_rows(self._of(table), part) for table, part in zip(use.tables, parts, strict=True))
        use.vectors = (pair[0], pair[1])
        product = quotient.combine(*use.vectors)
        which = torch.arange(len(product), device=product.device)
        return kernels.lookup(product, which, use.bags.offsets, use.bags.scale)

    def send_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of `vectors` to where its rows are."""
        tables = self.tables
        outgoing: list[list[Tensor]] = [[] for _ in tables.wiring.tables]
        whole = dict[int, Tensor]()
        for feature, use in enumerate(self._uses):
            feature_gradient = gradient[:, feature]
            feature_gradient = feature_gradient if use.mean is None else feature_gradient * use.mean
            for table, part in zip(use.tables, self._parts_of(use, feature_gradient), strict=True):
                whole[table] = part
                if parts := tables.wiring.parts[table]:
                    outgoing[table] = self._of(table).scatter(part, [shard.width for shard in parts])
        pieces = [
            outgoing[shard.table][shard.part].reshape(-1) for route in tables.wiring.routes for shard in route
        ]
        send = joined(pieces, tables.wire, tables.device)
        self._returning = exchange(tables.vectors, send, self._sizes_to, self._sizes_from)
        for copied in self.copied:
            copied.send_gradient([whole[shard.table] for shard in copied.held.pool.shards])

    def _parts_of(self, use: _Use, gradient: Tensor) -> list[Tensor]:
        """The gradient of what was gathered of each of the feature's tables."""
        kernels = self.tables.kernels
        if use.vectors is None:
            return [self._of(use.tables[0]).unpool(gradient, kernels)]
        bags = torch.repeat_interleave(torch.diff(use.bags.offsets))
        each = gradient.index_select(0, bags)
        if use.bags.scale is not None:
            each = each * use.bags.scale.unsqueeze(1)
        parts = list[Tensor]()
        for table, part in zip(use.tables, quotient.combine_backward(each, *use.vectors), strict=True):
            back = self._of(table).back
            assert back is not None
            parts.append(torch.empty_like(part).index_copy_(0, back, part))
        return parts

    def receive_gradient(self) -> None:
        """Wait for the gradients of what was answered; `lookups` have them then."""
        assert self._returning is not None
        flat, world = self._returning.wait(), self.tables.wiring.world
        self._returning = None
        pieces: list[list[Tensor]] = [[] for _ in self.lookups]
        at = 0
        for source in range(world):
            for number, lookups in enumerate(self.lookups):
                bags, width = lookups.asked.bags[source], lookups.held.pool.width
                pieces[number].append(flat[at : at + bags * width].view(bags, width))
                at += bags * width
        for lookups, piece in zip(self.lookups, pieces, strict=True):
            lookups.gradient = (piece[0] if len(piece) == 1 else torch.cat(piece)).to(self.tables.dtype)

    def drop(self) -> None:
        """Abandon the batch: its vectors are not needed."""
        self.send_rows()
        if self._fetched or not self.tables.hashed:
            self.fetch()
            self.release()
        else:
            self._requests.receive()

    def release(self) -> None:
        """Nobody needs the rows any more."""
        for lookups in (*self.lookups, *self.copied):
            lookups.release()


def _rows(ask: Ask, gathered: Tensor) -> Tensor:
    """The row of each id [n, dim]."""
    assert ask.back is not None
    return gathered.index_select(0, ask.back)


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
        self.features = tuple(features)
        self.kernels = kernels
        self.rank = rank
        self.requests, self.vectors = requests, vectors
        self.dtype, self.device = dtype, torch.device(device)
        self.wire = dtype if world == 1 or wire_dtype is None else wire_dtype
        self.dim = features[0].dim
        self._stored = physical_tables(features)
        self._fanouts = _fanouts(features)
        self.wiring = wire(self._stored, placements, world)
        self.layouts = layouts(self.wiring, rank)
        self.chooser = Chooser(len(self._stored))
        self._weights = weights or dtype
        self._states = dict(states or {})
        self._folder = folder
        self._encode = encode or _as_they_are
        self._seed = seed
        self._fresh = fresh
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
        hashed = {held.table.name: held.ids for held in self.pools if held.ids is not None}
        for table, by_rows in zip(self._stored, self.wiring.by_rows, strict=True):
            if table.ids != "hash":
                continue
            ids = hashed.get(table.name) or self._absent.get(table.name)
            if ids is not None and (by_rows or table.name in hashed):
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
                pool=pool,
                store=store,
                kernels=self.kernels,
                table=table,
                dtype=self.dtype,
                ids=HashIds(table, self.device),
                values=self._values,
            )
        held = HeldPool(pool=pool, store=store, kernels=self.kernels, table=table, dtype=self.dtype)
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

    def _initialise(self, held: HeldShard) -> None:
        shard = held.shard
        for first in range(0, shard.rows, _AT_ONCE):
            rows = torch.arange(first, min(first + _AT_ONCE, shard.rows))
            table = self._stored[shard.table]
            held.write(
                first, self._values(table, rows * shard.modulus + shard.residue, shard.start, shard.stop)
            )

    def _values(self, table: TableSpec, rows: Tensor, start: int, stop: int) -> dict[str, Tensor]:
        """What a store keeps of new rows, or of ids of a hash table."""
        spread = self._fanouts[table.name]
        values = initial_rows(
            seed=self._seed,
            name=table.name,
            rows_of_table=spread,
            rows=rows,
            start=start,
            stop=stop,
            dim=table.dim,
            dtype=torch.float64,
        )
        return self._encode(values.to(self.dtype))


def _as_they_are(values: Tensor) -> dict[str, Tensor]:
    return {"weight": values}


def _fanouts(features: Sequence[TableSpec]) -> dict[str, float]:
    """For each stored table the rows that a plain table with its initial values would have."""
    fanouts = dict[str, float]()
    for feature in features:
        product = feature.ids == "quotient-remainder"
        for table in physical_tables([feature]):
            fanouts[table.name] = initial_rows_of_table(feature.rows) if product else feature.rows
    return fanouts
