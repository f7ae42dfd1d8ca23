"""A rank's scratch folder, which lasts no longer than its process, and the files in it.

Nothing is synced to disk: the files are useless once the process has ended, since runs resume from their
last checkpoint.
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

ALIGN = 4096  # alignment of addresses, offsets and lengths for unbuffered I/O (O_DIRECT)
BLOCK = 1 << 24  # bytes per system call: enough to fill the disk's queue
_Call = Callable[[int, Sequence[memoryview], int], int]
_NAME = re.compile(r"rank-\d{5,}-\d+(-\d+)?")
_HINT = "{} must be a folder on a local disk that this user can write"


class OffloadError(RuntimeError):
    """An offloaded file could not be written or read back: the run cannot continue, but its last checkpoint
    is intact.
    """


class Scratch:
    """The folder `path`/rank-00003-PID, created by the constructor and removed by `close`.

    The folder is locked while in use, and the system releases the locks of dead processes. A folder that can
    be locked is therefore left over from a dead process, and is removed.

    Args:
        field: configuration field with the path, for error messages.

    Raises:
        StrettoError: the folder cannot be created.
    """

    def __init__(self, path: str | Path, rank: int = 0, field: str = "dp.path") -> None:
        root = Path(path).expanduser()
        try:
            root.mkdir(parents=True, exist_ok=True)
            mutex = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(
                    mutex, fcntl.LOCK_EX
                )  # keeps other processes from removing the new folder before it is locked
                _remove_left(root)
                self.folder = _new_folder(root, rank)
                lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(lock, fcntl.LOCK_EX)
            finally:
                os.close(mutex)
        except OSError as error:
            raise StrettoError(
                f"{field} is {path}: no folder can be created: {error.strerror}", hint=_HINT.format(field)
            ) from None
        self._finalizer = weakref.finalize(self, _remove, self.folder, lock)

    def close(self) -> None:
        """Remove the folder and its contents."""
        self._finalizer()


def _new_folder(root: Path, rank: int) -> Path:
    name, again = f"rank-{rank:05d}-{os.getpid()}", 0
    while True:  # the name may be taken: by this process, or by the same PID in another container
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
        except OSError:  # owned by another user, or removed in the meantime
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
    """Return `size` rounded up to a multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


def aligned_memory(size: int, pin: bool = False) -> Tensor:
    """Return uint8 [size] in host memory, aligned for unbuffered I/O."""
    memory = torch.empty(size + ALIGN, dtype=torch.uint8, pin_memory=pin)
    skip = -memory.data_ptr() % ALIGN
    return memory[skip : skip + size]


class ScratchFile:
    """A file with preallocated disk space, so that a full disk is detected before training starts.

    I/O bypasses the page cache where the file system supports it: data read once per step would only evict
    more useful pages.

    Args:
        size: bytes, rounded up to a multiple of ALIGN.
        contents: description of the contents, for error messages.

    Raises:
        StrettoError: not enough disk space, or the file cannot be created.
    """

    def __init__(self, path: Path, size: int, contents: str) -> None:
        self.path = path
        self.size = aligned(size)
        self.contents = contents
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
            f"dp.path: no room for {self.contents} in {self.path}: {error.strerror}; "
            f"the file needs {self.size / 2**20:.1f} MiB{free}",
            hint="give dp.path a disk with more free space, or shard the states over more ranks",
        )

    def read(self, memory: Tensor, start: int) -> None:
        """Fill uint8 memory with the file's bytes from offset `start`. Thread-safe.

        Raises:
            OffloadError: the read failed.
        """
        self._transfer(os.preadv, memory, start, "reading")

    def write(self, memory: Tensor, start: int) -> None:
        """Write uint8 memory to the file at offset `start`; otherwise like `read`."""
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
                f"{doing} {self.contents} failed: {error.strerror} ({self.path}, byte {start + done}); "
                "the last checkpoint is intact"
            ) from None

    def close(self) -> None:
        """Close and remove the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self.path.unlink(missing_ok=True)


def _open(path: Path) -> int:
    """Create a file, with O_DIRECT if a test write succeeds."""
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
