"""Raw samples of a click log before the transform, and what the readers of its formats share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.run.data.readers import opened

Keys = Literal["hex", "int", "text"]
"""What a categorical value is: eight hexadecimal digits, an integer, or any text."""
_SHIFTS = tuple(np.uint64(s) for s in (30, 27, 31))
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_INVERSES = tuple(np.uint64(pow(int(factor), -1, 1 << 64)) for factor in _FACTORS)


@dataclass(frozen=True)
class Columns:
    """The columns of a click log: the names of its numbers, and of its features with what their values are.
    `lists`: features with a list of values a sample."""

    numbers: tuple[str, ...]
    features: tuple[str, ...]
    keys: tuple[Keys, ...]
    lists: tuple[bool, ...]


@dataclass(kw_only=True)
class RawChunk:
    """Samples with every value as a number.

    Attributes:
        columns: what they are.
        numbers: [n, numbers] float64, NaN where missing.
        keys: [m] uint64, sample by sample and in a sample feature by feature: the value of eight hexadecimal
            digits, an integer modulo 2^64, or 64 bits of the BLAKE2b of a text.
        missing: [m] bool; the key there is 0.
        lengths: [n, features] int64, values of each; None: one each.
        labels: [n] uint8, or None where the source has none.
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

    def feature(self, number: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Keys of one feature, and where they are missing."""
        at = self.places(number)
        return self.keys[at], self.missing[at]

    def places(self, number: int) -> slice | NDArray[np.bool_]:
        """Where in `keys` one feature's are."""
        if self.lengths is None:
            return slice(number, None, len(self.columns.features))
        owner = np.repeat(
            np.tile(np.arange(self.lengths.shape[1]), len(self.lengths)), self.lengths.reshape(-1)
        )
        return owner == number

    def kept(self, good: NDArray[np.bool_]) -> RawChunk:
        """The samples that are `good`."""
        features = len(self.columns.features)
        each = np.repeat(good, features if self.lengths is None else self.lengths.sum(1))
        return RawChunk(
            columns=self.columns,
            numbers=self.numbers[good],
            keys=self.keys[each],
            missing=self.missing[each],
            lengths=None if self.lengths is None else self.lengths[good],
            labels=None if self.labels is None else self.labels[good],
        )


@dataclass
class Parsed:
    """A block of a source: its good lines as a chunk, and what became of the others.

    `faults` are (line, why) of all malformed ones, lines counted from 1 in their file.
    """

    chunk: RawChunk
    lines: int
    blank: int = 0
    faults: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])


@dataclass
class Piece:
    """A block that is parsed, and where the next one begins."""

    parsed: Parsed
    start: int
    line: int


class Reader(Protocol):
    """Reads the files of one format."""

    columns: Columns
    unread: tuple[str, ...]  # columns of the first file that are not among them

    def read(self, path: Path, start: int = 0, line: int = 1) -> Iterator[Piece]:
        """The samples of a file in blocks; from `start` on, which a piece before has told, and its `line`."""
        ...


def mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of 64-bit numbers after which each bit depends on all: the finaliser of SplitMix64
    (Steele, Lea & Flood, OOPSLA 2014)."""
    keys = (keys ^ (keys >> _SHIFTS[0])) * _FACTORS[0]
    keys = (keys ^ (keys >> _SHIFTS[1])) * _FACTORS[1]
    return keys ^ (keys >> _SHIFTS[2])


def unmix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The other way."""
    keys = keys ^ (keys >> _SHIFTS[2]) ^ (keys >> np.uint64(62))
    keys = keys * _INVERSES[1]
    keys = keys ^ (keys >> _SHIFTS[1]) ^ (keys >> np.uint64(54))
    keys = keys * _INVERSES[0]
    return keys ^ (keys >> _SHIFTS[0]) ^ (keys >> np.uint64(60))


def text_keys(values: Sequence[str]) -> NDArray[np.uint64]:
    """The keys of texts: the first 64 bits of their BLAKE2b. Two of 10^9 share one with probability 3%."""
    digests = b"".join(
        blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest() for value in values
    )
    return np.frombuffer(digests, "<u8").astype(np.uint64)


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
