"""A rank's scratch folder, which lives no longer than its process, and the files in it.

Nothing here is synced: after the process is gone its files are worthless, since a run resumes from its last
checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from stretto.errors import StrettoError

ALIGN = 4096  # bytes that addresses, offsets and lengths of unbuffered transfers are multiples of
BLOCK = 1 << 24  # bytes of one call: enough for many requests in the disk's queue
_Call = Callable[[int, Sequence[memoryview], int], int]
_NAME = re.compile(r"rank-\d{5,}-\d+(-\d+)?")
_HINT = "{} must be a folder on a local disk that this user can write"


class OffloadError(RuntimeError):
    """An offloaded file could not be written or read back: the run cannot continue, but its last checkpoint
    is intact.
    """


class Scratch:
    """`path`/rank-00003-PID: made now, removed by `close`.

    The folder is locked as long as it is in use, and the system gives up the locks of a dead process; so
    folders that can be locked are left over from one, and are removed.

    Args:
        field: that the user gave the path in, for errors.

    Raises:
        StrettoError: the folder cannot be made.
    """

    def __init__(self, path: str | Path, rank: int = 0, field: str = "dp.path") -> None:
        root = Path(path).expanduser()
        try:
            root.mkdir(parents=True, exist_ok=True)
            mutex = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(
                    mutex, fcntl.LOCK_EX
                )  # no other process removes leftovers before the new folder is locked
                _remove_left(root)
                self.folder = _new_folder(root, rank)
                lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(lock, fcntl.LOCK_EX)
            finally:
                os.close(mutex)
        except OSError as error:
            raise StrettoError(
                f"{field} is {path}: no folder can be made there: {error.strerror}", hint=_HINT.format(field)
            ) from None
        self._finalizer = weakref.finalize(self, _remove, self.folder, lock)

    def close(self) -> None:
        """Remove the folder with all that is in it."""
        self._finalizer()


def _new_folder(root: Path, rank: int) -> Path:
    name, again = f"rank-{rank:05d}-{os.getpid()}", 0
    while True:  # a second one of this process, or a process of another container with the same number
        folder = root / (f"{name}-{again}" if again else name)
        try:
            folder.mkdir(mode=0o700)
            return folder
        except FileExistsError:
            again += 1


def _remove_left(root: Path) -> None:
    for entry in os.scandir(root):
        if not _NAME.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone meanwhile
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
        except OSError:  # in use
            pass
        finally:
            os.close(lock)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def aligned(size: int) -> int:
    """The least multiple of ALIGN that is not less."""
    return -(-size // ALIGN) * ALIGN


def aligned_memory(size: int, pin: bool = False) -> Tensor:
    """uint8 [size] in host memory, from an address that unbuffered transfers take."""
    memory = torch.empty(size + ALIGN, dtype=torch.uint8, pin_memory=pin)
    skip = -memory.data_ptr() % ALIGN
    return memory[skip : skip + size]


class ScratchFile:
    """A file whose room on the disk is taken now, so that a full disk is known before training begins.

    Reads and writes go past the system's cache where the file system lets them: what is read once a step
    would only push other things out of it.

    Args:
        size: bytes, rounded up to a multiple of ALIGN.
        what: is in it, for errors.

    Raises:
        StrettoError: there is no room, or no file can be made.
    """

    def __init__(self, path: Path, size: int, what: str) -> None:
        self.path = path
        self.size = aligned(size)
        self.what = what
        self._file = -1
        try:
            self._file = _open(path)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, max(self.size, 1))
            else:
                os.truncate(self._file, self.size)
        except OSError as error:
            self.close()
            raise self._no_room(error) from None

    def _no_room(self, error: OSError) -> StrettoError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        free = f", {shutil.disk_usage(self.path.parent).free / 2**20:.1f} MiB are free" if full else ""
        return StrettoError(
            f"dp.path: no room for {self.what} in {self.path}: {error.strerror}; "
            f"the file needs {self.size / 2**20:.1f} MiB{free}",
            hint="give dp.path a disk with more room, or share the states over more ranks",
        )

    def read(self, memory: Tensor, start: int) -> None:
        """Fill uint8 memory with the bytes from `start` on; may be called from any thread.

        Raises:
            OffloadError: they cannot be read.
        """
        self._transfer(os.preadv, memory, start, "reading")

    def write(self, memory: Tensor, start: int) -> None:
        """As `read`, to the file."""
        self._transfer(os.pwritev, memory, start, "writing")

    def _transfer(self, call: _Call, memory: Tensor, start: int, doing: str) -> None:
        view, done = memory.numpy().data, 0
        try:
            while done < len(view):
                moved = call(self._file, [view[done : done + BLOCK]], start + done)
                if moved <= 0:
                    raise OSError(errno.EIO, "the file ends too early")
                done += moved
        except OSError as error:
            raise OffloadError(
                f"{doing} {self.what} failed: {error.strerror} ({self.path}, byte {start + done}); "
                "the last checkpoint is whole"
            ) from None

    def close(self) -> None:
        """Close and remove it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self.path.unlink(missing_ok=True)


def _open(path: Path) -> int:
    """A new file, past the system's cache if it takes a write that way."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if hasattr(os, "O_DIRECT"):
        file = -1
        try:
            file = os.open(path, flags | os.O_DIRECT, 0o600)
            os.pwrite(file, aligned_memory(ALIGN).zero_().numpy().data, 0)
            return file
        except OSError as error:
            if file >= 0:
                os.close(file)
            path.unlink(missing_ok=True)
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o600)
