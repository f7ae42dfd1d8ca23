"""The interface of id maps, and one as sorted tensors in PyTorch operations.

Entries of a map are an int64 tensor [4, m], in any order: the ids, each once; the number of occurrences of
each; the last step in which it occurred; and its local row, `NONE` until it is admitted.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

NONE = -1  # the row of ids without one
ID, COUNT, LAST, ROW = range(4)  # indices of the fields of entries


def sorted_entries(entries: Tensor) -> Tensor:
    """Return the entries sorted by id."""
    return entries[:, torch.argsort(entries[ID])]


class IdMap(Protocol):
    """A map of ids to entries. All implementations return the same results."""

    def count(self, ids: Tensor, step: int, admit: int) -> tuple[Tensor, Tensor]:
        """Count the occurrences of ids [n].

        Returns:
            Their rows [n], -1 for ids without a row; and the unique ids without a row, ascending, that have
            occurred at least `admit` times.
        """
        ...

    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """Assign rows to ids of the map."""
        ...

    def find(self, ids: Tensor) -> Tensor:
        """Return rows [n] of ids [n]; -1 without a row."""
        ...

    def entries(self) -> Tensor: ...

    def replace(self, entries: Tensor) -> None:
        """Replace all entries."""
        ...

    def __len__(self) -> int: ...


class SortedMap:
    """An `IdMap` in PyTorch: sorted ids, looked up by binary search and extended by merging."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._entries = torch.zeros(4, 0, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return self._entries.shape[1]

    def count(self, ids: Tensor, step: int, admit: int) -> tuple[Tensor, Tensor]:
        unique, times = torch.unique(ids, return_counts=True)
        index, exists = self._search(unique)
        if not bool(exists.all()):
            fresh = unique.new_zeros(4, len(unique))
            fresh[ID], fresh[ROW] = unique, NONE
            self._entries = sorted_entries(torch.cat((self._entries, fresh[:, ~exists]), 1))
            index, _ = self._search(unique)
        self._entries[COUNT, index] += times
        self._entries[LAST, index] = step
        due = (self._entries[ROW, index] == NONE) & (self._entries[COUNT, index] >= admit)
        return self.find(ids), unique[due]

    def assign(self, ids: Tensor, rows: Tensor) -> None:
        self._entries[ROW, self._search(ids)[0]] = rows

    def find(self, ids: Tensor) -> Tensor:
        if not len(self):
            return torch.full_like(ids, NONE)
        index, exists = self._search(ids)
        return torch.where(exists, self._entries[ROW, index.clamp(max=len(self) - 1)], NONE)

    def entries(self) -> Tensor:
        return self._entries

    def replace(self, entries: Tensor) -> None:
        self._entries = sorted_entries(entries)

    def _search(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position of each id, or where it would be inserted; and True for each id that exists."""
        index = torch.searchsorted(self._entries[ID].contiguous(), ids)
        if not len(self):
            return index, torch.zeros_like(ids, dtype=torch.bool)
        return index, self._entries[ID, index.clamp(max=len(self) - 1)] == ids
