"""A map of ids by open addressing, in compiled code. Needs numba."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engine.loops import jit
from stretto.recommender.tables.ids.id_map import NONE, Entries
from stretto.recommender.tables.kernels.compiled import finalise
from stretto.recommender.tables.splitmix import GOLDEN

Numbers = NDArray[np.int64]

_SMALLEST = 1 << 10
_FULL = 0.6  # of the slots: on average 1.75 are looked at for an id that is there, 3.6 for one that is not
# Columns of a slot: one line of the CPU's cache holds all that a batch needs of an id.
_ID = 0
_COUNT = 1
_LAST = 2
_ROW = 3
_EMPTY = -1
_DUE = -2  # a row that is about to be given


class CompiledMap:
    """An IdMap: slots of four numbers, linear probing, doubled when 60% are taken. Slots are never freed but
    by `replace`, so there are no marks of what was deleted.
    """

    def __init__(self) -> None:
        self._table = _empty(_SMALLEST)
        self._taken = 0

    def __len__(self) -> int:
        return self._taken

    def see(self, ids: Tensor, step: int, admit: int) -> tuple[Tensor, Tensor]:
        numbers, done = ids.numpy(), 0
        slots = np.empty_like(numbers)
        while True:
            limit = int(_FULL * len(self._table))
            done, self._taken = _count(self._table, numbers, done, step, self._taken, limit, slots)
            if done == len(numbers):
                break
            self._table = _moved(self._table, 2 * len(self._table))
        rows, due = np.empty_like(numbers), np.empty_like(numbers)
        admitted = _due(self._table, numbers, slots, admit, rows, due)
        return torch.from_numpy(rows), torch.from_numpy(np.sort(due[:admitted]))

    def give(self, ids: Tensor, rows: Tensor) -> None:
        _give(self._table, ids.numpy(), rows.numpy())

    def find(self, ids: Tensor) -> Tensor:
        rows = np.empty(len(ids), np.int64)
        _find(self._table, ids.numpy(), rows)
        return torch.from_numpy(rows)

    def entries(self) -> Entries:
        taken = torch.from_numpy(self._table[self._table[:, _ID] != _EMPTY])
        return Entries(*(taken[:, column].contiguous() for column in (_ID, _COUNT, _LAST, _ROW)))

    def replace(self, entries: Entries) -> None:
        slots = _SMALLEST
        while len(entries.ids) > _FULL * slots:
            slots *= 2
        self._table = _empty(slots)
        self._taken = len(entries.ids)
        values = (entries.ids, entries.counts, entries.last, entries.rows)
        _fill(self._table, *(value.cpu().numpy() for value in values))


def _empty(slots: int) -> Numbers:
    table = np.zeros((slots, 4), np.int64)
    table[:, _ID] = _EMPTY
    return table


def _moved(table: Numbers, slots: int) -> Numbers:
    new = _empty(slots)
    _move(table, new)
    return new


# ---------------------------------------------------------------------- compiled


@jit
def _slot(table: Numbers, value: int) -> np.int64:
    """The slot of an id, or the empty one where it belongs."""
    last = len(table) - 1
    slot = np.int64(finalise(np.uint64(value) + np.uint64(GOLDEN)) & np.uint64(last))
    while table[slot, _ID] != value and table[slot, _ID] != _EMPTY:
        slot = (slot + 1) & last
    return slot


@jit
def _count(
    table: Numbers, ids: Numbers, first: int, step: int, taken: int, limit: int, slots: Numbers
) -> tuple[int, int]:
    """Count ids from `first` on, until all are or `limit` slots are taken: how many are, how many slots.
    Tells the slot of each.
    """
    for i in range(first, len(ids)):
        slot = _slot(table, ids[i])
        if table[slot, _ID] == _EMPTY:
            if taken >= limit:
                return i, taken
            taken += 1
            table[slot, _ID] = ids[i]
            table[slot, _COUNT] = 0
            table[slot, _ROW] = NONE
        table[slot, _COUNT] += 1
        table[slot, _LAST] = step
        slots[i] = slot
    return len(ids), taken


@jit
def _due(table: Numbers, ids: Numbers, slots: Numbers, admit: int, rows: Numbers, due: Numbers) -> int:
    """Fill in rows, and ids that are due, in the order in which they come; how many these are. A slot may be
    one from before the table grew.
    """
    count = 0
    for i in range(len(ids)):
        slot = slots[i]
        if table[slot, _ID] != ids[i]:
            slot = _slot(table, ids[i])
        row = table[slot, _ROW]
        if row == NONE and table[slot, _COUNT] >= admit:
            table[slot, _ROW] = _DUE
            due[count] = ids[i]
            count += 1
        rows[i] = max(row, NONE)
    return count


@jit
def _give(table: Numbers, ids: Numbers, rows: Numbers) -> None:
    for i in range(len(ids)):
        table[_slot(table, ids[i]), _ROW] = rows[i]


@jit
def _find(table: Numbers, ids: Numbers, rows: Numbers) -> None:
    for i in range(len(ids)):
        slot = _slot(table, ids[i])
        rows[i] = table[slot, _ROW] if table[slot, _ID] == ids[i] else NONE


@jit
def _fill(table: Numbers, ids: Numbers, counts: Numbers, last: Numbers, rows: Numbers) -> None:
    for i in range(len(ids)):
        slot = _slot(table, ids[i])
        table[slot, _ID] = ids[i]
        table[slot, _COUNT] = counts[i]
        table[slot, _LAST] = last[i]
        table[slot, _ROW] = rows[i]


@jit
def _move(old: Numbers, new: Numbers) -> None:
    for i in range(len(old)):
        if old[i, _ID] != _EMPTY:
            new[_slot(new, old[i, _ID])] = old[i]
