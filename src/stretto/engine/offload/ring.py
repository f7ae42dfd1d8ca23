"""A ring of memory slots over blocks in files, with read-ahead and write-behind.

Transfers overlap as in ZeRO-Infinity (Rajbhandari et al. 2021): while one block is in use, the next is read
and the previous one is written. A read can be queued into a slot that is still being written, so the disk
does not idle until the caller polls. Unlike ZeRO-Infinity, this uses plain threads and system calls instead
of an asynchronous I/O library: a single call of tens of MiB already fills the disk's queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Literal

from torch import Tensor

from stretto.engine.offload.scratch import BLOCK, ScratchFile, aligned_memory


@dataclass(eq=False, kw_only=True)
class _Slot:
    """A slot of memory.

    key: block assigned to the slot; None before its first use.
    state: `coming`: prefetched, possibly still being read; `held`: in use by the caller; `kept`: clean or
        being written, and available for reuse.
    jobs: transfers in flight.
    used: counter value of the last use.
    """

    memory: Tensor | None = None
    key: int | None = None
    state: Literal["coming", "held", "kept"] = "kept"
    jobs: Sequence[Future[None]] = field(default_factory=list[Future[None]])
    used: int = 0


class PrefetchRing:
    """Blocks by integer key. Not thread-safe.

    Args:
        folder: folder for the block files.
        description: description of the blocks for error messages, such as "optimiser states of unit".
        slots: maximum number of blocks in memory, including those in transfer.
        pin: allocate pinned memory, for asynchronous copies to a GPU.
        threads: number of transfer threads.

    Attributes:
        waited_s: seconds that callers have blocked on transfers.
        moved_s, moved: seconds during which transfers were running, and bytes transferred.
    """

    def __init__(
        self, folder: Path, description: str, slots: int = 3, pin: bool = False, threads: int = 2
    ) -> None:
        assert slots > 0
        self._folder = folder
        self._description = description
        self._pin = pin
        self._slots = [_Slot() for _ in range(slots)]
        self._files = dict[int, ScratchFile]()
        self._writes = dict[int, Sequence[Future[None]]]()  # last write per block; its next read waits
        self._pool = ThreadPoolExecutor(threads, "stretto-offload")
        self._clock = _Clock()
        self._uses = 0
        self.waited_s = 0.0

    @property
    def slots(self) -> int:
        """Maximum number of blocks in memory."""
        return len(self._slots)

    @property
    def moved_s(self) -> float:
        """Seconds during which at least one transfer was running."""
        return self._clock.busy_s

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self._clock.moved

    def add(self, key: int, size: int) -> Tensor:
        """Create a block; returns its memory, uint8 [size], for the caller to fill and then `put`.

        Raises:
            StrettoError: not enough disk space.
        """
        assert key not in self._files, key
        path = self._folder / f"block-{key:05d}"
        self._files[key] = ScratchFile(path, size, f"{self._description} {key}")
        return self.blank(key)[:size]

    def start_fetch(self, key: int) -> None:
        """Start reading a block, if a slot is available."""
        if (slot := self._find(key)) is not None:
            slot.state = "coming" if slot.state == "kept" else slot.state
        elif (slot := self._free()) is not None:
            self._read(slot, key)

    def fetch(self, key: int) -> Tensor:
        """Return a block's memory with its contents, which the caller uses until `put` or `release`.

        Raises:
            OffloadError: reading the block failed, or a preceding write did.
        """
        slot = self._find(key)
        if slot is None:
            slot = self._free() or self._take_back()
            self._read(slot, key)
        self._settle(slot)
        return self._hold(slot)

    def blank(self, key: int) -> Tensor:
        """Like `fetch`, but without reading: the caller overwrites the entire block."""
        slot = self._find(key) or self._free() or self._take_back()
        self._settle(slot)
        self._prepare(slot, key)
        return self._hold(slot)

    def put(self, key: int) -> None:
        """Start writing the block back; the caller must no longer use its memory."""
        slot = self._of(key)
        file, memory = self._files[key], slot.memory
        assert memory is not None
        slot.jobs = self._writes[key] = self._start(file.write, memory[: file.size])
        slot.state = "kept"

    def release(self, key: int) -> None:
        """Release an unmodified block, so that its memory can be reused."""
        self._of(key).state = "kept"

    def check(self) -> None:
        """Raise the errors of finished transfers."""
        for slot in self._slots:
            for job in slot.jobs:
                if job.done():
                    job.result()

    def drain(self) -> None:
        """Wait for all transfers."""
        for slot in self._slots:
            self._settle(slot)

    def close(self) -> None:
        """Stop all transfers and remove the files; transfer errors are ignored."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._slots = [_Slot() for _ in self._slots]

    # ------------------------------------------------------------------ slots

    def _find(self, key: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.key == key), None)

    def _of(self, key: int) -> _Slot:
        slot = self._find(key)
        assert slot is not None, f"{self._description} {key} is not in memory"
        assert slot.state == "held", f"{self._description} {key} is not held"
        return slot

    def _free(self) -> _Slot | None:
        """Return the least recently used reusable slot; its write may still be in flight."""
        reusable = [slot for slot in self._slots if slot.state == "kept"]
        return min(reusable, key=lambda slot: slot.used, default=None)

    def _take_back(self) -> _Slot:
        """Return the slot of the most recent prefetch, to be evicted: a block needed now has priority."""
        coming = [slot for slot in self._slots if slot.state == "coming"]
        assert coming, f"all {len(self._slots)} blocks of memory are held"
        return max(coming, key=lambda slot: slot.used)

    def _prepare(self, slot: _Slot, key: int) -> Tensor:
        """Assign the slot to `key`, and grow its memory if needed."""
        size = self._files[key].size
        if slot.memory is None or slot.memory.numel() < size:
            self._settle(slot)
            slot.memory = None  # free the old memory before allocating the new
            slot.memory = aligned_memory(size, self._pin)
        self._uses += 1
        slot.key, slot.used = key, self._uses
        return slot.memory

    def _hold(self, slot: _Slot) -> Tensor:
        assert slot.memory is not None
        assert slot.key is not None
        assert slot.state != "held", f"{self._description} {slot.key} is held already"
        self._uses += 1
        slot.state, slot.used = "held", self._uses
        return slot.memory[: self._files[slot.key].size]

    # ------------------------------------------------------------------ transfers

    def _read(self, slot: _Slot, key: int) -> None:
        memory, file = self._prepare(slot, key), self._files[key]
        before = [*slot.jobs, *self._writes.pop(key, ())]
        slot.jobs = self._start(file.read, memory[: file.size], before)
        slot.state = "coming"

    def _start(
        self, move: Callable[[Tensor, int], None], memory: Tensor, before: Sequence[Future[None]] = ()
    ) -> list[Future[None]]:
        """Transfer in pieces of BLOCK bytes after the jobs in `before`. These were submitted earlier, so
        workers that wait for them cannot deadlock, regardless of the number of threads.
        """

        def run(start: int) -> None:
            for job in before:
                job.result()
            part = memory[start : start + BLOCK]
            with self._clock.moving(part.numel()):
                move(part, start)

        return [self._pool.submit(run, start) for start in range(0, memory.numel(), BLOCK)]

    def _settle(self, slot: _Slot) -> None:
        began = time.perf_counter()
        for job in slot.jobs:
            job.result()
        slot.jobs = []
        self.waited_s += time.perf_counter() - began


class _Clock:
    """Counts transferred bytes, and the time during which any transfer is running."""

    def __init__(self) -> None:
        self.busy_s, self.moved = 0.0, 0
        self._lock = Lock()
        self._moving = 0
        self._since = 0.0

    def moving(self, size: int) -> _Moving:
        return _Moving(self, size)

    def change(self, by: int, size: int = 0) -> None:
        with self._lock:
            if self._moving == 0:
                self._since = time.perf_counter()
            self._moving += by
            self.moved += size
            if self._moving == 0:
                self.busy_s += time.perf_counter() - self._since


@dataclass
class _Moving:
    clock: _Clock
    size: int

    def __enter__(self) -> None:
        self.clock.change(1)

    def __exit__(self, *_: object) -> None:
        self.clock.change(-1, self.size)
