"""Replicated tables: every rank looks up its own copy; gradients of rows are exchanged among all.

Each rank sends which rows it saw, once each, and later the sum of their gradients; all update their copy by
all of them in the order of ranks, so that copies stay equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from stretto.engine.parallel.collectives import start_gather_into
from stretto.recommender.stores.store import Fetched
from stretto.recommender.tables.jagged import Bags
from stretto.recommender.tables.kernels.plain import Grouped
from stretto.recommender.tables.pools import HeldPool


@dataclass
class _Gathering:
    """The same tensor of every rank, padded to the longest."""

    tensor: Tensor  # [world, longest, ...]
    counts: list[int]
    work: Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return torch.cat([part[:count] for part, count in zip(self.tensor, self.counts, strict=True)])


def _gather(group: ProcessGroup, mine: Tensor, counts: list[int]) -> _Gathering:
    longest, padded = max(counts), mine
    if len(mine) < longest:
        padded = mine.new_zeros(longest, *mine.shape[1:])
        padded[: len(mine)] = mine
    tensor = mine.new_empty(len(counts) * longest, *mine.shape[1:])
    work = start_gather_into(tensor.view(-1), padded.view(-1), group)
    return _Gathering(tensor.view(len(counts), longest, *mine.shape[1:]), counts, work)


class CopiedLookups:
    """What a batch of this rank looks up in one pool of copies, and how all ranks update it.

    Args:
        bags: of each of the pool's shards, rows of its table.
        group: of all ranks; None: this one alone.
        train: an update will follow.
        wire: type in which gradients go to the other ranks, and are applied here too.
    """

    def __init__(
        self,
        held: HeldPool,
        bags: Sequence[Bags],
        group: ProcessGroup | None,
        train: bool,
        wire: torch.dtype,
    ) -> None:
        self.held = held
        self.bags = bags
        self._group = group
        self._wire = wire
        bases = held.pool.bases
        self._rows = torch.cat([each.ids + base for each, base in zip(bags, bases, strict=True)])
        lengths = torch.cat([torch.diff(each.offsets) for each in bags])
        self._offsets = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
        self._scale = _scales(bags)
        self._grouped: Grouped | None = None
        self._counts: Tensor | None = None
        self._counting: Work | None = None
        self._seen: _Gathering | None = None
        self._fetched: Fetched | None = None
        self._slots: Tensor | None = None
        self._sums: _Gathering | None = None
        if train:
            self._grouped = held.kernels.group(self._rows)
            if group is not None:
                mine = torch.tensor([len(self._grouped.rows)], device=self._rows.device)
                self._counts = mine.new_empty(group.size())
                self._counting = start_gather_into(self._counts, mine, group)

    def send_rows(self) -> None:
        """Once all have said how many rows they saw: say which."""
        if self._counting is None or self._seen is not None:
            return
        assert self._group is not None
        assert self._grouped is not None
        assert self._counts is not None
        self._counting.wait()
        self._seen = _gather(self._group, self._grouped.rows, self._counts.tolist())

    def fetch(self) -> None:
        """Begin to bring all rows that are looked up here or updated."""
        self.send_rows()
        rows = self._rows if self._seen is None else torch.cat([self._rows, self._seen.wait()])
        self._fetched = self.held.store.fetch(rows)

    def sums(self) -> list[Tensor]:
        """[samples, dim] of each shard."""
        assert self._fetched is not None
        self._slots = self._fetched.slots()
        slots = self._slots[: len(self._rows)]
        sums = self.held.kernels.lookup(
            self.held.store.weight, slots, self._offsets, self._scale, self.held.dtype
        )
        return list(sums.split([each.samples for each in self.bags]))

    def send_gradient(self, gradients: Sequence[Tensor]) -> None:
        """Give the gradient of each shard's sums."""
        assert self._grouped is not None
        sums = torch.cat(list(gradients))
        summed = self.held.kernels.segment_sum(sums, self._offsets, self._grouped, self._scale)
        if self._group is None or self._seen is None:
            self._sums = _Gathering(summed.unsqueeze(0), [len(summed)], None)
        else:
            self._sums = _gather(self._group, summed.to(self._wire), self._seen.counts)

    def update_by(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slots [n], offsets [n + 1] and gradient [n, dim] of the update, n the rows that each rank saw."""
        assert self._sums is not None
        assert self._slots is not None
        gradient = self._sums.wait().to(self.held.dtype)
        if self._seen is None:
            assert self._grouped is not None
            slots = self._slots[self._grouped.first()]
        else:
            slots = self._slots[len(self._rows) :]
        return slots, torch.arange(len(slots) + 1, device=slots.device), gradient

    def rows_of(self, grouped: Grouped) -> Tensor:
        """The store's rows of the update's slots, grouped."""
        assert self._grouped is not None
        rows = self._grouped.rows if self._seen is None else self._seen.wait()
        return rows[grouped.first()]

    def release(self) -> None:
        """Nobody needs the rows any more."""
        if self._fetched is not None:
            self._fetched.slots()
            self.held.store.release(self._fetched)


def _scales(bags: Sequence[Bags]) -> Tensor | None:
    scales = [each.scale for each in bags if each.scale is not None]
    if not scales:
        return None
    ones = [torch.ones(len(each.ids), dtype=scales[0].dtype, device=each.ids.device) for each in bags]
    return torch.cat(
        [one if each.scale is None else each.scale for each, one in zip(bags, ones, strict=True)]
    )
