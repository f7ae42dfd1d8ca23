"""Which rows are in which slots of a cache, and who goes for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.int64]]

_SHARE = (
    8  # of the slots, one in so many is lined up to go at a time: a look at all of them costs their number
)
_MEMORY = 10  # counts are halved when each slot was asked for so many times, on average


@dataclass(frozen=True)
class Moves:
    """What a batch asks for.

    Attributes:
        slots: [n] of its rows.
        old, old_slots: [k] rows that leave the cache, and from where.
        new, new_slots: [m] rows that come, ascending, and to where.
    """

    slots: Integers
    old: Integers
    old_slots: Integers
    new: Integers
    new_slots: Integers


class Slots:
    """The map of a cache: four bytes of memory for a row that was ever asked for, one for each of all rows,
    and sixteen for a slot.

    The rows leave that the fewest batches asked for, be they in the cache then or not, and among equals those
    that were not asked for longest. Counts are halved now and then, so that old fame fades (the aging of
    TinyLFU, Einziger et al. 2017, section 3.3). A row that any batch needs that is not released stays.

    Args:
        rows: that there are.
        slots: that the cache has, less than 2^31.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self._slot = np.zeros(rows, np.int32)  # 1 + the row's slot, 0 where it has none
        self._count = np.zeros(rows, np.uint8)  # batches that asked for it
        self._counted = 0
        self._row = np.full(slots, -1, np.int64)
        self._seen = np.zeros(slots, np.int64)  # the last batch that asked for what is in it
        self._line = np.arange(slots, dtype=np.int64)  # slots to be given away next
        self._lined = 0  # the batch for which they were lined up
        self._batch = 0
        self._open = dict[int, Integers]()  # slots of batches that are not released
        self.asked = self.moved = 0  # rows of all batches, and those of them that had to be brought

    @property
    def slots(self) -> int:
        return len(self._row)

    @property
    def batch(self) -> int:
        """The number of the batch that was asked for last."""
        return self._batch

    def ask(self, rows: Integers) -> tuple[Integers, Integers, int]:
        """Begin a batch.

        Returns:
            slots [n], -1 where a row is not there; the rows that are not there, each once, ascending; how
            many slots are missing for them.
        """
        self._batch += 1
        self.asked += len(rows)
        slots = self._slot[rows].astype(np.int64) - 1
        absent = slots < 0
        there = slots[~absent] if absent.any() else slots
        self._seen[there] = self._batch
        self._open[self._batch] = there
        self._count[rows] = np.minimum(self._count[rows], 254) + 1  # one, however often the batch has the row
        new = self._once(rows[absent])
        self.moved += len(new)
        return slots, new, len(new) - self._leavers(len(new))

    def bring(self, rows: Integers, slots: Integers, new: Integers) -> Moves:
        """Give slots to the rows that are not there, of which there are enough."""
        given, self._line = self._line[: len(new)], self._line[len(new) :]
        old = self._row[given]
        filled = old >= 0
        self._slot[old[filled]] = 0
        self._slot[new] = given + 1
        self._row[given] = new
        self._seen[given] = self._batch
        missing = slots < 0
        slots[missing] = self._slot[rows[missing]] - 1
        self._open[self._batch] = slots
        return Moves(slots, old[filled], given[filled], new, given)

    def release(self, batch: int) -> None:
        """Its rows may go."""
        del self._open[batch]

    def grow(self, more: int) -> None:
        """There are so many more slots, behind all others."""
        fresh = np.arange(self.slots, self.slots + more, dtype=np.int64)
        self._row = np.concatenate([self._row, np.full(more, -1)])
        self._seen = np.concatenate([self._seen, np.zeros(more, np.int64)])
        self._line = np.concatenate([self._line, fresh])

    def within(self, start: int, stop: int) -> tuple[Integers, Integers]:
        """Which of rows [start, stop) are there, as differences from `start`, and their slots."""
        slots = self._slot[start:stop]
        there = np.flatnonzero(slots)
        return there, slots[there].astype(np.int64) - 1

    def _once(self, rows: Integers) -> Integers:
        """Each row once, ascending. Rows have no slot: where that stands they leave marks, the last one's
        mark stays, and so a sort of all is spared.
        """
        marks = np.arange(1, len(rows) + 1, dtype=np.int32)
        self._slot[rows] = marks
        once = rows[self._slot[rows] == marks]
        self._slot[once] = 0
        once.sort()
        return once

    def _leavers(self, wanted: int) -> int:
        """Line up so many slots to be given away, or all that can be; returns how many stand there."""
        if not wanted:
            return 0
        self._line = self._line[self._seen[self._line] <= self._lined]  # who was asked for since then stays
        if len(self._line) >= wanted:
            return wanted
        needed = np.zeros(self.slots, np.bool_)
        for slots in self._open.values():
            needed[slots] = True
        free = np.flatnonzero(~needed)
        many = max(wanted, self.slots // _SHARE)
        if many < len(free):
            rows = self._row[free]
            fame = self._count[rows].astype(np.int64) * (self._batch + 1) + self._seen[free]
            fame[rows < 0] = -1
            free = free[np.argpartition(fame, many)[:many]]
        self._line, self._lined = free, self._batch
        self._fade()
        return min(wanted, len(free))

    def _fade(self) -> None:
        if self.asked - self._counted > _MEMORY * self.slots:
            self._counted = self.asked
            self._count >>= 1
