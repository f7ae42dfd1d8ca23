"""Reads whole lines of plain or gzipped text files in blocks of bounded size, from any offset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import StrettoError
from stretto.run.data.readers import opened

BLOCK = 1 << 21
"""Larger ones are slower to read: their arrays fall out of the cache."""
LONGEST_LINE = 1 << 24


@dataclass(frozen=True)
class Block:
    """Whole lines: the first is line `line` of its file, from 1; the next block begins at byte `end`."""

    data: bytes
    line: int
    end: int


def blocks(path: Path, start: int = 0, line: int = 1, size: int = BLOCK) -> Iterator[Block]:
    """The lines from byte `start` on, which is where line `line` begins, in blocks of about `size` bytes.

    Bytes are those of the unpacked file; one in gzip is unpacked from its beginning again.

    Raises:
        StrettoError: unreadable, damaged gzip, a line of more than 16 MiB.
    """
    with opened(path) as file:
        file.seek(start)
        held = b""
        while True:
            data = file.read(size)
            held += data
            cut = held.rfind(b"\n") + 1 if data else len(held)
            if not cut and len(held) > LONGEST_LINE:
                raise StrettoError(
                    f"{path}, line {line}: longer than {LONGEST_LINE >> 20} MiB", hint="is it a text file?"
                )
            if cut:
                whole, held = held[:cut], held[cut:]
                start += cut
                lines = whole.count(b"\n")
                yield Block(whole, line, start)
                line += lines
            if not data:
                return
