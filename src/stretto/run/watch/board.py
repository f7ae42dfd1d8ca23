"""The rows of all local ranks, in memory that they share with their launcher."""

from __future__ import annotations

import mmap
import os
import signal
import tempfile
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from stretto.engine.progress import SIZE, RankMarks, read_row

_MEMORY = "/dev/shm"
# dumps the Python stacks of a rank that cannot answer; programs use the first of these signals
STACKS = getattr(signal, "SIGRTMIN", 0) + 5 if hasattr(signal, "SIGRTMIN") else 0


class StatusBoard:
    """One row for each local rank, a byte that requests their records, and a file for their stacks. It is
    passed to the ranks as an argument of the function that they run.

    Args:
        folder: destination of the ranks' records.
    """

    def __init__(self, ranks: int, folder: Path) -> None:
        size = (ranks + 1) * SIZE
        shared = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        with tempfile.TemporaryFile(dir=shared) as file, tempfile.TemporaryFile(dir=shared) as stacks:
            file.write(bytes(size))  # a hole that cannot be filled later would end a rank with SIGBUS
            file.flush()
            self._set(ranks, folder, os.dup(file.fileno()), os.dup(stacks.fileno()))

    def _set(self, ranks: int, folder: Path, descriptor: int, stacks: int) -> None:
        self.ranks, self.folder = ranks, folder
        self._descriptor, self.stacks = descriptor, stacks
        self._map = mmap.mmap(descriptor, (ranks + 1) * SIZE)
        self._rows = memoryview(self._map)

    def __reduce__(self) -> Any:
        dup: Any = reduction.DupFd
        return _received, (self.ranks, self.folder, dup(self._descriptor), dup(self.stacks))

    def memory(self, rank: int) -> memoryview:
        """Return the memory of a rank's row."""
        return self._rows[rank * SIZE : (rank + 1) * SIZE]

    def row(self, rank: int) -> RankMarks:
        """Return a rank's row."""
        return read_row(bytes(self.memory(rank)))

    @property
    def has_begun(self) -> bool:
        """True if any rank has begun a step."""
        return any(self.row(rank).step > 0 for rank in range(self.ranks))

    def ask(self) -> None:
        """Ask all ranks for their records."""
        self._rows[self.ranks * SIZE] = (self._rows[self.ranks * SIZE] + 1) % 256

    @property
    def requests(self) -> int:
        """Number of requests for records so far, modulo 256."""
        return self._rows[self.ranks * SIZE]

    def read_stacks(self, start: int) -> str:
        """Return what ranks have written to the file of stacks, from byte `start`."""
        return os.pread(self.stacks, 1 << 20, start).decode(errors="replace")

    def close(self) -> None:
        """Release the memory."""
        self._rows.release()
        self._map.close()
        os.close(self._descriptor)
        os.close(self.stacks)


def _received(ranks: int, folder: Path, descriptor: Any, stacks: Any) -> StatusBoard:
    """Return the board on a rank."""
    board = StatusBoard.__new__(StatusBoard)
    board._set(ranks, folder, descriptor.detach(), stacks.detach())  # pyright: ignore[reportPrivateUsage]
    return board
