"""Raw samples of a click log before the transform, and what the readers of its formats share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.run.data.readers import opened

Keys = Literal["hex", "int", "text"]
"""The type of a categorical value: eight hexadecimal digits, an integer, or any text."""
_SHIFTS = tuple(np.uint64(s) for s in (30, 27, 31))
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_INVERSES = tuple(np.uint64(pow(int(factor), -1, 1 << 64)) for factor in _FACTORS)


@dataclass(frozen=True)
class Columns:
    """The columns of a click log.

    Attributes:
        numbers: names of the dense columns.
        features: names of the categorical columns.
        keys: type of each feature's values.
        lists: True for each feature with a list of values per sample.
    """

    numbers: tuple[str, ...]
    features: tuple[str, ...]
    keys: tuple[Keys, ...]
    lists: tuple[bool, ...]


@dataclass(kw_only=True)
class RawChunk:
    """Samples with every value as a number.

    Attributes:
        columns: the columns of the samples.
        numbers: [n, numbers] float64, NaN if missing.
        keys: [m] uint64, sample by sample and in a sample feature by feature: the value of eight hexadecimal
            digits, an integer modulo 2^64, or 64 bits of the BLAKE2b of a text.
        missing: [m] bool; the key of a missing value is 0.
        lengths: [n, features] int64, number of values of each; None if every feature has one.
        labels: [n] uint8, or None if the source has none.
    """

    columns: Columns
    numbers: NDArray[np.float64]
    keys: NDArray[np.uint64]
    missing: NDArray[np.bool_]
    lengths: NDArray[np.int64] | None = None
    labels: NDArray[np.uint8] | None = None

    @property
    def samples(self) -> int:
        return len(self.numbers)

    def feature(self, index: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Keys of one feature, and which of them are missing."""
        positions = self.positions(index)
        return self.keys[positions], self.missing[positions]

    def positions(self, feature: int) -> slice | NDArray[np.bool_]:
        """Index into `keys` that selects one feature's."""
        if self.lengths is None:
            return slice(feature, None, len(self.columns.features))
        owner = np.repeat(
            np.tile(np.arange(self.lengths.shape[1]), len(self.lengths)), self.lengths.reshape(-1)
        )
        return owner == feature

    def select(self, mask: NDArray[np.bool_]) -> RawChunk:
        """The samples for which `mask` [n] is True."""
        features = len(self.columns.features)
        key_mask = np.repeat(mask, features if self.lengths is None else self.lengths.sum(1))
        return RawChunk(
            columns=self.columns,
            numbers=self.numbers[mask],
            keys=self.keys[key_mask],
            missing=self.missing[key_mask],
            lengths=None if self.lengths is None else self.lengths[mask],
            labels=None if self.labels is None else self.labels[mask],
        )


@dataclass
class Parsed:
    """The parsed lines of a block.

    Attributes:
        chunk: the samples of the valid lines.
        lines: number of lines, blank and malformed ones included.
        blank: number of blank lines.
        faults: (line, reason) of each malformed line, counted from 1 in its file.
    """

    chunk: RawChunk
    lines: int
    blank: int = 0
    faults: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])


class ParsedBlock(NamedTuple):
    """A parsed block, with the position at which the next one begins."""

    parsed: Parsed
    start: int
    line: int


class LogReader(Protocol):
    """Reads the files of one format."""

    columns: Columns
    unread: tuple[str, ...]  # columns of the first file that are not among them

    def read(self, path: Path, start: int = 0, line: int = 1) -> Iterator[ParsedBlock]:
        """Yield the samples of a file in blocks, from the `start` and `line` of an earlier block on."""
        ...


def mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of 64-bit numbers after which each bit depends on all: the finaliser of SplitMix64
    (Steele, Lea & Flood, OOPSLA 2014)."""
    keys = (keys ^ (keys >> _SHIFTS[0])) * _FACTORS[0]
    keys = (keys ^ (keys >> _SHIFTS[1])) * _FACTORS[1]
    return keys ^ (keys >> _SHIFTS[2])


def unmix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The inverse of `mix`."""
    keys = keys ^ (keys >> _SHIFTS[2]) ^ (keys >> np.uint64(62))
    keys = keys * _INVERSES[1]
    keys = keys ^ (keys >> _SHIFTS[1]) ^ (keys >> np.uint64(54))
    keys = keys * _INVERSES[0]
    return keys ^ (keys >> _SHIFTS[0]) ^ (keys >> np.uint64(60))


def text_keys(values: Sequence[str]) -> NDArray[np.uint64]:
    """The keys of texts: 64 bits of their BLAKE2b. Among 10^9 texts two share a key with probability 3%."""
    digests = b"".join(
        blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest() for value in values
    )
    return np.frombuffer(digests, "<u8").astype(np.uint64)


BLOCK = 1 << 21
"""Bytes of a block. Larger blocks are slower to read: their arrays fall out of the cache."""
LONGEST_LINE = 1 << 24


class LineBlock(NamedTuple):
    """Complete lines: the first is line `line` of its file, from 1; the next block begins at byte `end`."""

    data: bytes
    line: int
    end: int


def line_blocks(path: Path, start: int = 0, line: int = 1, size: int = BLOCK) -> Iterator[LineBlock]:
    """Yield the lines from byte `start`, the beginning of line `line`, in blocks of about `size` bytes.

    Offsets refer to the unpacked file; a gzip file is unpacked from its beginning again.

    Raises:
        StrettoError: unreadable, damaged gzip, a line of more than 16 MiB.
    """
    with opened(path) as file:
        file.seek(start)
        buffer = b""
        while True:
            data = file.read(size)
            buffer += data
            cut = buffer.rfind(b"\n") + 1 if data else len(buffer)
            if not cut and len(buffer) > LONGEST_LINE:
                raise StrettoError(
                    f"{path}, line {line}: longer than {LONGEST_LINE >> 20} MiB", hint="is it a text file?"
                )
            if cut:
                lines, buffer = buffer[:cut], buffer[cut:]
                start += cut
                yield LineBlock(lines, line, start)
                line += lines.count(b"\n")
            if not data:
                return
