"""A map of ids as sorted tensors, in torch operations alone; and the fastest map that a device has."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.recommender.tables.ids.id_map import NONE, Entries, IdMap


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


def open_map(device: torch.device | str = "cpu", compiled: bool | None = None) -> IdMap:
    """A map for ids on `device`: open addressing in compiled code on a CPU where numba is installed, sorted
    tensors elsewhere.

    Args:
        compiled: which of the two; None: the faster one that works.
    """
    if compiled or (compiled is None and torch.device(device).type == "cpu"):
        try:
            from stretto.recommender.tables.ids.compiled import CompiledMap

            return CompiledMap()
        except ImportError:
            if compiled:
                raise
    return SortedMap(device)
