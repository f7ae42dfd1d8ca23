"""A map of ids by open addressing, compiled by numba."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engine.loops import jit
from stretto.recommender.tables.ids.id_map import COUNT, ID, LAST, NONE, ROW
from stretto.recommender.tables.kernels.compiled import finalise
from stretto.recommender.tables.splitmix import GOLDEN

Integers = NDArray[np.int64]

_MIN_SLOTS = 1 << 10
_LOAD_FACTOR = 0.6  # on average 1.75 slots are probed for an id that exists, 3.6 for one that does not
_EMPTY = -1
_DUE = -2  # in place of the row of an id that is about to get one


class CompiledMap:
    """An `IdMap`: slots of four numbers, linear probing, doubled when 60% are taken. Slots are only freed by
    `replace`, so there are no tombstones. A slot is an entry, in one line of the CPU's cache.
    """

    def __init__(self) -> None:
        self._table = _table_of(np.zeros((0, 4), np.int64), _MIN_SLOTS)
        self._taken = 0

    def __len__(self) -> int:
        return self._taken

    def count(self, ids: Tensor, step: int, admit: int) -> tuple[Tensor, Tensor]:
        flat, done = ids.numpy(), 0
        slots = np.empty_like(flat)
        while True:
            limit = int(_LOAD_FACTOR * len(self._table))
            done, self._taken = _count_ids(self._table, flat, done, step, self._taken, limit, slots)
            if done == len(flat):
                break
            self._table = _table_of(self._filled_slots(), 2 * len(self._table))
        rows, due = np.empty_like(flat), np.empty_like(flat)
        admitted = _find_due(self._table, flat, slots, admit, rows, due)
        return torch.from_numpy(rows), torch.from_numpy(np.sort(due[:admitted]))

    def assign(self, ids: Tensor, rows: Tensor) -> None:
        _assign_rows(self._table, ids.numpy(), rows.numpy())

    def find(self, ids: Tensor) -> Tensor:
        rows = np.empty(len(ids), np.int64)
        _find_rows(self._table, ids.numpy(), rows)
        return torch.from_numpy(rows)

    def entries(self) -> Tensor:
        return torch.from_numpy(self._filled_slots()).T.contiguous()

    def replace(self, entries: Tensor) -> None:
        self._taken, slots = entries.shape[1], _MIN_SLOTS
        while self._taken > _LOAD_FACTOR * slots:
            slots *= 2
        self._table = _table_of(entries.cpu().T.contiguous().numpy(), slots)

    def _filled_slots(self) -> Integers:
        return self._table[self._table[:, ID] != _EMPTY]


def _table_of(entries: Integers, slots: int) -> Integers:
    """A table with these entries [m, 4]."""
    table = np.zeros((slots, 4), np.int64)
    table[:, ID] = _EMPTY
    _insert(table, entries)
    return table


# ---------------------------------------------------------------------- compiled


@jit
def _slot(table: Integers, value: int) -> np.int64:
    """The slot of an id, or the empty one where it belongs."""
    last = len(table) - 1
    slot = np.int64(finalise(np.uint64(value) + np.uint64(GOLDEN)) & np.uint64(last))
    while table[slot, ID] != value and table[slot, ID] != _EMPTY:
        slot = (slot + 1) & last
    return slot


@jit
def _count_ids(
    table: Integers, ids: Integers, first: int, step: int, taken: int, limit: int, slots: Integers
) -> tuple[int, int]:
    """Counts ids from `first` on, until none is left or `limit` slots are taken; fills in the slot of each.
    Returns the ids counted and the slots taken.
    """
    for i in range(first, len(ids)):
        slot = _slot(table, ids[i])
        if table[slot, ID] == _EMPTY:
            if taken >= limit:
                return i, taken
            taken += 1
            table[slot, ID] = ids[i]
            table[slot, COUNT] = 0
            table[slot, ROW] = NONE
        table[slot, COUNT] += 1
        table[slot, LAST] = step
        slots[i] = slot
    return len(ids), taken


@jit
def _find_due(
    table: Integers, ids: Integers, slots: Integers, admit: int, rows: Integers, due: Integers
) -> int:
    """Fills in the rows of ids, and the ids that are due in order of occurrence; returns the number of those.
    A slot may be one from before the table grew.
    """
    count = 0
    for i in range(len(ids)):
        slot = slots[i]
        if table[slot, ID] != ids[i]:
            slot = _slot(table, ids[i])
        row = table[slot, ROW]
        if row == NONE and table[slot, COUNT] >= admit:
            table[slot, ROW] = _DUE
            due[count] = ids[i]
            count += 1
        rows[i] = max(row, NONE)
    return count


@jit
def _assign_rows(table: Integers, ids: Integers, rows: Integers) -> None:
    for i in range(len(ids)):
        table[_slot(table, ids[i]), ROW] = rows[i]


@jit
def _find_rows(table: Integers, ids: Integers, rows: Integers) -> None:
    for i in range(len(ids)):
        slot = _slot(table, ids[i])
        rows[i] = table[slot, ROW] if table[slot, ID] == ids[i] else NONE


@jit
def _insert(table: Integers, entries: Integers) -> None:
    for i in range(len(entries)):
        table[_slot(table, entries[i, ID])] = entries[i]
