"""Rows in a file that is mapped to memory."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from stretto.engine.offload.scratch import Scratch
from stretto.errors import StrettoError
from stretto.recommender.stores.home import Home
from stretto.recommender.stores.store import StateSpec

_READERS = 8  # threads: a page that is not in memory is waited for, and a disk takes several requests at once
_PART = 256  # rows that one of them takes at least
_CHUNK = 1 << 11  # rows that move between two looks at what is present: with a page come up to 16 neighbours
_PRESENT = 1 << 28  # bytes of the file that count as this process's memory at most, or little more
_PAGE = mmap.PAGESIZE


class MappedRows(Home):
    """Rows in a file of this process, whose room on the disk is taken at once, and which goes with `close` or
    with the process.

    The system reads pages as rows are asked for, and writes them back when it likes. All pages are given back
    to it when they have become 256 MiB, so the process never has much of the file in its memory.

    Args:
        folder: a local disk; this process makes its own folder in it.
        rank: for the folder's name.

    Raises:
        StrettoError: no folder, or no room.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        dtype: torch.dtype,
        states: Mapping[str, StateSpec],
        folder: str | Path,
        rank: int = 0,
    ) -> None:
        self._scratch = Scratch(folder, rank, "tables.folder")
        self._path = self._scratch.folder / "rows"
        self._before, self._counted = _resident(), 0
        self._pool = ThreadPoolExecutor(_READERS, "stretto-disk")
        try:
            super().__init__(rows, width, dtype, states)
        except BaseException:
            self._scratch.close()
            raise

    def _take(self, size: int, pin: bool) -> Tensor:
        size = max(size, 1)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(file, size, self._path)
            self._map = mmap.mmap(file, size)
        finally:
            os.close(file)
        if hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)  # neighbours of a row are as rare as any other
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def get(self, rows: Tensor, into: Mapping[str, Tensor], to: Tensor) -> None:
        self._by_parts(super().get, rows, into, to)

    def put(self, rows: Tensor, source: Mapping[str, Tensor], where: Tensor) -> None:
        self._by_parts(super().put, rows, source, where)

    def read(self, start: int, stop: int, names: Collection[str]) -> dict[str, Tensor]:
        rows = max(1, _PRESENT // 4 // self.record)
        parts = list[dict[str, Tensor]]()
        for first in range(start, max(stop, start + 1), rows):
            last = min(first + rows, stop)
            parts.append(super().read(first, last, names))
            self._used((last - first) * self.record)
        return parts[0] if len(parts) == 1 else {n: torch.cat([part[n] for part in parts]) for n in names}

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        super().write(start, values)
        rows = max((len(value) for value in values.values()), default=0)
        self._used(rows * self.record, wait=True)

    def close(self) -> None:
        """Remove the file."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        super().close()
        self._scratch.close()

    def _by_parts(
        self,
        move: Callable[[Tensor, Mapping[str, Tensor], Tensor], None],
        rows: Tensor,
        tensors: Mapping[str, Tensor],
        others: Tensor,
    ) -> None:
        for first in range(0, len(rows), _CHUNK):
            last = min(first + _CHUNK, len(rows))
            part = max(_PART, -(-(last - first) // _READERS))
            jobs = [
                self._pool.submit(move, rows[start:stop], tensors, others[start:stop])
                for start in range(first, last, part)
                for stop in (min(start + part, last),)
            ]
            for job in jobs:
                job.result()
            self._used((last - first) * (_PAGE + self.record))

    def _used(self, size: int, wait: bool = False) -> None:
        """So many bytes of the file were touched, or more where neighbours are mapped as well: give pages
        back if they have become many. Changed ones are not lost.

        Args:
            wait: until the disk has what was changed: all that is written at the beginning would else pile up
                in the system's memory.
        """
        now = _resident()
        self._counted += size
        self._before = min(self._before, now)
        if max(now - self._before, self._counted if wait or not now else 0) > _PRESENT:
            if wait:
                self._map.flush()
            if hasattr(mmap, "MADV_DONTNEED"):
                self._map.madvise(mmap.MADV_DONTNEED)
            self._before, self._counted = _resident(), 0


def _resident() -> int:
    """Bytes of files in this process's memory; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[2]) * _PAGE
    except OSError:
        return 0


def _reserve(file: int, size: int, path: Path) -> None:
    """Take the room: a full disk would else end the process when it writes to the mapping."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.truncate(file, size)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        free = f", {shutil.disk_usage(path.parent).free / 2**20:.1f} MiB are free" if full else ""
        raise StrettoError(
            f"tables.folder: no room for rows of tables in {path}: {error.strerror}; the file needs "
            f"{size / 2**20:.1f} MiB{free}",
            hint="give tables.folder a disk with more room, or spread the tables over more ranks",
        ) from None
