"""A shard of a hash table whole: its ids, their rows, and what a new row begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.parallel.tables.ids.entries import NONE
from stretto.parallel.tables.ids.growing import GrowingStore
from stretto.parallel.tables.ids.hash import HashIds

Values = Mapping[str, Tensor]
_CHUNK = 1 << 16  # rows that are set or read at once


class HashTable:
    """Ids and rows together.

    Attributes:
        ids: the map.
        store: the rows, as many as `ids.extent`.
    """

    def __init__(self, ids: HashIds, store: GrowingStore, begin: Callable[[Tensor], Values]) -> None:
        """Args:
        begin: what rows of ids [n] begin with: `weight` [n, width], and states by name that are not zeros.
        """
        self.ids = ids
        self.store = store
        self._begin = begin

    def rows(self, ids: Tensor, step: int) -> Tensor:
        """Rows [n] of a batch's ids [n], -1: none, as `HashIds.rows`; the store has all of them."""
        found = self.ids.rows(ids, step)
        self.store.grow(self.ids.extent)
        for at in range(0, len(found.fresh_ids), _CHUNK):
            some = slice(at, at + _CHUNK)
            self.store.set(found.fresh_rows[some], self._begin(found.fresh_ids[some]))
        return found.rows

    def peek(self, ids: Tensor) -> Tensor:
        """As `HashIds.peek`."""
        return self.ids.peek(ids)

    def evict(self, step: int, group: ProcessGroup | None = None) -> int:
        """As `HashIds.evict`."""
        return self.ids.evict(step, group)

    def load(
        self,
        state: Mapping[str, Tensor],
        read: Callable[[int, int], Values],
        part: int = 0,
        parts: int = 1,
    ) -> None:
        """Add what belongs here of one saved shard.

        Args:
            state, part, parts: as `HashIds.load_state`.
            read: saved rows [start, stop) of this shard's columns: `weight`, and states by name; those not
                named are zeros.
        """
        taken = self.ids.load_state(state, part, parts)
        self.store.grow(self.ids.extent)
        old, order = torch.sort(taken.old)
        new = taken.new[order]
        for start in range(0, int(old[-1]) + 1 if len(old) else 0, _CHUNK):
            first, last = torch.searchsorted(old, torch.tensor([start, start + _CHUNK], device=old.device))
            if first < last:
                stop = int(old[last - 1]) + 1
                values = {name: v.to(old.device) for name, v in read(start, stop).items()}
                which = old[first:last] - start
                self.store.set(new[first:last], {name: value[which] for name, value in values.items()})


def with_rows(
    rows: Tensor, offsets: Tensor, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bags without ids that have no row: rows [m], offsets [bags + 1], scale [m], as `lookup` takes them."""
    has = rows != NONE
    if bool(has.all()):
        return rows, offsets, scale
    before = torch.zeros(len(rows) + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(has, 0, out=before[1:])
    return rows[has], before[offsets], None if scale is None else scale[has]
