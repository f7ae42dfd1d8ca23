"""SplitMix64's mixing function on int64 tensors, and the shard of a hash table that owns an id.

Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", with Stafford's variant 13 of
the finaliser. PyTorch multiplies int64 in two's complement, so products wrap as unsigned ones do.
"""

from __future__ import annotations

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def finalise_(x: Tensor) -> Tensor:
    """SplitMix64's output function, in place: one to one, and every output bit depends on all input bits."""
    x ^= logical_shift(x, 30)
    x *= signed(FIRST)
    x ^= logical_shift(x, 27)
    x *= signed(SECOND)
    x ^= logical_shift(x, 31)
    return x


def mix(ids: Tensor) -> Tensor:
    """Return the first output of SplitMix64 seeded with each id: int64 [n] to int64 [n]."""
    return finalise_(ids + signed(GOLDEN))


def owner(ids: Tensor, parts: int) -> Tensor:
    """Return the shard, of `parts` of a hash table, that owns each id: int64 [n] in [0, parts).

    Computed from the upper half of the mixed bits: a shard's own hash map uses the lower half, which would
    otherwise be alike for all ids of the shard.
    """
    return logical_shift(mix(ids), 33) % parts


def signed(value: int) -> int:
    """The int64 with the bits of a uint64."""
    return value - (1 << 64) if value >> 63 else value


def logical_shift(value: Tensor, bits: int) -> Tensor:
    """Shift right by `bits`, filling with zeros; PyTorch's own shift of int64 copies the sign."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)
