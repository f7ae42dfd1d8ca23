"""Rows in host memory or in a file, the popular ones on the device."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.recommender.stores.backing import Home
from stretto.recommender.stores.store import Fetched

Integers = np.ndarray[Any, np.dtype[np.int64]]

_SHARE = (
    8  # of the slots, one in so many is lined up to go at a time: a look at all of them costs their number
)
_MEMORY = 10  # counts are halved when each slot was asked for so many times, on average


@dataclass(frozen=True, kw_only=True)
class Moves:
    """What a batch asks for.

    Attributes:
        slots: [n] of its rows.
        old, old_slots: [k] rows that leave the cache, and from where.
        new, new_slots: [m] rows that come, ascending, and to where.
    """

    slots: Integers
    old: Integers
    old_slots: Integers
    new: Integers
    new_slots: Integers


class Slots:
    """The map of a cache: four bytes of memory for a row that was ever asked for, one for each of all rows,
    and sixteen for a slot.

    The rows leave that the fewest batches asked for, be they in the cache then or not, and among equals those
    that were not asked for longest. Counts are halved now and then, so that old fame fades (the aging of
    TinyLFU, Einziger et al. 2017, section 3.3). A row that any batch needs that is not released stays.

    Args:
        rows: that there are.
        slots: that the cache has, less than 2^31.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self._slot = np.zeros(rows, np.int32)  # 1 + the row's slot, 0 where it has none
        self._count = np.zeros(rows, np.uint8)  # batches that asked for it
        self._counted = 0
        self._row = np.full(slots, -1, np.int64)
        self._seen = np.zeros(slots, np.int64)  # the last batch that asked for what is in it
        self._line = np.arange(slots, dtype=np.int64)  # slots to be given away next
        self._lined = 0  # the batch for which they were lined up
        self._batch = 0
        self._open = dict[int, Integers]()  # slots of batches that are not released
        self.asked = self.moved = 0  # rows of all batches, and those of them that had to be brought

    @property
    def slots(self) -> int:
        return len(self._row)

    @property
    def batch(self) -> int:
        """The number of the batch that was asked for last."""
        return self._batch

    def ask(self, rows: Integers) -> tuple[Integers, Integers, int]:
        """Begin a batch.

        Returns:
            slots [n], -1 where a row is not there; the rows that are not there, each once, ascending; how
            many slots are missing for them.
        """
        self._batch += 1
        self.asked += len(rows)
        slots = self._slot[rows].astype(np.int64) - 1
        absent = slots < 0
        there = slots[~absent] if absent.any() else slots
        self._seen[there] = self._batch
        self._open[self._batch] = there
        self._count[rows] = np.minimum(self._count[rows], 254) + 1  # one, however often the batch has the row
        new = self._once(rows[absent])
        self.moved += len(new)
        return slots, new, len(new) - self._leavers(len(new))

    def bring(self, rows: Integers, slots: Integers, new: Integers) -> Moves:
        """Give slots to the rows that are not there, of which there are enough."""
        granted, self._line = self._line[: len(new)], self._line[len(new) :]
        old = self._row[granted]
        filled = old >= 0
        self._slot[old[filled]] = 0
        self._slot[new] = granted + 1
        self._row[granted] = new
        self._seen[granted] = self._batch
        missing = slots < 0
        slots[missing] = self._slot[rows[missing]] - 1
        self._open[self._batch] = slots
        return Moves(slots=slots, old=old[filled], old_slots=granted[filled], new=new, new_slots=granted)

    def release(self, batch: int) -> None:
        """Its rows may go."""
        del self._open[batch]

    def grow(self, more: int) -> None:
        """There are so many more slots, behind all others."""
        fresh = np.arange(self.slots, self.slots + more, dtype=np.int64)
        self._row = np.concatenate([self._row, np.full(more, -1)])
        self._seen = np.concatenate([self._seen, np.zeros(more, np.int64)])
        self._line = np.concatenate([self._line, fresh])

    def within(self, start: int, stop: int) -> tuple[Integers, Integers]:
        """Which of rows [start, stop) are there, as differences from `start`, and their slots."""
        slots = self._slot[start:stop]
        there = np.flatnonzero(slots)
        return there, slots[there].astype(np.int64) - 1

    def _once(self, rows: Integers) -> Integers:
        """Each row once, ascending. Rows have no slot: where that stands they leave marks, the last one's
        mark stays, and so a sort of all is spared.
        """
        marks = np.arange(1, len(rows) + 1, dtype=np.int32)
        self._slot[rows] = marks
        once = rows[self._slot[rows] == marks]
        self._slot[once] = 0
        once.sort()
        return once

    def _leavers(self, wanted: int) -> int:
        """Line up so many slots to be given away, or all that can be; returns how many stand there."""
        if not wanted:
            return 0
        self._line = self._line[self._seen[self._line] <= self._lined]  # who was asked for since then stays
        if len(self._line) >= wanted:
            return wanted
        needed = np.zeros(self.slots, np.bool_)
        for slots in self._open.values():
            needed[slots] = True
        free = np.flatnonzero(~needed)
        many = max(wanted, self.slots // _SHARE)
        if many < len(free):
            rows = self._row[free]
            fame = self._count[rows].astype(np.int64) * (self._batch + 1) + self._seen[free]
            fame[rows < 0] = -1
            free = free[np.argpartition(fame, many)[:many]]
        self._line, self._lined = free, self._batch
        self._fade()
        return min(wanted, len(free))

    def _fade(self) -> None:
        if self.asked - self._counted > _MEMORY * self.slots:
            self._counted = self.asked
            self._count >>= 1


_CHUNK = 1 << 24  # bytes of rows that move in one piece to or from a device that is not the host


@dataclass(frozen=True, eq=False)
class Coming:
    """Rows of a batch, on their way to slots."""

    batch: int
    _slots: Tensor
    _job: Future[None] | None

    def slots(self) -> Tensor:
        """[n] int64. Waits; raises what went wrong on the way."""
        if self._job is not None:
            self._job.result()
        return self._slots


class CachedStore:
    """All rows are at `home`, some of them in slots on the device, where alone they are changed.

    A thread moves rows: those that leave are written back, weights and states together, and those that come
    are read, into slots that no batch which is not released has. So it works beside the batch before. A cache
    that is too small for two batches grows, in `fetch`: `weight` and `states` stay the same objects, views of
    them taken before do not.

    Args:
        home: the rows.
        device: where the cache is.
        cache: part of the rows that it holds at first, more than 0.
    """

    def __init__(self, home: Home, device: torch.device | str, cache: float) -> None:
        self.home, self.rows = home, home.rows
        self.width = home.width
        self._device = torch.device(device)
        slots = min(home.rows, max(1, -int(-home.rows * cache // 1)))
        self._slots = Slots(home.rows, slots)
        tensors = {name: self._empty(name, slots) for name in home.shapes}
        self.weight = tensors.pop("weight")
        self.states: dict[str, Tensor] = tensors
        self._pool = ThreadPoolExecutor(1, "stretto-rows")
        self._last: Future[None] | None = None
        self._told = False
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @property
    def slots(self) -> int:
        """Rows that the cache holds."""
        return self._slots.slots

    @property
    def hits(self) -> float:
        """Part of all lookups for which no row had to be brought."""
        return 1 - self._slots.moved / max(1, self._slots.asked)

    @property
    def _here(self) -> bool:
        """Whether the device's memory is the host's."""
        return self._device.type == "cpu"

    def fetch(self, rows: Tensor) -> Coming:
        wanted = rows.detach().cpu().numpy()
        slots, new, missing = self._slots.ask(wanted)
        if missing:
            self._grow(missing)
        moves = self._slots.bring(wanted, slots, new)
        where = torch.from_numpy(moves.slots).to(self._device)
        if len(new):
            self._start(moves)
        return Coming(self._slots.batch, where, self._last)  # what it finds there may be on its way still

    def release(self, fetched: Fetched) -> None:
        assert isinstance(fetched, Coming)
        self._slots.release(fetched.batch)

    def read(self, start: int, stop: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
        self._settle()
        held = self._held()
        stored = self.home.read(start, stop, held if names is None else names)
        there, slots = map(torch.from_numpy, self._slots.within(start, stop))
        for name, values in stored.items():
            values[there] = held[name][slots.to(self._device)].cpu()
        return stored

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        self._settle()
        self.home.write(start, values)
        stop = start + max((len(value) for value in values.values()), default=0)
        there, slots = map(torch.from_numpy, self._slots.within(start, stop))
        held = self._held()
        for name, value in values.items():
            cached = there[there < len(value)]
            held[name][slots[: len(cached)].to(self._device)] = value[cached].to(
                self._device, held[name].dtype
            )

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.weight, self.states = self.weight[:0], {}
        self.home.close()

    # ------------------------------------------------------------------ moving

    def _start(self, moves: Moves) -> None:
        ready = None
        if self._side is not None:  # what was computed so far belongs to what leaves
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._device))
        self._last = self._pool.submit(self._move, moves, self._held(), ready, self._last)

    def _move(
        self,
        moves: Moves,
        held: Mapping[str, Tensor],
        ready: torch.cuda.Event | None,
        before: Future[None] | None,
    ) -> None:
        if before is not None:
            before.result()  # over; what went wrong in it, went wrong for all that come
        old, old_slots, new, new_slots = map(
            torch.from_numpy, (moves.old, moves.old_slots, moves.new, moves.new_slots)
        )
        if self._here:
            self.home.put(old, held, old_slots)
            self.home.get(new, held, new_slots)
            return
        with torch.cuda.stream(self._side):
            if self._side is not None and ready is not None:
                self._side.wait_event(ready)
            rows = max(1, _CHUNK // self.home.record)
            for start in range(0, len(old), rows):
                self._leave(old[start : start + rows], held, old_slots[start : start + rows])
            for start in range(0, len(new), rows):
                self._come(new[start : start + rows], held, new_slots[start : start + rows])
            if self._side is not None:
                self._side.synchronize()

    def _leave(self, rows: Tensor, held: Mapping[str, Tensor], slots: Tensor) -> None:
        there = slots.to(self._device)
        gone = {name: tensor.index_select(0, there).cpu() for name, tensor in held.items()}
        self.home.put(rows, gone, torch.arange(len(rows)))

    def _come(self, rows: Tensor, held: Mapping[str, Tensor], slots: Tensor) -> None:
        pin, there = self._side is not None, slots.to(self._device)
        come = {
            name: torch.empty(len(rows), *tensor.shape[1:], dtype=tensor.dtype, pin_memory=pin)
            for name, tensor in held.items()
        }
        self.home.get(rows, come, torch.arange(len(rows)))
        for name, tensor in held.items():
            tensor.index_copy_(0, there, come[name].to(self._device, non_blocking=True))

    def _settle(self) -> None:
        """Wait for all moves, and raise what went wrong in them."""
        if self._last is not None:
            self._last.result()

    # ------------------------------------------------------------------ cache

    def _held(self) -> dict[str, Tensor]:
        return {"weight": self.weight, **self.states}

    def _empty(self, name: str, slots: int) -> Tensor:
        return torch.zeros(slots, *self.home.shapes[name], dtype=self.home.dtypes[name], device=self._device)

    def _grow(self, missing: int) -> None:
        more = min(self.rows - self.slots, max(missing, self.slots // 4))
        if not self._told:
            self._told = True
            warnings.warn(
                f"a cache of {self.slots} of {self.rows} rows is too small for two batches: it grows, and "
                "takes more memory of the device than planned; give the tables a larger `cache`",
                stacklevel=3,
            )
        self._settle()
        for name, tensor in self._held().items():
            larger = self._empty(name, self.slots + more)
            larger[: self.slots] = tensor
            tensor.set_(larger)  # pyright: ignore[reportArgumentType, reportCallIssue]
        self._slots.grow(more)
