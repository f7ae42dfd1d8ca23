"""A permutation of range(n) computed element by element: no table, no state, random access.

A Feistel network over Z_a x Z_b, with a * b just above n, and cycle walking for the few values above: the
generalised Feistel cipher of Black & Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), method 3
with method 2. The round function is a 64-bit mixer (the finaliser of SplitMix64: Steele, Lea & Flood, OOPSLA
2014): it shuffles well and makes no claim to secrecy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import isqrt

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_SHIFTS = tuple(np.uint64(s) for s in (30, 27, 31))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # what SplitMix64 counts by
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Permutation:
    """A permutation of range(size), chosen by (seed, epoch); calling it maps positions to values."""

    def __init__(self, size: int, seed: int, epoch: int = 0) -> None:
        assert 0 < size < 1 << 62, f"size {size}"
        self.size = size
        a = isqrt(size - 1) + 1
        self._a, self._b = np.uint64(a), np.uint64(-(-size // a))
        digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, positions: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Values at `positions`, each in range(size): int64 of the same length."""
        values = np.array(positions, dtype=np.uint64)
        assert values.ndim == 1
        assert not len(values) or int(values.max()) < self.size
        values = self._cipher(values)
        while len(outside := np.flatnonzero(values >= np.uint64(self.size))):
            values[outside] = self._cipher(values[outside])
        return values.astype(np.int64)

    def _cipher(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass of the network: a permutation of range(a * b)."""
        left, right = values % self._a, values // self._a
        for number, key in enumerate(self._keys):
            modulus = self._b if number % 2 else self._a
            left, right = right, (left + _mix(right ^ key) % modulus) % modulus
        return left + self._a * right


WINDOW = 64
"""Blocks that are shuffled together."""


def positions(
    wanted: NDArray[np.int64], size: int, seed: int, epoch: int, block: int = 0
) -> NDArray[np.int64]:
    """Which of `size` samples stand at positions `wanted` of an epoch: a permutation of range(size).

    With `block` the blocks of so many neighbouring samples are permuted, then the samples within windows of
    64 blocks of that order, so that reading by position goes through each block within one window. The orders
    of MosaicML's Streaming have the same two stages (its documentation, "Shuffling", `py1s` and `py1b`), but
    keep tables of samples; this one is computed for each.

    block: samples of a run that is moved as one; 0: none, every sample for itself.
    """
    if not block or block * 2 > size:
        return Permutation(size, seed, epoch)(wanted)
    places = wanted.copy()
    span = block * WINDOW
    windows = wanted // span
    for window in np.unique(windows).tolist():
        inside_window = windows == window
        length = min(span, size - window * span)
        inside = Permutation(length, _window_seed(seed, window), epoch)
        places[inside_window] = window * span + inside(wanted[inside_window] - window * span)
    blocks = places // block
    return block_order(blocks, size, seed, epoch, block) * block + places % block


def block_order(wanted: NDArray[np.int64], size: int, seed: int, epoch: int, block: int) -> NDArray[np.int64]:
    """Which of the blocks of `size` samples stand at places `wanted` of an epoch's order of blocks.

    The last samples that fill no block stay at the end, within the last window.
    """
    complete = size // block
    order = wanted.copy()
    moved = wanted < complete
    order[moved] = Permutation(complete, seed, epoch)(wanted[moved])
    return order


def _window_seed(seed: int, window: int) -> int:
    """A seed for the order within a window, unlike that of the blocks."""
    digest = hashlib.blake2b(f"window {window} of {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniform(key: str, count: int) -> NDArray[np.float64]:
    """`count` numbers from 0 to below 1 that depend on the key alone: SplitMix64 from a start that the key
    gives.
    """
    bits = _mix(_start(key) + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_bits(key: str, numbers: NDArray[np.int64], count: int) -> NDArray[np.uint64]:
    """`count` random words for each of some numbers, which depend on the key and that number alone:
    SplitMix64 from starts that SplitMix64 gives; uint64 [len(numbers), count].
    """
    starts = _mix(_start(key) + numbers.astype(np.uint64) * _GOLDEN)
    return _mix(starts[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


def _start(key: str) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each bit of the result depends on each bit of the value; arithmetic is modulo 2**64."""
    values = (values ^ (values >> _SHIFTS[0])) * _FACTORS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _FACTORS[1]
    return values ^ (values >> _SHIFTS[2])
