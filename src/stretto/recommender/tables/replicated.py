"""Replicated tables: every rank looks up its own copy, and row gradients are exchanged among all ranks.

Each rank sends the unique rows that it looked up, and later the summed gradient of each. Every rank applies
all of them in rank order, so that the copies stay bitwise identical.
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
from stretto.recommender.tables.pools import LocalPool


@dataclass
class _Gathered:
    """An all-gather of tensors of different lengths, padded to the longest."""

    tensor: Tensor  # [world, longest, ...]
    counts: list[int]
    work: Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return torch.cat([part[:count] for part, count in zip(self.tensor, self.counts, strict=True)])


def _gather(group: ProcessGroup, local: Tensor, counts: list[int]) -> _Gathered:
    longest, padded = max(counts), local
    if len(local) < longest:
        padded = local.new_zeros(longest, *local.shape[1:])
        padded[: len(local)] = local
    tensor = local.new_empty(len(counts) * longest, *local.shape[1:])
    work = start_gather_into(tensor.view(-1), padded.view(-1), group)
    return _Gathered(tensor.view(len(counts), longest, *local.shape[1:]), counts, work)


class ReplicatedLookups:
    """The lookups of a batch in one replicated pool, and the update that all ranks apply to it.

    Args:
        bags: of each of the pool's shards, rows of its table.
        group: of all ranks; None: there is only this one.
        train: whether an update will follow.
        wire: dtype in which gradients are sent, and applied on this rank too.
    """

    def __init__(
        self,
        local: LocalPool,
        bags: Sequence[Bags],
        group: ProcessGroup | None,
        train: bool,
        wire: torch.dtype,
    ) -> None:
        self.local = local
        self.bags = bags
        self._group = group
        self._wire = wire
        bases = local.pool.bases
        self._rows = torch.cat([each.ids + base for each, base in zip(bags, bases, strict=True)])
        lengths = torch.cat([torch.diff(each.offsets) for each in bags])
        self._offsets = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
        self._scale = _scales(bags)
        self._grouped: Grouped | None = None
        self._counts: Tensor | None = None
        self._counting: Work | None = None
        self._all_rows: _Gathered | None = None
        self._fetched: Fetched | None = None
        self._slots: Tensor | None = None
        self._gradients: _Gathered | None = None
        if train:
            self._grouped = local.kernels.group(self._rows)
            if group is not None:
                count = torch.tensor([len(self._grouped.rows)], device=self._rows.device)
                self._counts = count.new_empty(group.size())
                self._counting = start_gather_into(self._counts, count, group)

    def send_rows(self) -> None:
        """Sends the unique rows of this rank, once all ranks know how many each has."""
        if self._counting is None or self._all_rows is not None:
            return
        assert self._group is not None
        assert self._grouped is not None
        assert self._counts is not None
        self._counting.wait()
        self._all_rows = _gather(self._group, self._grouped.rows, self._counts.tolist())

    def fetch(self) -> None:
        """Starts fetching all rows that are looked up here, or updated for another rank."""
        self.send_rows()
        rows = self._rows if self._all_rows is None else torch.cat([self._rows, self._all_rows.wait()])
        self._fetched = self.local.store.fetch(rows)

    def sums(self) -> list[Tensor]:
        """The pooled vectors [samples, dim] of each shard. Waits for the rows."""
        assert self._fetched is not None
        self._slots = self._fetched.slots()
        slots = self._slots[: len(self._rows)]
        sums = self.local.kernels.lookup(
            self.local.store.weight, slots, self._offsets, self._scale, self.local.dtype
        )
        return list(sums.split([each.samples for each in self.bags]))

    def send_gradient(self, gradients: Sequence[Tensor]) -> None:
        """Takes the gradient [samples, dim] of each shard's sums and sends that of the unique rows."""
        assert self._grouped is not None
        pooled = torch.cat(list(gradients))
        of_rows = self.local.kernels.segment_sum(pooled, self._offsets, self._grouped, self._scale)
        if self._group is None or self._all_rows is None:
            self._gradients = _Gathered(of_rows.unsqueeze(0), [len(of_rows)], None)
        else:
            self._gradients = _gather(self._group, of_rows.to(self._wire), self._all_rows.counts)

    def update_by(self) -> tuple[Tensor, Tensor, Tensor]:
        """The update of all ranks: slots [n], offsets [n + 1] and gradient [n, dim], where n is the sum of
        every rank's unique rows. Waits for the gradients.
        """
        assert self._gradients is not None
        assert self._slots is not None
        gradient = self._gradients.wait().to(self.local.dtype)
        if self._all_rows is None:
            assert self._grouped is not None
            slots = self._slots[self._grouped.first()]
        else:
            slots = self._slots[len(self._rows) :]
        return slots, torch.arange(len(slots) + 1, device=slots.device), gradient

    def rows_of(self, grouped: Grouped) -> Tensor:
        """The store's row of each group of `update_by`'s slots."""
        assert self._grouped is not None
        rows = self._grouped.rows if self._all_rows is None else self._all_rows.wait()
        return rows[grouped.first()]

    def release(self) -> None:
        """Lets the store evict the rows."""
        if self._fetched is not None:
            self._fetched.slots()
            self.local.store.release(self._fetched)


def _scales(bags: Sequence[Bags]) -> Tensor | None:
    scales = [each.scale for each in bags if each.scale is not None]
    if not scales:
        return None
    ones = [torch.ones(len(each.ids), dtype=scales[0].dtype, device=each.ids.device) for each in bags]
    return torch.cat(
        [one if each.scale is None else each.scale for each, one in zip(bags, ones, strict=True)]
    )
