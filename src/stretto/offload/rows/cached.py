"""Rows in host memory or in a file, the popular ones on the device."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.offload.rows.home import Home
from stretto.offload.rows.slots import Moves, Slots
from stretto.offload.rows.store import Fetched

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
        own = rows.detach().cpu().numpy()
        slots, new, missing = self._slots.ask(own)
        if missing:
            self._grow(missing)
        moves = self._slots.bring(own, slots, new)
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
        found = self.home.read(start, stop, held if names is None else names)
        there, slots = map(torch.from_numpy, self._slots.within(start, stop))
        for name, values in found.items():
            values[there] = held[name][slots.to(self._device)].cpu()
        return found

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        self._settle()
        self.home.write(start, values)
        stop = start + max((len(value) for value in values.values()), default=0)
        there, slots = map(torch.from_numpy, self._slots.within(start, stop))
        held = self._held()
        for name, value in values.items():
            own = there[there < len(value)]
            held[name][slots[: len(own)].to(self._device)] = value[own].to(self._device, held[name].dtype)

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
