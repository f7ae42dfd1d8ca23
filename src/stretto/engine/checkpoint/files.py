"""Durable, checksummed files: creating, syncing, and reading within limits.

No function follows a link or a name out of its folder, and files are readable by their owner only.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from stretto.errors import StrettoError

BLOCK = 1 << 22  # bytes per call: enough for full disk speed, and small enough for the CPU's cache
PRIVATE = 0o600  # mode of files in a checkpoint
MAX_JSON = 1 << 28  # bytes; a larger manifest or index is refused before it is read
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class DamageError(Exception):
    """A file of a checkpoint was changed or lost; the message names the file and the difference."""


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and CRC-32 of one file."""

    size: int
    crc32: int


class CheckedWriter:
    """A new file that counts and checksums the bytes written to it; durable once `close` returns."""

    def __init__(self, path: Path, mode: int = PRIVATE) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        self._stream = os.fdopen(os.open(path, flags, mode), "wb", buffering=0)
        self._path = path
        self._size = 0
        self._crc = 0

    def __enter__(self) -> CheckedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data)
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            self._crc = zlib.crc32(block, self._crc)
            while block:
                block = block[self._write_once(block) :]
        self._size += len(view)

    def _write_once(self, block: memoryview) -> int:
        """Write as much as one system call accepts."""
        try:
            return self._stream.write(block) or 0
        except OSError as error:
            error.filename = str(self._path)
            raise

    def close(self) -> FileEntry:
        """Sync the file to disk; until this returns it may be lost in a crash."""
        os.fsync(self._stream.fileno())
        self._stream.close()
        return FileEntry(self._size, self._crc)


def write_file(path: Path, data: bytes) -> FileEntry:
    """Write a new durable file with these bytes."""
    with CheckedWriter(path) as file:
        file.write(data)
        return file.close()


def sync_folder(path: Path) -> None:
    """Make the folder's own entries (names created, renamed, removed) durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_room(folder: Path, needed: int, contents: str) -> None:
    """Check that a folder exists or can be created, and that its disk has `needed` bytes free.

    Args:
        contents: description of the contents, for the error message.

    Raises:
        StrettoError: the path is a file, or the disk has too little free space.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise StrettoError(f"{existing} is a file", hint="name another folder")
    usage = shutil.disk_usage(existing)
    if usage.total and needed > usage.free:  # some file systems report no sizes
        raise StrettoError(
            f"{contents} needs {size_text(needed)}, and {existing} has {size_text(usage.free)} free",
            hint="free disk space, or name a folder on another disk",
        )


def remove(path: Path) -> None:
    """Remove a folder or anything else by that name, if it exists; a link is removed, never followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)  # also a FIFO, which `rmtree` would open and wait for


def safe_name(name: str) -> bool:
    """True if a name read from a file may be joined to a folder: one path component, without leading dots."""
    return _NAME.fullmatch(name) is not None


def plain_file(folder: Path, name: str) -> Path:
    """Return the path of a file named in a checkpoint.

    Raises:
        DamageError: it is missing, a link, not a regular file, or its name leads out of the folder.
    """
    if not safe_name(name):
        raise DamageError(f"file name {name!r} is not allowed in a checkpoint")
    path = folder / name
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise DamageError(f"file {name} is missing") from None
    if not stat.S_ISREG(mode):
        raise DamageError(f"{name} is not a plain file")
    return path


def open_plain(folder: Path, name: str) -> BinaryIO:
    """Open a file named in a checkpoint for reading; does not block if it has been replaced by a pipe.

    Raises:
        DamageError: as for `plain_file`.
    """
    path = plain_file(folder, name)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamageError(f"{name} is not a plain file")
    return os.fdopen(descriptor, "rb")


def check_size(folder: Path, name: str, entry: FileEntry) -> Path:
    """Return the file's path if it has the size it was written with; otherwise raise DamageError."""
    path = plain_file(folder, name)
    size = path.stat().st_size
    if size != entry.size:
        raise DamageError(f"file {name} has {size} bytes, {entry.size} were written")
    return path


def check_file(folder: Path, name: str, entry: FileEntry) -> None:
    """Read the entire file and compare size and checksum; raise DamageError if they differ."""
    check_size(folder, name, entry)
    crc = 0
    with open_plain(folder, name) as file:
        while block := file.read(BLOCK):
            crc = zlib.crc32(block, crc)
    if crc != entry.crc32:
        raise DamageError(f"file {name}: crc32 is {crc:08x}, {entry.crc32:08x} was written")


def dump_json(value: Any) -> bytes:
    """Return the canonical JSON of a value: reading and writing it again gives the same bytes."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def read_json(folder: Path, name: str) -> Any:
    """Read a JSON file of a checkpoint; raise DamageError for anything else.

    Infinities, repeated keys and files over MAX_JSON bytes are refused.
    """
    size = plain_file(folder, name).stat().st_size
    if size > MAX_JSON:
        raise DamageError(f"file {name} has {size} bytes, the limit is {MAX_JSON}")
    try:
        with open_plain(folder, name) as file:
            text = file.read().decode("ascii")
        return json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"file {name} is not valid JSON: {error}") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is too large for a float")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key is repeated")
    return record


def size_text(size: int) -> str:
    """Return a readable size, such as "3.2 GiB"."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{size} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
