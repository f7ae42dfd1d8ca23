"""Packed files as streams of their content: gzip, bzip2, xz and zstd, by their first bytes.

A file may hold several streams one after another, as parallel compressors write them. One that is cut off, or
followed by anything but zeros, is an error: what comes after would be lost.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

from stretto.errors import StrettoError

SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
_READ = 1 << 12
"""Bytes that are unpacked at a time: few, since a hostile file makes 100,000 times as many of them."""
_MAGIC = (
    (b"\x1f\x8b\x08", "gzip"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    *((bytes([byte]) + b"\x2a\x4d\x18", "zstd") for byte in range(0x50, 0x60)),  # a frame to be skipped
    *(
        (b"BZh" + bytes([level]) + block, "bzip2")
        for level in b"123456789"
        for block in (b"1AY&SY", b"\x17rE8P\x90")
    ),
)


def packing_of(head: bytes) -> str | None:
    """Return the program that packed a file, by its first 16 bytes, or None if it is not packed."""
    return next((name for magic, name in _MAGIC if head.startswith(magic)), None)


def unpacked(path: object, file: IO[bytes]) -> tuple[IO[bytes], str | None]:
    """Return the content of a file, and the program that packed it, if any.

    Raises:
        StrettoError: it is packed with zstd and the package is missing.
        EOFError, OSError, zlib.error, lzma.LZMAError, or an error of zstandard: damaged, raised on reading.
    """
    packing = packing_of(file.read(16))
    file.seek(0)
    if packing is None:
        return file, None
    return cast(
        IO[bytes], io.BufferedReader(_Unpacked(_blocks(file, _decompressor(path, packing))), 1 << 17)
    ), packing


def is_damage(error: Exception) -> bool:
    """Return True if an error comes from damaged packed data, not from the disk."""
    if isinstance(error, OSError):
        return error.errno is None and "data stream" in str(error)  # bzip2
    return isinstance(error, EOFError | zlib.error | lzma.LZMAError) or type(error).__name__ == "ZstdError"


def _decompressor(path: object, packing: str) -> Callable[[], Any]:
    """Return a function that creates the decompressor of one stream."""
    if packing == "gzip":
        return lambda: zlib.decompressobj(wbits=31)
    if packing == "bzip2":
        return bz2.BZ2Decompressor
    if packing == "xz":
        return lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ)
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise StrettoError(
            f"{path}: packed with zstd, which takes the package zstandard", hint="pip install 'stretto[zstd]'"
        ) from None
    return lambda: zstandard.ZstdDecompressor().decompressobj()


def _blocks(file: IO[bytes], start: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the content in blocks."""
    stream, data = None, b""
    while data or (data := file.read(_READ)):
        if stream is None or stream.eof:
            data = data.lstrip(b"\0") if stream else data  # gzip and xz may be padded
            if not data:
                continue
            stream = start()
        yield stream.decompress(data)
        data = stream.unused_data if stream.eof else b""
    if stream is None or not stream.eof:
        raise EOFError("it ends within its data")


class _Unpacked(io.RawIOBase):
    """Blocks of bytes as a file that is read forwards."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._buffered = blocks, memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not len(self._buffered):
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._buffered = memoryview(block)
        size = min(len(buffer), len(self._buffered))
        buffer[:size] = self._buffered[:size]
        self._buffered = self._buffered[size:]
        self._position += size
        return size

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Skip forwards to a position."""
        if whence != io.SEEK_SET or offset < self._position:
            raise io.UnsupportedOperation("packed files are read forwards")
        while self._position < offset and self.read(min(offset - self._position, 1 << 20)):
            pass
        return self._position
