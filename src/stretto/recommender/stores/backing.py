"""The backing store behind a cache: all rows with optimiser states, in host memory or in a mapped file."""

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
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from stretto.engine.offload.scratch import Scratch
from stretto.errors import StrettoError
from stretto.recommender.stores.store import StateSpec

Array = np.ndarray[Any, np.dtype[Any]]

_WORDS = (np.int64, np.int32, np.int16, np.int8)


class CopyRows(Protocol):
    """A way to copy. May run in several threads at once."""

    def __call__(self, target: Array, to: Array, source: Array, rows: Array) -> None:
        """target[to[i]] = source[rows[i]] for all i.

        Args:
            target, source: [any, words] of one integer type.
            to, rows: [n] int64, no row of `to` twice.
        """
        ...


def words(*sizes: int) -> type[np.signedinteger[Any]]:
    """The widest integer that divides all sizes in bytes."""
    return next(word for word in _WORDS if all(size % word().itemsize == 0 for size in sizes))


def as_words(tensor: Tensor, word: type[np.signedinteger[Any]]) -> Array:
    """Rows of a contiguous tensor on the CPU as integers: [rows, words], the same memory."""
    rows = tensor.detach().view(-1).view(torch.uint8)
    return rows.numpy().view(word).reshape(len(tensor), -1)


@cache
def copy_rows() -> CopyRows:
    """The fastest way that this installation has."""
    try:
        import numba
    except ImportError:
        return plain
    njit = cast(Any, numba).njit
    try:
        return njit(nogil=True, cache=True)(_loop)
    except RuntimeError:  # no folder that what is compiled can be kept in
        return njit(nogil=True)(_loop)


def plain(target: Array, to: Array, source: Array, rows: Array) -> None:
    """As numpy does it."""
    target[to] = source[rows]


def _loop(target: Array, to: Array, source: Array, rows: Array) -> None:
    for i in range(len(to)):
        there, here = to[i], rows[i]
        for word in range(source.shape[1]):
            target[there, word] = source[here, word]


_ALIGN = 8  # bytes that records are a multiple of


class Home:
    """Rows of a store in host memory or in a file that is mapped to it, all zeros at first.

    A row is a record: its weights, then its states. So what moves together lies together, in one page of a
    file mostly.

    Args:
        rows, width, dtype, states: as of the store.
    """

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, states: Mapping[str, StateSpec], pin: bool = False
    ) -> None:
        kinds = {"weight": StateSpec(False, dtype), **states}
        self.rows, self.width = rows, width
        self.shapes = {name: () if kind.per_row else (width,) for name, kind in kinds.items()}
        self.dtypes = {name: kind.dtype for name, kind in kinds.items()}
        self._spans = dict[str, tuple[int, int]]()
        size = 0
        for name in sorted(kinds, key=lambda name: -kinds[name].dtype.itemsize):  # each at its own multiple
            end = size + prod(self.shapes[name]) * self.dtypes[name].itemsize
            self._spans[name] = size, end
            size = end
        self.record = -(-size // _ALIGN) * _ALIGN
        self.memory = self._take(rows * self.record, pin)
        self._copy = copy_rows()

    def _take(self, size: int, pin: bool) -> Tensor:
        """uint8 [size], zeros."""
        return torch.zeros(size, dtype=torch.uint8, pin_memory=pin)

    def get(self, rows: Tensor, into: Mapping[str, Tensor], to: Tensor) -> None:
        """Rows [n] int64, each once, to rows `to` [n] of tensors on the CPU."""
        for ours, theirs in self._pairs(into):
            self._copy(theirs, to.numpy(), ours, rows.numpy())

    def put(self, rows: Tensor, source: Mapping[str, Tensor], where: Tensor) -> None:
        """Rows [n] int64, each once, from rows `where` [n] of tensors on the CPU."""
        for ours, theirs in self._pairs(source):
            self._copy(ours, rows.numpy(), theirs, where.numpy())

    def read(self, start: int, stop: int, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of rows [start, stop)."""
        return {name: self._view(name, start, stop).clone() for name in names}

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Set rows from `start` on."""
        for name, value in values.items():
            self._view(name, start, start + len(value)).copy_(value)

    def close(self) -> None:
        """Give back the memory."""
        self.memory = self.memory[:0]

    def _view(self, name: str, start: int, stop: int) -> Tensor:
        first, end = self._spans[name]
        records = self.memory[start * self.record : stop * self.record].view(stop - start, self.record)
        values = records[:, first:end].view(self.dtypes[name])
        return values if self.shapes[name] else values[:, 0]

    def _pairs(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Array, Array]]:
        """Of each tensor: its part of the records, and itself, in the same words."""
        for name, tensor in tensors.items():
            first, end = self._spans[name]
            word = words(first, end, self.record)
            size = word().itemsize
            records = as_words(self.memory.view(self.rows, self.record), word)
            yield records[:, first // size : end // size], as_words(tensor, word)


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
