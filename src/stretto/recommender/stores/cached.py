"""Embedding caches: rows in host memory or in a file, with the popular ones on the device (as FBGEMM's UVM
caching); and the choice of a store for a pool of tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.engine.device import current_stream, moved, new_stream, on_accelerator, on_stream, recorded_event
from stretto.errors import StrettoError
from stretto.recommender.placement import Place
from stretto.recommender.stores.backing import FileRows, HostRows
from stretto.recommender.stores.store import DeviceStore, FetchedRows, RowStore, StateSpec

Integers = np.ndarray[Any, np.dtype[np.int64]]

_VICTIM_SHARE = 8  # 1 / 8 of the slots become victims at a time, since choosing them looks at every slot
_AGING = 10  # requests per slot after which counts are halved


class CacheMoves(NamedTuple):
    """The moves that bring the rows of a batch into the cache.

    Attributes:
        old, old_slots: [k] rows to evict, and their slots.
        new, new_slots: [m] rows to fetch, ascending, and the slots for them.
    """

    old: Integers
    old_slots: Integers
    new: Integers
    new_slots: Integers


class Slots:
    """The row in each slot of a cache. Memory: five bytes a row, and 24 a slot.

    Evicts the rows that the fewest batches requested, whether they were in the cache then or not; ties are
    broken by the least recent request. Counts are halved periodically, so that popularity fades (the aging
    of TinyLFU, Einziger et al. 2017, section 3.3). Rows of a batch that is not released are never evicted.

    Args:
        rows: number of rows.
        slots: slots of the cache, fewer than 2^31.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self._slot = np.zeros(rows, np.int32)  # 1 + the row's slot, 0 if it has none
        self._count = np.zeros(rows, np.uint8)  # batches that requested it
        self._aged_at = 0
        self._row = np.full(slots, -1, np.int64)
        self._last_batch = np.zeros(slots, np.int64)  # the last batch that requested the row in it
        self._victims = np.arange(slots, dtype=np.int64)  # slots to reuse next
        self._victims_batch = 0  # the batch that chose them
        self.batch = 0  # number of the latest batch
        self._in_use = dict[int, Integers]()  # slots of batches that are not yet released
        self.requested = self.fetched = 0  # rows of all batches, and those of them that were cache misses

    @property
    def slots(self) -> int:
        return len(self._row)

    def begin_batch(self, rows: Integers) -> tuple[Integers, Integers, int]:
        """Begin a batch of rows [n].

        Returns:
            slots [n], -1 for a miss; the missed rows, unique and ascending; the number of slots that the
            cache lacks for them.
        """
        self.batch += 1
        self.requested += len(rows)
        slots = self._slot[rows].astype(np.int64) - 1
        absent = slots < 0
        hits = slots[~absent] if absent.any() else slots
        self._last_batch[hits] = self.batch
        self._in_use[self.batch] = hits
        # once per batch, however often it has the row
        self._count[rows] = np.minimum(self._count[rows], 254) + 1
        # Unique missed rows: they have no slot, so their entries of the slot map can hold marks. The last
        # mark of a row survives, which spares sorting duplicates.
        missed = rows[absent]
        marks = np.arange(1, len(missed) + 1, dtype=np.int32)
        self._slot[missed] = marks
        new = missed[self._slot[missed] == marks]
        self._slot[new] = 0
        new.sort()
        self.fetched += len(new)
        return slots, new, len(new) - self._find_victims(len(new))

    def assign(self, rows: Integers, slots: Integers, new: Integers) -> CacheMoves:
        """Assign slots to the missed rows `new`, and set those of `rows` in `slots`, in place."""
        granted, self._victims = self._victims[: len(new)], self._victims[len(new) :]
        old = self._row[granted]
        filled = old >= 0
        self._slot[old[filled]] = 0
        self._slot[new] = granted + 1
        self._row[granted] = new
        self._last_batch[granted] = self.batch
        missing = slots < 0
        slots[missing] = self._slot[rows[missing]] - 1
        self._in_use[self.batch] = slots
        return CacheMoves(old[filled], granted[filled], new, granted)

    def release(self, batch: int) -> None:
        """Let the rows of a batch be evicted."""
        del self._in_use[batch]

    def grow(self, count: int) -> None:
        """Append `count` slots."""
        fresh = np.arange(self.slots, self.slots + count, dtype=np.int64)
        self._row = np.concatenate([self._row, np.full(count, -1)])
        self._last_batch = np.concatenate([self._last_batch, np.zeros(count, np.int64)])
        self._victims = np.concatenate([self._victims, fresh])

    def within(self, start: int, stop: int) -> tuple[Integers, Integers]:
        """Return the cached rows among [start, stop), relative to `start`, and their slots."""
        slots = self._slot[start:stop]
        cached_rows = np.flatnonzero(slots)
        return cached_rows, slots[cached_rows].astype(np.int64) - 1

    def _find_victims(self, wanted: int) -> int:
        """Choose at least `wanted` slots to reuse, or all free ones; return their number, up to `wanted`."""
        if not wanted:
            return 0
        # drop those requested since they were chosen
        self._victims = self._victims[self._last_batch[self._victims] <= self._victims_batch]
        if len(self._victims) >= wanted:
            return wanted
        needed = np.zeros(self.slots, np.bool_)
        for slots in self._in_use.values():
            needed[slots] = True
        free = np.flatnonzero(~needed)
        count = max(wanted, self.slots // _VICTIM_SHARE)
        if count < len(free):
            rows = self._row[free]
            priority = self._count[rows].astype(np.int64) * (self.batch + 1) + self._last_batch[free]
            priority[rows < 0] = -1
            free = free[np.argpartition(priority, count)[:count]]
        self._victims, self._victims_batch = free, self.batch
        if self.requested - self._aged_at > _AGING * self.slots:
            self._aged_at = self.requested
            self._count >>= 1
        return min(wanted, len(free))


_CHUNK = 1 << 24  # bytes of rows copied at a time to or from a GPU


class CachedStore:
    """All rows are in `backing`; some are in slots on the device, and only there are they modified.

    A thread writes evicted rows back, weights and states together, and reads missed ones into slots that no
    unreleased batch uses, while the previous batch computes. A cache that is too small for two batches grows
    in `fetch`: `weight` and `states` stay the same objects, but views taken of them before are stale.

    Args:
        backing: all rows.
        device: device of the cache.
        cache: initial share of the rows in the cache, above 0.
    """

    def __init__(self, backing: HostRows, device: torch.device | str, cache: float) -> None:
        self.backing, self.rows = backing, backing.rows
        self.width = backing.width
        self._device = torch.device(device)
        self._on_host = self._device.type == "cpu"  # the cache is in host memory too
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
        """Capacity of the cache in rows."""
        return self._slots.slots

    @property
    def hits(self) -> float:
        """Share of all lookups that were cache hits."""
        return 1 - self._slots.fetched / max(1, self._slots.requested)

    @property
    def in_files(self) -> bool:
        """True if the rows are in files rather than in host memory."""
        return isinstance(self.backing, FileRows)

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight, **self.states}

    def fetch(self, rows: Tensor) -> FetchedRows:
        wanted = rows.detach().cpu().numpy()
        slots, new, missing = self._slots.begin_batch(wanted)
        if missing:
            self._grow(missing)
        moves = self._slots.assign(wanted, slots, new)
        if len(new):
            # evicted rows include the updates queued so far
            ready = None if self._side is None else recorded_event(current_stream(self._device))
            self._last = self._pool.submit(self._move, moves, self.tensors(), ready, self._last)
        # a hit may still be in flight
        return FetchedRows(moved(torch.from_numpy(slots), self._device), self._slots.batch, self._last)

    def release(self, fetched: FetchedRows) -> None:
        self._slots.release(fetched.batch)

    def read(self, start: int, stop: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
        self._wait()
        tensors = self.tensors()
        stored = self.backing.read(start, stop, tensors if names is None else names)
        cached_rows, slots = map(torch.from_numpy, self._slots.within(start, stop))
        for name, values in stored.items():
            values[cached_rows] = tensors[name][slots.to(self._device)].cpu()
        return stored

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        self._wait()
        self.backing.write(start, values)
        stop = start + max((len(value) for value in values.values()), default=0)
        cached_rows, slots = map(torch.from_numpy, self._slots.within(start, stop))
        tensors = self.tensors()
        for name, value in values.items():
            cached, tensor = cached_rows[cached_rows < len(value)], tensors[name]
            tensor[slots[: len(cached)].to(self._device)] = value[cached].to(self._device, tensor.dtype)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.weight, self.states = self.weight[:0], {}
        self.backing.close()

    def _move(
        self,
        moves: CacheMoves,
        tensors: Mapping[str, Tensor],
        ready: torch.Event | None,
        before: Future[None] | None,
    ) -> None:
        if before is not None:
            before.result()  # an error in an earlier move fails all later ones
        old, old_slots, new, new_slots = map(torch.from_numpy, moves)
        if self._on_host:
            self.backing.put(old, tensors, old_slots)
            self.backing.get(new, tensors, new_slots)
            return
        with on_stream(self._side):
            if self._side is not None and ready is not None:
                self._side.wait_event(ready)
            rows = max(1, _CHUNK // self.backing.record)
            for start in range(0, len(old), rows):
                chunk, slots = old[start : start + rows], old_slots[start : start + rows].to(self._device)
                evicted = {name: tensor.index_select(0, slots).cpu() for name, tensor in tensors.items()}
                self.backing.put(chunk, evicted, torch.arange(len(chunk)))
            for start in range(0, len(new), rows):
                chunk, slots = new[start : start + rows], new_slots[start : start + rows].to(self._device)
                missed = {
                    name: torch.empty(
                        len(chunk), *tensor.shape[1:], dtype=tensor.dtype, pin_memory=self._side is not None
                    )
                    for name, tensor in tensors.items()
                }
                self.backing.get(chunk, missed, torch.arange(len(chunk)))
                for name, tensor in tensors.items():
                    tensor.index_copy_(0, slots, missed[name].to(self._device, non_blocking=True))
            if self._side is not None:
                self._side.synchronize()

    def _wait(self) -> None:
        """Wait for all moves, and raise their errors."""
        if self._last is not None:
            self._last.result()

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
        for name, tensor in self.tensors().items():
            larger = self._empty(name, self.slots + more)
            larger[: self.slots] = tensor
            tensor.set_(larger)  # pyright: ignore[reportArgumentType, reportCallIssue]
        self._slots.grow(more)


def build_store(
    place: Place,
    rows: int,
    width: int,
    dtype: torch.dtype,
    states: Mapping[str, StateSpec],
    device: torch.device | str,
    cache: float = 0.1,
    folder: str | Path | None = None,
    rank: int = 0,
) -> RowStore:
    """Create a store of rows, all zeros.

    Args:
        place: device memory, host memory, or a file.
        device: device on which the kernels run.
        cache: share of the rows on the device, above 0, for `cpu` and `disk`.
        folder: for `disk`, a folder on a local disk.
        rank: rank of this process, for file names.

    Raises:
        StrettoError: no folder, or not enough space in it.
    """
    if place == "device":
        return DeviceStore(rows, width, dtype, states, device)
    if place == "cpu":
        backing = HostRows(rows, width, dtype, states, pin=on_accelerator(torch.device(device)))
    elif folder is None:
        raise StrettoError(
            "tables in files need a folder", hint="tables.folder: a folder on a fast local disk"
        )
    else:
        backing = FileRows(rows=rows, width=width, dtype=dtype, states=states, folder=folder, rank=rank)
    return CachedStore(backing, device, cache)
