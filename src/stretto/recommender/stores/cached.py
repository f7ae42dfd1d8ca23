"""Embedding rows in host memory or in a file, with a cache of the popular ones on the device."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.engine.device import current_stream, new_stream, on_accelerator, on_stream, recorded_event
from stretto.recommender.stores.backing import FileRows, HostRows
from stretto.recommender.stores.store import Fetched

Integers = np.ndarray[Any, np.dtype[np.int64]]

_VICTIM_SHARE = 8  # 1 / 8 of the slots become victims at a time, since choosing them looks at every slot
_AGING = 10  # counts are halved after so many requests per slot


@dataclass(frozen=True, kw_only=True)
class CacheMoves:
    """What must move for the rows of a batch to be in the cache.

    Attributes:
        slots: [n] of the batch's rows.
        old, old_slots: [k] rows to evict, and their slots.
        new, new_slots: [m] rows to fetch, ascending, and the slots for them.
    """

    slots: Integers
    old: Integers
    old_slots: Integers
    new: Integers
    new_slots: Integers


class Slots:
    """Which row is in which slot of a cache. Memory: five bytes a row, and 24 a slot.

    Evicts the rows that the fewest batches requested, whether they were in the cache then or not; among
    equals the least recently requested. Counts are halved periodically, so that popularity fades (the aging
    of TinyLFU, Einziger et al. 2017, section 3.3). Rows of a batch that is not released are never evicted.

    Args:
        rows: number of rows.
        slots: slots of the cache, fewer than 2^31.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self._slot = np.zeros(rows, np.int32)  # 1 + the row's slot, 0 where it has none
        self._count = np.zeros(rows, np.uint8)  # batches that requested it
        self._aged_at = 0
        self._row = np.full(slots, -1, np.int64)
        self._last_batch = np.zeros(slots, np.int64)  # the last batch that requested the row in it
        self._victims = np.arange(slots, dtype=np.int64)  # slots to reuse next
        self._victims_batch = 0  # the batch that chose them
        self._batch = 0
        self._in_use = dict[int, Integers]()  # slots of batches that are not yet released
        self.requested = self.fetched = 0  # rows of all batches, and those of them that were cache misses

    @property
    def slots(self) -> int:
        return len(self._row)

    @property
    def batch(self) -> int:
        """The number of the latest batch."""
        return self._batch

    def begin_batch(self, rows: Integers) -> tuple[Integers, Integers, int]:
        """Begins a batch of rows [n].

        Returns:
            slots [n], -1 for a miss; the missed rows, unique and ascending; by how many slots the cache is
            too small for them.
        """
        self._batch += 1
        self.requested += len(rows)
        slots = self._slot[rows].astype(np.int64) - 1
        absent = slots < 0
        hits = slots[~absent] if absent.any() else slots
        self._last_batch[hits] = self._batch
        self._in_use[self._batch] = hits
        self._count[rows] = (
            np.minimum(self._count[rows], 254) + 1
        )  # once per batch, however often it has the row
        new = self._unique(rows[absent])
        self.fetched += len(new)
        return slots, new, len(new) - self._find_victims(len(new))

    def assign(self, rows: Integers, slots: Integers, new: Integers) -> CacheMoves:
        """Assigns slots to the missed rows `new`."""
        granted, self._victims = self._victims[: len(new)], self._victims[len(new) :]
        old = self._row[granted]
        filled = old >= 0
        self._slot[old[filled]] = 0
        self._slot[new] = granted + 1
        self._row[granted] = new
        self._last_batch[granted] = self._batch
        missing = slots < 0
        slots[missing] = self._slot[rows[missing]] - 1
        self._in_use[self._batch] = slots
        return CacheMoves(slots=slots, old=old[filled], old_slots=granted[filled], new=new, new_slots=granted)

    def release(self, batch: int) -> None:
        """Lets the rows of a batch be evicted."""
        del self._in_use[batch]

    def grow(self, more: int) -> None:
        """Appends `more` slots."""
        fresh = np.arange(self.slots, self.slots + more, dtype=np.int64)
        self._row = np.concatenate([self._row, np.full(more, -1)])
        self._last_batch = np.concatenate([self._last_batch, np.zeros(more, np.int64)])
        self._victims = np.concatenate([self._victims, fresh])

    def within(self, start: int, stop: int) -> tuple[Integers, Integers]:
        """The cached ones of rows [start, stop), relative to `start`, and their slots."""
        slots = self._slot[start:stop]
        cached_rows = np.flatnonzero(slots)
        return cached_rows, slots[cached_rows].astype(np.int64) - 1

    def _unique(self, rows: Integers) -> Integers:
        """The unique rows, ascending. The rows have no slot, so their entries of the slot map can hold marks:
        the last mark of a row survives, which spares sorting duplicates.
        """
        marks = np.arange(1, len(rows) + 1, dtype=np.int32)
        self._slot[rows] = marks
        once = rows[self._slot[rows] == marks]
        self._slot[once] = 0
        once.sort()
        return once

    def _find_victims(self, wanted: int) -> int:
        """Chooses at least `wanted` slots to reuse, or as many as are free; returns how many of `wanted`."""
        if not wanted:
            return 0
        self._victims = self._victims[
            self._last_batch[self._victims] <= self._victims_batch
        ]  # unless requested since they were chosen
        if len(self._victims) >= wanted:
            return wanted
        needed = np.zeros(self.slots, np.bool_)
        for slots in self._in_use.values():
            needed[slots] = True
        free = np.flatnonzero(~needed)
        many = max(wanted, self.slots // _VICTIM_SHARE)
        if many < len(free):
            rows = self._row[free]
            priority = self._count[rows].astype(np.int64) * (self._batch + 1) + self._last_batch[free]
            priority[rows < 0] = -1
            free = free[np.argpartition(priority, many)[:many]]
        self._victims, self._victims_batch = free, self._batch
        self._age_counts()
        return min(wanted, len(free))

    def _age_counts(self) -> None:
        if self.requested - self._aged_at > _AGING * self.slots:
            self._aged_at = self.requested
            self._count >>= 1


_CHUNK = 1 << 24  # bytes of rows copied at a time to or from a GPU


@dataclass(frozen=True, eq=False)
class PendingRows:
    """The rows of a batch, being copied to slots."""

    batch: int
    _slots: Tensor
    _job: Future[None] | None

    def slots(self) -> Tensor:
        """[n] int64. Waits for the copies, and raises their errors."""
        if self._job is not None:
            self._job.result()
        return self._slots


class CachedStore:
    """All rows are in `backing`; some are in slots on the device, and only there are they modified.

    A thread writes evicted rows back, weights and states together, and reads missed ones into slots that no
    unreleased batch uses, while the previous batch computes. A cache that is too small for two batches grows
    in `fetch`: `weight` and `states` stay the same objects, but views taken of them before are stale.

    Args:
        backing: all rows.
        device: of the cache.
        cache: share of the rows that it holds at first, above 0.
    """

    def __init__(self, backing: HostRows, device: torch.device | str, cache: float) -> None:
        self.backing, self.rows = backing, backing.rows
        self.width = backing.width
        self._device = torch.device(device)
        slots = min(backing.rows, max(1, -int(-backing.rows * cache // 1)))
        self._slots = Slots(backing.rows, slots)
        tensors = {name: self._empty(name, slots) for name in backing.shapes}
        self.weight = tensors.pop("weight")
        self.states: dict[str, Tensor] = tensors
        self._pool = ThreadPoolExecutor(1, "stretto-rows")
        self._last: Future[None] | None = None
        self._warned = False
        self._side = new_stream(self._device) if on_accelerator(self._device) else None

    @property
    def slots(self) -> int:
        """Rows that the cache holds."""
        return self._slots.slots

    @property
    def hits(self) -> float:
        """Share of all lookups that were cache hits."""
        return 1 - self._slots.fetched / max(1, self._slots.requested)

    @property
    def in_files(self) -> bool:
        """Whether the rows lie in files rather than in host memory."""
        return isinstance(self.backing, FileRows)

    @property
    def _on_host(self) -> bool:
        """Whether the cache is in host memory too."""
        return self._device.type == "cpu"

    def fetch(self, rows: Tensor) -> PendingRows:
        wanted = rows.detach().cpu().numpy()
        slots, new, missing = self._slots.begin_batch(wanted)
        if missing:
            self._grow(missing)
        moves = self._slots.assign(wanted, slots, new)
        where = torch.from_numpy(moves.slots).to(self._device)
        if len(new):
            self._start(moves)
        return PendingRows(self._slots.batch, where, self._last)  # a hit may still be in flight

    def release(self, fetched: Fetched) -> None:
        assert isinstance(fetched, PendingRows)
        self._slots.release(fetched.batch)

    def read(self, start: int, stop: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
        self._wait()
        held = self._held()
        stored = self.backing.read(start, stop, held if names is None else names)
        cached_rows, slots = map(torch.from_numpy, self._slots.within(start, stop))
        for name, values in stored.items():
            values[cached_rows] = held[name][slots.to(self._device)].cpu()
        return stored

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        self._wait()
        self.backing.write(start, values)
        stop = start + max((len(value) for value in values.values()), default=0)
        cached_rows, slots = map(torch.from_numpy, self._slots.within(start, stop))
        held = self._held()
        for name, value in values.items():
            cached = cached_rows[cached_rows < len(value)]
            held[name][slots[: len(cached)].to(self._device)] = value[cached].to(
                self._device, held[name].dtype
            )

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.weight, self.states = self.weight[:0], {}
        self.backing.close()

    # ------------------------------------------------------------------ moving

    def _start(self, moves: CacheMoves) -> None:
        # evicted rows include the updates queued so far
        ready = None if self._side is None else recorded_event(current_stream(self._device))
        self._last = self._pool.submit(self._move, moves, self._held(), ready, self._last)

    def _move(
        self,
        moves: CacheMoves,
        held: Mapping[str, Tensor],
        ready: torch.Event | None,
        before: Future[None] | None,
    ) -> None:
        if before is not None:
            before.result()  # an error in an earlier move fails all later ones
        old, old_slots, new, new_slots = map(
            torch.from_numpy, (moves.old, moves.old_slots, moves.new, moves.new_slots)
        )
        if self._on_host:
            self.backing.put(old, held, old_slots)
            self.backing.get(new, held, new_slots)
            return
        with on_stream(self._side):
            if self._side is not None and ready is not None:
                self._side.wait_event(ready)
            rows = max(1, _CHUNK // self.backing.record)
            for start in range(0, len(old), rows):
                self._write_back(old[start : start + rows], held, old_slots[start : start + rows])
            for start in range(0, len(new), rows):
                self._read_in(new[start : start + rows], held, new_slots[start : start + rows])
            if self._side is not None:
                self._side.synchronize()

    def _write_back(self, rows: Tensor, held: Mapping[str, Tensor], slots: Tensor) -> None:
        device_slots = slots.to(self._device)
        gone = {name: tensor.index_select(0, device_slots).cpu() for name, tensor in held.items()}
        self.backing.put(rows, gone, torch.arange(len(rows)))

    def _read_in(self, rows: Tensor, held: Mapping[str, Tensor], slots: Tensor) -> None:
        pin, device_slots = self._side is not None, slots.to(self._device)
        come = {
            name: torch.empty(len(rows), *tensor.shape[1:], dtype=tensor.dtype, pin_memory=pin)
            for name, tensor in held.items()
        }
        self.backing.get(rows, come, torch.arange(len(rows)))
        for name, tensor in held.items():
            tensor.index_copy_(0, device_slots, come[name].to(self._device, non_blocking=True))

    def _wait(self) -> None:
        """Waits for all moves, and raises their errors."""
        if self._last is not None:
            self._last.result()

    # ------------------------------------------------------------------ cache

    def _held(self) -> dict[str, Tensor]:
        return {"weight": self.weight, **self.states}

    def _empty(self, name: str, slots: int) -> Tensor:
        return torch.zeros(
            slots, *self.backing.shapes[name], dtype=self.backing.dtypes[name], device=self._device
        )

    def _grow(self, missing: int) -> None:
        more = min(self.rows - self.slots, max(missing, self.slots // 4))
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a cache of {self.slots} of {self.rows} rows is too small for two batches: it grows and "
                "takes more device memory than planned; give the tables a larger `cache`",
                stacklevel=3,
            )
        self._wait()
        for name, tensor in self._held().items():
            larger = self._empty(name, self.slots + more)
            larger[: self.slots] = tensor
            tensor.set_(larger)  # pyright: ignore[reportArgumentType, reportCallIssue]
        self._slots.grow(more)
