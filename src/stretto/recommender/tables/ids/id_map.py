"""A map of ids as sorted tensors, in torch operations alone; and the fastest map that a device has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

NONE = -1  # the row of an id that has none


@dataclass
class Entries:
    """Ids that a map knows, in any order.

    Attributes:
        ids: [m] int64, each once.
        counts: [m] int64, occurrences.
        last: [m] int64, the step in which it was seen last.
        rows: [m] int64, own row number, or -1: not admitted yet.
    """

    ids: Tensor
    counts: Tensor
    last: Tensor
    rows: Tensor

    @classmethod
    def none(cls, device: torch.device | str = "cpu") -> Entries:
        return cls(*(torch.zeros(0, dtype=torch.int64, device=device) for _ in range(4)))

    def where(self, which: Tensor) -> Entries:
        """Some of them, by a mask or by indices."""
        return Entries(self.ids[which], self.counts[which], self.last[which], self.rows[which])

    def with_(self, more: Entries) -> Entries:
        """These, then others."""
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
    """A map of ids to entries. Which it is never shows in what it returns."""

    def see(self, ids: Tensor, step: int, admit: int) -> tuple[Tensor, Tensor]:
        """Count occurrences ids [n].

        Returns:
            Their rows [n], -1 where they have none; and the ids, each once and ascending, that have none and
            were seen at least `admit` times by now.
        """
        ...

    def give(self, ids: Tensor, rows: Tensor) -> None:
        """Rows to ids that are known."""
        ...

    def find(self, ids: Tensor) -> Tensor:
        """Rows [n] of ids [n]; -1: none."""
        ...

    def entries(self) -> Entries: ...

    def replace(self, entries: Entries) -> None:
        """Forget all, and know these."""
        ...

    def __len__(self) -> int: ...


class SortedMap:
    """An IdMap. Ids are sorted, so that finding them is a binary search and adding some is a merge."""

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
        """Where each id is, and whether; where not, the place at which it would be."""
        at = torch.searchsorted(self._known.ids, ids)
        if not len(self):
            return at, torch.zeros_like(ids, dtype=torch.bool)
        return at, self._known.ids[at.clamp(max=len(self) - 1)] == ids

    def _insert(self, ids: Tensor, before: Tensor) -> None:
        """New ids, ascending, at the places where `_search` says that they belong."""
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
