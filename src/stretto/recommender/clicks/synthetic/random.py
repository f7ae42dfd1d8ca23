"""Random numbers that are functions of a counter: no state, any one at once, the same on every machine.

SplitMix64 (Steele, Lea & Flood, OOPSLA 2014): the n-th number of a stream is its mixer on a start plus n
times an odd constant. A stream's start is a hash of names, so two streams have nothing in common.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = tuple(np.uint64(s) for s in (30, 27, 31))
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53
_PIECES = 4


def stream(*names: object) -> np.uint64:
    """The start of the stream of these names."""
    text = "/".join(map(str, names))
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), dtype="<u8")[0]


def words(starts: Words, counters: Words) -> Words:
    """64 random bits for each stream and counter: [streams, counters]."""
    values = starts[:, None] + counters * _STEP
    scratch = np.empty_like(values)
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        np.right_shift(values, shift, out=scratch)
        np.bitwise_xor(values, scratch, out=values)
        if factor is not None:
            np.multiply(values, factor, out=values)
    return values


def uniform(bits: Words) -> NDArray[np.float64]:
    """Numbers in [0, 1) of 53 bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * _UNIT


def bell(bits: Words) -> NDArray[np.float64]:
    """Numbers of mean 0 and variance 1, nearly normal and never beyond 3.5: the sum of four uniform ones."""
    total: NDArray[Any] = np.zeros(bits.shape)
    for piece in range(_PIECES):
        total += (bits >> np.uint64(16 * piece)) & np.uint64(0xFFFF)
    return (total / 65536 - _PIECES / 2 + _PIECES / 131072) * np.sqrt(12 / _PIECES)
