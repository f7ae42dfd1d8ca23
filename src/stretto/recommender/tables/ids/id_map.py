"""Interface of id maps: ids to entries, with counts and last use."""

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
