"""The backing store of a cache: all rows with optimiser states, in host memory or in a mapped file."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.engine.loops import has_numba, jit
from stretto.engine.offload.scratch import Scratch
from stretto.errors import StrettoError
from stretto.recommender.stores.store import StateSpec

Array = np.ndarray[Any, np.dtype[Any]]

_INTEGERS = (np.int64, np.int32, np.int16, np.int8)
CopyRows = Callable[[Array, Array, Array, Array], None]
"""target, to, source, rows: sets target[to[i]] = source[rows[i]] for all i.

`target` and `source` are [any, words] of one integer type, `to` and `rows` [n] int64, `to` without
duplicates. May run in several threads at once.
"""


def integer_view(tensor: Tensor, integer: type[np.signedinteger[Any]]) -> Array:
    """View rows of a contiguous tensor on the CPU as integers: [rows, integers]."""
    rows = tensor.detach().view(-1).view(torch.uint8)
    return rows.numpy().view(integer).reshape(len(tensor), -1)


@cache
def copy_rows() -> CopyRows:
    """Return the copy loop compiled by numba if it is installed, otherwise numpy's."""
    return jit(_copy_loop) if has_numba() else copy_in_numpy


def copy_in_numpy(target: Array, to: Array, source: Array, rows: Array) -> None:
    target[to] = source[rows]


def _copy_loop(target: Array, to: Array, source: Array, rows: Array) -> None:
    for i in range(len(to)):
        to_row, from_row = to[i], rows[i]
        for word in range(source.shape[1]):
            target[to_row, word] = source[from_row, word]


_ALIGN = 8  # bytes that records are a multiple of


class HostRows:
    """All rows of a store in host memory, initially zeros.

    Each row is a record of its weight and states, because they move together: in a file, mostly within one
    page.

    Args:
        rows, width, dtype, states: as for `DeviceStore`.
        pin: allocate page-locked memory.
    """

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, states: Mapping[str, StateSpec], pin: bool = False
    ) -> None:
        specs = {"weight": StateSpec(False, dtype), **states}
        self.rows, self.width = rows, width
        self.shapes = {name: () if spec.per_row else (width,) for name, spec in specs.items()}
        self.dtypes = {name: spec.dtype for name, spec in specs.items()}
        self._spans = dict[str, tuple[int, int]]()
        size = 0
        # widest first, which aligns each
        for name in sorted(specs, key=lambda name: -specs[name].dtype.itemsize):
            end = size + prod(self.shapes[name]) * self.dtypes[name].itemsize
            self._spans[name] = size, end
            size = end
        self.record = -(-size // _ALIGN) * _ALIGN
        self.memory = self._allocate(rows * self.record, pin)
        self._copy = copy_rows()

    def _allocate(self, size: int, pin: bool) -> Tensor:
        """uint8 [size], zeros."""
        return torch.zeros(size, dtype=torch.uint8, pin_memory=pin)

    def get(self, rows: Tensor, into: Mapping[str, Tensor], to: Tensor) -> None:
        """Copy unique rows [n] int64 to rows `to` [n] of tensors on the CPU."""
        for records, tensor in self._integer_views(into):
            self._copy(tensor, to.numpy(), records, rows.numpy())

    def put(self, rows: Tensor, source: Mapping[str, Tensor], source_rows: Tensor) -> None:
        """Set unique rows [n] int64 from rows `source_rows` [n] of tensors on the CPU."""
        for records, tensor in self._integer_views(source):
            self._copy(records, rows.numpy(), tensor, source_rows.numpy())

    def read(self, start: int, stop: int, names: Collection[str]) -> dict[str, Tensor]:
        """Return copies of rows [start, stop)."""
        return {name: self._view(name, start, stop).clone() for name in names}

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Set rows from `start` on."""
        for name, value in values.items():
            self._view(name, start, start + len(value)).copy_(value)

    def close(self) -> None:
        """Free the memory."""
        self.memory = self.memory[:0]

    def _view(self, name: str, start: int, stop: int) -> Tensor:
        first, end = self._spans[name]
        records = self.memory[start * self.record : stop * self.record].view(stop - start, self.record)
        values = records[:, first:end].view(self.dtypes[name])
        return values if self.shapes[name] else values[:, 0]

    def _integer_views(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Array, Array]]:
        """Yield each tensor's part of the records and the tensor itself, as arrays of the widest integer that
        divides both."""
        for name, tensor in tensors.items():
            first, end = self._spans[name]
            sizes = (first, end, self.record)
            integer = next(type_ for type_ in _INTEGERS if not any(size % type_().itemsize for size in sizes))
            size = integer().itemsize
            records = integer_view(self.memory.view(self.rows, self.record), integer)
            yield records[:, first // size : end // size], integer_view(tensor, integer)


_THREADS = 8  # threads, because a page fault blocks and a disk serves several requests at once
_ROWS_PER_THREAD = 256  # at least
_CHUNK = 1 << 11  # rows between two checks of resident memory: a fault may map up to 16 pages
_MAX_RESIDENT = 1 << 28  # bytes of the file that stay mapped in this process at most, approximately
_PAGE = mmap.PAGESIZE


class FileRows(HostRows):
    """All rows of a store in a memory-mapped file of this process. Its disk space is reserved at once, and it
    is removed by `close` or when the process ends.

    The kernel pages rows in on access and writes them back asynchronously. Pages are dropped once 256 MiB are
    resident, which bounds the process's memory.

    Args:
        folder: a folder on a local disk; this process creates its own folder in it.
        rank: rank of this process, for the folder's name.

    Raises:
        StrettoError: no folder, or not enough space in it.
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
        self._resident_before, self._touched = _resident(), 0
        self._pool = ThreadPoolExecutor(_THREADS, "stretto-disk")
        try:
            super().__init__(rows, width, dtype, states)
        except BaseException:
            self._scratch.close()
            raise

    def _allocate(self, size: int, pin: bool) -> Tensor:
        size = max(size, 1)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(file, size, self._path)
            self._map = mmap.mmap(file, size)
        finally:
            os.close(file)
        if hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)  # no read-ahead: accesses are random
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def get(self, rows: Tensor, into: Mapping[str, Tensor], to: Tensor) -> None:
        self._by_parts(super().get, rows, into, to)

    def put(self, rows: Tensor, source: Mapping[str, Tensor], source_rows: Tensor) -> None:
        self._by_parts(super().put, rows, source, source_rows)

    def read(self, start: int, stop: int, names: Collection[str]) -> dict[str, Tensor]:
        rows = max(1, _MAX_RESIDENT // 4 // self.record)
        parts = list[dict[str, Tensor]]()
        for first in range(start, max(stop, start + 1), rows):
            last = min(first + rows, stop)
            parts.append(super().read(first, last, names))
            self._count_touched((last - first) * self.record)
        return parts[0] if len(parts) == 1 else {n: torch.cat([part[n] for part in parts]) for n in names}

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        super().write(start, values)
        rows = max((len(value) for value in values.values()), default=0)
        self._count_touched(rows * self.record, wait=True)

    def close(self) -> None:
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
            part = max(_ROWS_PER_THREAD, -(-(last - first) // _THREADS))
            jobs = [
                self._pool.submit(move, rows[start:stop], tensors, others[start:stop])
                for start in range(first, last, part)
                for stop in (min(start + part, last),)
            ]
            for job in jobs:
                job.result()
            self._count_touched((last - first) * (_PAGE + self.record))

    def _count_touched(self, size: int, wait: bool = False) -> None:
        """Count `size` bytes of the file as touched and drop resident pages if there are too many; the kernel
        does not drop dirty pages.

        Args:
            wait: flush first; otherwise a long series of writes would pile up in the page cache.
        """
        now = _resident()
        self._touched += size
        self._resident_before = min(self._resident_before, now)
        if max(now - self._resident_before, self._touched if wait or not now else 0) > _MAX_RESIDENT:
            if wait:
                self._map.flush()
            if hasattr(mmap, "MADV_DONTNEED"):
                self._map.madvise(mmap.MADV_DONTNEED)
            self._resident_before, self._touched = _resident(), 0


def _resident() -> int:
    """Bytes of mapped files resident in this process; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[2]) * _PAGE
    except OSError:
        return 0


def _reserve(file: int, size: int, path: Path) -> None:
    """Reserve the space: writing to a mapping of a full disk would kill the process (SIGBUS)."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.truncate(file, size)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        free = f", {shutil.disk_usage(path.parent).free / 2**20:.1f} MiB are free" if full else ""
        raise StrettoError(
            f"tables.folder: not enough space for table rows in {path}: {error.strerror}; the file needs "
            f"{size / 2**20:.1f} MiB{free}",
            hint="choose a disk with more space for tables.folder, or spread the tables over more ranks",
        ) from None
