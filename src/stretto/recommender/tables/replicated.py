"""Replicated tables: every rank looks up its own copy, and row gradients are exchanged among all ranks.

Each rank sends the unique rows that it looked up and later the summed gradient of each, or all its lookups
and later the gradients of their sums, whichever is less. Every rank applies those of all ranks, in rank
order, so that the copies stay bitwise identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from stretto.engine.device import moved
from stretto.engine.parallel.collectives import start_gather_into
from stretto.recommender.stores.store import FetchedRows
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


class _SentRows:
    """All ranks' unique rows, and the summed gradient of each: less to send if lookups share rows."""

    def __init__(self, group: ProcessGroup, grouped: Grouped, rows: _Gathered) -> None:
        self.grouped, self.rows = grouped, rows
        self._group = group
        self._gradient: _Gathered | None = None

    def send(self, gradient: Tensor) -> None:
        """Send the gradient [u, dim] of this rank's unique rows."""
        self._gradient = _gather(self._group, gradient, self.rows.counts)

    def receive(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return offsets, gradient and scale of bags of one row each."""
        assert self._gradient is not None
        gradient = self._gradient.wait()
        return torch.arange(len(gradient) + 1, device=gradient.device), gradient, None


@dataclass(kw_only=True)
class _SentBags:
    """All ranks' lookups, and the gradient of each bag's sum: less to send if bags have many rows."""

    group: ProcessGroup
    rows: _Gathered
    lengths: _Gathered
    scale: _Gathered | None
    gradient: _Gathered | None = None

    def send(self, gradient: Tensor) -> None:
        """Send the gradient [bags, dim] of this rank's sums."""
        self.gradient = _gather(self.group, gradient, self.lengths.counts)

    def receive(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return offsets, gradient and scale of all ranks' bags."""
        assert self.gradient is not None
        scale = None if self.scale is None else self.scale.wait()
        return _offsets_of(self.lengths.wait()), self.gradient.wait(), scale


def _offsets_of(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))


class ReplicatedLookups:
    """The lookups of a batch in one replicated pool, and the update that all ranks apply to it.

    Args:
        bags: bags of rows for each of the pool's shards.
        group: all ranks; None if this is the only one.
        train: True if an update will follow.
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
        self._rows = torch.cat([shard.ids + base for shard, base in zip(bags, bases, strict=True)])
        self._lengths = torch.cat([torch.diff(shard.offsets) for shard in bags])
        self._offsets = _offsets_of(self._lengths)
        self._scale: Tensor | None = None
        if scales := [shard.scale for shard in bags if shard.scale is not None]:
            dtype = scales[0].dtype
            self._scale = torch.cat(
                [
                    torch.ones(len(shard.ids), dtype=dtype, device=shard.ids.device)
                    if shard.scale is None
                    else shard.scale
                    for shard in bags
                ]
            )
        self._grouped: Grouped | None = None
        self._counts: Tensor | None = None
        self._counting: Work | None = None
        self._sent: _SentRows | _SentBags | None = None
        self._fetched: FetchedRows | None = None
        self._slots: Tensor | None = None
        self._gradient: Tensor | None = None
        if train:
            self._grouped = local.kernels.group(self._rows)
            if group is not None:
                sizes = [len(self._grouped.rows), len(self._rows), len(self._lengths)]
                counts = moved(torch.tensor([*sizes, self._scale is not None]), self._rows.device)
                self._counts = counts.new_empty(group.size() * len(counts))
                self._counting = start_gather_into(self._counts, counts, group)

    def send_rows(self) -> None:
        """Send the rows of this rank, once all ranks know the number of each other's rows."""
        if self._counting is None or self._sent is not None:
            return
        assert self._group is not None
        assert self._grouped is not None
        assert self._counts is not None
        self._counting.wait()
        unique, lookups, bags, scaled = self._counts.view(self._group.size(), -1).T.tolist()
        vector = self.local.pool.width * self._wire.itemsize
        by_bags = max(lookups) * (_NUMBER + _NUMBER * any(scaled)) + max(bags) * (_NUMBER + vector)
        if by_bags < max(unique) * (_NUMBER + vector):
            scale = self._scale
            if scale is None and any(scaled):
                scale = torch.ones(len(self._rows), dtype=self.local.dtype, device=self._rows.device)
            self._sent = _SentBags(
                group=self._group,
                rows=_gather(self._group, self._rows, lookups),
                lengths=_gather(self._group, self._lengths, bags),
                scale=None if scale is None else _gather(self._group, scale, lookups),
            )
        else:
            rows = _gather(self._group, self._grouped.rows, unique)
            self._sent = _SentRows(self._group, self._grouped, rows)

    def fetch(self) -> None:
        """Start fetching all rows that this rank looks up, or updates for another rank."""
        self.send_rows()
        rows = self._rows if self._sent is None else torch.cat([self._rows, self._sent.rows.wait()])
        self._fetched = self.local.store.fetch(rows)

    def sums(self) -> list[Tensor]:
        """Wait for the rows and return the pooled vectors [samples, dim] of each shard."""
        assert self._fetched is not None
        self._slots = self._fetched.slots()
        slots = self._slots[: len(self._rows)]
        sums = self.local.kernels.lookup(
            self.local.store.weight, slots, self._offsets, self._scale, self.local.dtype
        )
        return list(sums.split([shard.samples for shard in self.bags]))

    def send_gradient(self, gradients: Sequence[Tensor]) -> None:
        """Send the gradient [samples, dim] of each shard's sums, as far as other ranks need it."""
        pooled = torch.cat(list(gradients))
        if isinstance(self._sent, _SentRows):
            by_row = self.local.kernels.segment_sum(pooled, self._offsets, self._sent.grouped, self._scale)
            self._sent.send(by_row.to(self._wire))
        elif self._sent is not None:
            self._sent.send(pooled.to(self._wire))
        else:
            self._gradient = pooled

    def receive_update(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Wait for the gradients and return the update of all ranks, as arguments of
        `optim.updater.update_rows`: slots [n], offsets [bags + 1], gradient [bags, dim] and scale [n]."""
        assert self._slots is not None
        if self._sent is None:
            assert self._gradient is not None
            return self._slots, self._offsets, self._gradient, self._scale
        offsets, gradient, scale = self._sent.receive()
        return self._slots[len(self._rows) :], offsets, gradient.to(self.local.dtype), scale

    def rows_of(self, grouped: Grouped) -> Tensor:
        """Return the store's row of each group of `receive_update`'s slots."""
        rows = self._rows if self._sent is None else self._sent.rows.wait()
        return rows[grouped.first()]

    def release(self) -> None:
        """Let the store evict the rows."""
        if self._fetched is not None:
            self._fetched.slots()
            self.local.store.release(self._fetched)


_NUMBER = 8  # bytes of a row, of a length, and at most of a scale
