"""A saved shard of a hash table into another: its ids, and their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from stretto.parallel.tables.ids.growing import GrowingStore
from stretto.parallel.tables.ids.hash import HashIds

CHUNK = 1 << 16  # saved rows in memory at a time


def restore(
    ids: HashIds,
    store: GrowingStore,
    state: Mapping[str, Tensor],
    read: Callable[[int, int], Mapping[str, Tensor]],
    part: int = 0,
    parts: int = 1,
) -> None:
    """Add what belongs to part `part` of `parts` of one saved shard, of whatever number of parts that was.

    Args:
        state: of its ids, as `HashIds.state` gave it.
        read: saved rows [start, stop), of the columns that `store` has: `weight`, and states by name; those
            that are not named are zeros.

    Raises:
        StrettoError: no such state, or an id that is known already.
    """
    taken = ids.load_state(state, part, parts)
    store.grow(ids.extent)
    old, order = torch.sort(taken.old)
    new = taken.new[order]
    first = 0
    while first < len(old):  # chunks without a row of ours are not read
        start = int(old[first])
        last = int(torch.searchsorted(old, start + CHUNK))
        values = read(start, int(old[last - 1]) + 1)
        which = old[first:last] - start
        store.set(new[first:last], {name: value.to(which.device)[which] for name, value in values.items()})
        first = last
