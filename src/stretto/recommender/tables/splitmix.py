"""A mixing function: maps an id to a pseudorandom number, the same on every machine."""

from __future__ import annotations

from torch import Tensor

# The finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators",
# figure 18 with Stafford's variant 13), in two's complement: torch multiplies signed, and wraps.
STEP = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def mix(ids: Tensor) -> Tensor:
    """int64 [n] to int64 [n], one to one: all 64 bits of each depend on all of the other's."""
    mixed = ids + _signed(STEP)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(SECOND)
    return mixed ^ _shifted(mixed, 31)


def owner(ids: Tensor, parts: int) -> Tensor:
    """Which of `parts` shards of a hash table has an id: int64 [n], 0 to parts - 1.

    From the upper half of the mixed bits. A shard's own map takes the lower ones, which would otherwise be
    alike for all that it holds.
    """
    return _shifted(mix(ids), 33) % parts


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shifted right, zeros coming in from the left."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
