"""A map of ids as sorted tensors, in torch operations alone; and the fastest map that a device has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

NONE = -1  # in place of a row, for ids without one


@dataclass
class Entries:
    """The entries of an id map, in any order.

    Attributes:
        ids: [m] int64, each once.
        counts: [m] int64, occurrences.
        last: [m] int64, the last step in which the id occurred.
        rows: [m] int64, local row; -1: not admitted yet.
    """

    ids: Tensor
    counts: Tensor
    last: Tensor
    rows: Tensor

    @classmethod
    def none(cls, device: torch.device | str = "cpu") -> Entries:
        return cls(*(torch.zeros(0, dtype=torch.int64, device=device) for _ in range(4)))

    def where(self, which: Tensor) -> Entries:
        """A selection by mask or indices."""
        return Entries(self.ids[which], self.counts[which], self.last[which], self.rows[which])

    def with_(self, more: Entries) -> Entries:
        """These entries followed by others."""
        return Entries(
            torch.cat((self.ids, more.ids)),
            torch.cat((self.counts, more.counts)),
            torch.cat((self.last, more.last)),
            torch.cat((self.rows, more.rows)),
        )

    def sorted(self) -> Entries:
        """By id."""
        return self.where(torch.argsort(self.ids))


class IdMap(Protocol):
    """A map of ids to entries. All implementations return the same results."""

    def see(self, ids: Tensor, step: int, admit: int) -> tuple[Tensor, Tensor]:
        """Counts the occurrences of ids [n].

        Returns:
            Their rows [n], -1 for ids without one; and the unique ids without a row, ascending, that have
            occurred at least `admit` times by now.
        """
        ...

    def give(self, ids: Tensor, rows: Tensor) -> None:
        """Assigns rows to ids of the map."""
        ...

    def find(self, ids: Tensor) -> Tensor:
        """Rows [n] of ids [n]; -1: none."""
        ...

    def entries(self) -> Entries: ...

    def replace(self, entries: Entries) -> None:
        """Replaces all entries."""
        ...

    def __len__(self) -> int: ...


class SortedMap:
    """An `IdMap` in PyTorch: sorted ids, looked up by binary search and extended by merging."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._known = Entries.none(device)

    def __len__(self) -> int:
        return len(self._known.ids)

    def see(self, ids: Tensor, step: int, admit: int) -> tuple[Tensor, Tensor]:
        unique, times = torch.unique(ids, return_counts=True)
        at, known = self._search(unique)
        if not bool(known.all()):
            self._insert(unique[~known], at[~known])
            at, _ = self._search(unique)
        self._known.counts[at] += times
        self._known.last[at] = step
        due = (self._known.rows[at] == NONE) & (self._known.counts[at] >= admit)
        return self.find(ids), unique[due]

    def give(self, ids: Tensor, rows: Tensor) -> None:
        at, _ = self._search(ids)
        self._known.rows[at] = rows

    def find(self, ids: Tensor) -> Tensor:
        if not len(self):
            return torch.full_like(ids, NONE)
        at, known = self._search(ids)
        return torch.where(known, self._known.rows[at.clamp(max=len(self) - 1)], NONE)

    def entries(self) -> Entries:
        return self._known

    def replace(self, entries: Entries) -> None:
        self._known = entries.sorted()

    def _search(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The position of each id, or where it would be inserted; and whether it exists."""
        at = torch.searchsorted(self._known.ids, ids)
        if not len(self):
            return at, torch.zeros_like(ids, dtype=torch.bool)
        return at, self._known.ids[at.clamp(max=len(self) - 1)] == ids

    def _insert(self, ids: Tensor, before: Tensor) -> None:
        """Inserts new ids, ascending, at their positions from `_search`."""
        size = len(self) + len(ids)
        at = before + torch.arange(len(ids), device=ids.device)
        old = torch.ones(size, dtype=torch.bool, device=ids.device)
        old[at] = False
        merged = [torch.zeros(size, dtype=torch.int64, device=ids.device) for _ in range(4)]
        known = self._known
        for new, was in zip(merged, (known.ids, known.counts, known.last, known.rows), strict=True):
            new[old] = was
        merged[0][at] = ids
        merged[3][at] = NONE
        self._known = Entries(*merged)
