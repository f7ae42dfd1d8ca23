"""Files with a CRC-32 per chunk, written and checked as streams."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from stretto.errors import StrettoError

CHUNK = 1 << 26
"""Bytes under one checksum."""


@dataclass(frozen=True, slots=True)
class FileSums:
    """Length of a file and the crc32 of each of its chunks."""

    bytes: int
    crc32: list[int] = field(default_factory=list[int])


class RunningSums:
    """The checksums of a file that is being written, continued from `sums`."""

    def __init__(self, sums: FileSums | None = None, chunk: int = CHUNK) -> None:
        start = sums or FileSums(0)
        self._bytes = start.bytes
        self._crc32 = list(start.crc32)
        self._chunk = chunk

    def add(self, data: memoryview) -> None:
        """Add appended bytes."""
        while len(data):
            within = self._bytes % self._chunk
            if within == 0:
                self._crc32.append(0)
            part = data[: self._chunk - within]
            self._crc32[-1] = zlib.crc32(part, self._crc32[-1])
            self._bytes += len(part)
            data = data[len(part) :]

    def sums(self) -> FileSums:
        """Return the sums of the bytes so far."""
        return FileSums(self._bytes, list(self._crc32))


class SummedFile:
    """A new file, written from start to end; `close` makes it durable and returns its checksums."""

    def __init__(self, path: Path, chunk: int = CHUNK) -> None:
        self._file = path.open("xb")
        self._sums = RunningSums(chunk=chunk)

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        data = memoryview(data).cast("B")
        self._file.write(data)
        self._sums.add(data)

    def close(self) -> FileSums:
        """Flush to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._sums.sums()


class _HasSize(Protocol):
    def is_file(self) -> bool: ...

    def stat(self) -> Any: ...


def check_size(path: _HasSize, sums: FileSums) -> None:
    """Raise StrettoError if the file is missing, too short or too long."""
    if not path.is_file():
        raise StrettoError(f"{path}: missing from its folder", hint="build the folder again")
    size = path.stat().st_size
    if size != sums.bytes:
        problem = "truncated" if size < sums.bytes else "too long"
        raise StrettoError(
            f"{path}: {problem}: {size} bytes, {sums.bytes} were written", hint="build the folder again"
        )


def check_chunks(
    path: Path,
    sums: FileSums,
    chunk: int = CHUNK,
    which: Iterable[int] | None = None,
    look: Callable[[int, bytes], None] | None = None,
) -> None:
    """Check the CRC-32 of chunks `which` (default: all), and pass offset and bytes of each to `look`.

    Raises:
        StrettoError: a corrupt chunk, named with its bytes.
    """
    for number in range(len(sums.crc32)) if which is None else sorted(which):
        try:
            with path.open("rb") as file:
                file.seek(number * chunk)
                data = file.read(chunk)
        except OSError as error:
            raise StrettoError(
                f"{path}: cannot be read: {error.strerror}", hint="check its permissions"
            ) from None
        if zlib.crc32(data) != sums.crc32[number]:
            raise StrettoError(
                f"{path}: corrupt in chunk {number} of {len(sums.crc32)}"
                f" (bytes {number * chunk} to {number * chunk + len(data)})",
                hint="build the folder again",
            )
        if look:
            look(number * chunk, data)
