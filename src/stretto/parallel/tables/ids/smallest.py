"""Which are the lowest of all ranks' entries, without bringing them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.parallel.collectives import all_max, all_sum

_BITS = 12  # of a value that a round settles: 4096 counts go round


@dataclass(frozen=True)
class Kth:
    """The k-th smallest value: how many are below it, and how many equal to it, of all ranks."""

    value: int
    below: int
    equal: int


def kth_smallest(values: Tensor, k: int, group: ProcessGroup | None) -> Kth:
    """The k-th smallest, counted from 1, of all values of a group's ranks.

    From the upper bits down: each round counts values by their next 12 bits and sums the counts over the
    ranks. So at most seven sums of few numbers decide, whatever there is, and all ranks decide alike.

    Args:
        values: [n] int64, non-negative; n may differ between ranks, and be 0.
        k: 1 to how many there are.
    """
    largest = torch.zeros(1, dtype=torch.int64, device=values.device)
    if len(values):
        largest[0] = values.max()
    bits = int(all_max(largest, group)).bit_length()
    value, below, equal = 0, 0, 0
    for shift in _shifts(bits):
        digit = values >> shift
        counts = all_sum(torch.bincount(digit, minlength=1 << _BITS), group)
        until = torch.cumsum(counts, 0)
        here = int(torch.searchsorted(until, k - below))
        equal = int(counts[here])
        below += int(until[here]) - equal
        values = values[digit == here] - (here << shift)
        value += here << shift
    return Kth(value, below, equal)


def lowest(keys: Sequence[Tensor], k: int, group: ProcessGroup | None) -> Tensor:
    """The k lowest of all ranks' entries, compared by their first key, where these are equal by the second,
    and so on; by the last no two are equal.

    Args:
        keys: [n] int64 each, non-negative.
        k: 0 to how many entries there are.

    Returns:
        [n] bool: which of this rank's.
    """
    gone = torch.zeros(len(keys[0]), dtype=torch.bool, device=keys[0].device)
    open_ones = torch.arange(len(gone), device=gone.device)
    for key in keys:
        if not k:
            break
        own = key[open_ones]
        found = kth_smallest(own, k, group)
        if found.below + found.equal == k:
            gone[open_ones[own <= found.value]] = True
            break
        gone[open_ones[own < found.value]] = True
        open_ones = open_ones[own == found.value]
        k -= found.below
    return gone


def _shifts(bits: int) -> list[int]:
    """How far values are shifted in each round, the last time by 0."""
    found = [max(0, bits - _BITS)]
    while found[-1]:
        found.append(max(0, found[-1] - _BITS))
    return found
