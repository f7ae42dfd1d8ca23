"""Blocks of remote files on the local disk, bounded in size and shared by all processes of a machine.

A block is a file of its own, `KEY/NUMBER`, that ends with its CRC-32. It is written as `NUMBER.partial` under
a lock that dies with its process, and renamed: what a killed process leaves is never taken for a block, and
is removed. Each read opens the file and closes it again, so that a block that is dropped gives its space back
at once; whoever has it open continues to read.

fsspec's own caches do not suffice. None is bounded: a source larger than the disk fills it. `blockcache`
keeps one sparse file for each remote file, which two processes that start together may both create, the
second emptying what the first has written and marked as present; it records blocks when a file is closed, so
a killed process fetches them again; and it has no checksums. `simplecache` takes a file that another process
is still writing for a complete one.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from stretto.errors import StrettoError
from stretto.run.config.data import DataConfig

_SUM = 4  # bytes of the checksum after those of the block
_PARTIAL = ".partial"
_RECENT = 1.0  # seconds within which a block is not marked as used again; its time of change is that mark
_REMEMBERED = 1 << 16  # blocks that this process has checked


@dataclass(frozen=True)
class BlockCache:
    """The cache in `folder`, of at most `limit` bytes; the blocks unused for longest are dropped first."""

    folder: Path
    limit: int
    _checked: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]], repr=False, compare=False)

    def __reduce__(self) -> tuple[object, ...]:
        return BlockCache, (self.folder, self.limit)

    @property
    def capacity(self) -> int:
        """Bytes of blocks that are never dropped while they are in use: dropping goes a little below the
        limit, so that it is not done for every block.
        """
        return self.limit - self.limit // 16

    def has(self, key: str, number: int) -> bool:
        """Return True if a block exists, whatever its content."""
        return self._path(key, number).exists()

    def touch(self, key: str, number: int) -> bool:
        """Mark a block as used, since it will be read soon; return False if it does not exist."""
        try:
            os.utime(self._path(key, number))
        except FileNotFoundError:
            return False
        return True

    def get(self, key: str, number: int, size: int, part: slice) -> bytes | None:
        """Return bytes `part` of a block of `size` bytes, or None if it does not exist or is damaged."""
        path = self._path(key, number)
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if (key, number) not in self._checked:
                data = os.pread(fd, size + _SUM + 1, 0)
                checksum = zlib.crc32(data[:size]).to_bytes(_SUM, "little")
                if len(data) != size + _SUM or data[size:] != checksum:
                    path.unlink(missing_ok=True)
                    return None
            self._remember(key, number)
            if time.time() - os.fstat(fd).st_mtime > _RECENT:
                os.utime(fd)
            data = os.pread(fd, part.stop - part.start, part.start)
            return data if len(data) == part.stop - part.start else None
        finally:
            os.close(fd)

    def fill(
        self, key: str, number: int, size: int, fetch: Callable[[], bytes], *, wait: bool = True
    ) -> bytes | None:
        """Return the content of a block, fetched unless it exists. One process at a time fetches a block:
        others wait for it, or get None without `wait`.

        Raises:
            StrettoError: the cache cannot be written to, or what `fetch` raises.
        """
        with self._claimed(key, number, wait) as fd:
            if fd is None:
                return None
            if (data := self.get(key, number, size, slice(0, size))) is not None:
                return data
            with self._writing():
                self._make_room(fd, size + _SUM)
            data = fetch()
            with self._writing():
                content = memoryview(data + zlib.crc32(data).to_bytes(_SUM, "little"))
                while content:
                    content = content[os.write(fd, content) :]
                path = self._path(key, number)
                path.with_name(f"{number}{_PARTIAL}").rename(path)
            self._remember(key, number)
            return data

    def _path(self, key: str, number: int) -> Path:
        return self.folder / key / str(number)

    def _remember(self, key: str, number: int) -> None:
        if len(self._checked) >= _REMEMBERED:
            self._checked.clear()
        self._checked.add((key, number))

    @contextmanager
    def _claimed(self, key: str, number: int, wait: bool) -> Generator[int | None]:
        """Yield the open, empty, locked file that becomes the block, or None if another has it and not
        `wait`.
        """
        path = self._path(key, number).with_name(f"{number}{_PARTIAL}")
        while True:
            with self._writing():
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                except FileNotFoundError:  # its folder was empty, and removed
                    continue
            try:
                flock(fd, LOCK_EX if wait else LOCK_EX | LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                yield None
                return
            if _is_open_as(fd, path):  # else another has renamed or removed it meanwhile
                break
            os.close(fd)
        try:
            os.ftruncate(fd, 0)
            yield fd
        finally:
            if _is_open_as(fd, path):
                path.unlink()
            os.close(fd)

    def _make_room(self, fd: int, size: int) -> None:
        """Give the file that becomes a block its size, and drop others if they are too many."""
        with (self.folder / "bytes").open("a+b") as file:
            flock(file, LOCK_EX)
            os.ftruncate(fd, size)  # from now on other processes count it
            file.seek(0)
            before = file.read()
            total = int(before) + size if before.isdigit() else None
            if total is None or total > self.limit:
                total = self._drop()
            file.truncate(0)
            file.write(str(total).encode())

    def _drop(self) -> int:
        """Drop the blocks unused for longest if they exceed the limit; return the bytes left."""
        files, total = list[tuple[float, int, Path]](), 0
        for folder in [entry for entry in self.folder.iterdir() if entry.is_dir()]:
            for path in folder.iterdir():
                with suppress(FileNotFoundError):
                    status = path.stat()
                    if path.suffix == _PARTIAL:
                        with path.open("rb") as file, suppress(BlockingIOError):
                            flock(file, LOCK_EX | LOCK_NB)  # no process is writing it
                            path.unlink()  # under the lock: whoever waits for it sees that the file has gone
                            continue
                    else:
                        files.append((status.st_mtime, status.st_size, path))
                    total += status.st_size
            with suppress(OSError):
                folder.rmdir()  # if it is empty
        if total > self.limit:
            for _, size, path in sorted(files):
                if total <= self.capacity:
                    break
                path.unlink(missing_ok=True)
                total -= size
        return total

    @contextmanager
    def _writing(self) -> Generator[None]:
        """Turn an OSError while files are written into a StrettoError."""
        try:
            yield
        except OSError as error:
            raise StrettoError(
                f"{self.folder}: cannot be written: {error.strerror or error}",
                hint="make room or lower data.cache_gib, or name another folder with data.cache",
            ) from None


def block_cache(data: DataConfig) -> BlockCache:
    """Return the cache of blocks of sources at URLs."""
    return BlockCache(Path(data.cache or cache_dir()).expanduser() / "blocks", int(data.cache_gib * 2**30))


def cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/stretto`, else `~/.cache/stretto`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "stretto"


def _is_open_as(fd: int, path: Path) -> bool:
    """Return True if the open file is the one that the path names."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
