"""Exchanges of a batch between the ranks: all-to-alls, and the lookup requests that they carry.

All-to-alls are started and completed separately, so that computation can overlap them. A request has a header
with the number of bags and rows for each shard, and the length of its bags if it is constant; and a body with
the varying lengths, and the rows. Each rank receives only the requests addressed to it; nothing is padded.
Both are sent while the previous batch computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import AllToAllOptions, ProcessGroup, Work

from stretto.engine.device import moved
from stretto.recommender.tables.jagged import VARYING, Bags
from stretto.recommender.tables.shard_map import Pool, ShardMap


@dataclass
class PendingReceive:
    """An all-to-all in flight.

    Attributes:
        tensor: [sum of `sizes`], complete after `wait`.
        sizes: number of elements from each rank.
        sent: the send buffer, kept alive until the exchange is complete.
    """

    tensor: Tensor
    sizes: list[int]
    work: Work | None = None
    sent: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for and return the received elements of all ranks, in rank order."""
        if self.work is not None:
            self.work.wait()
            self.work = self.sent = None
        return self.tensor

    def split(self) -> list[Tensor]:
        """Wait for and return the received elements of each rank."""
        return list(self.wait().split(self.sizes))


def exchange(
    group: ProcessGroup | None, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
) -> PendingReceive:
    """Start an all-to-all.

    Args:
        group: the ranks; None if this is the only one.
        send: elements for each rank, flat and in rank order.
        send_sizes, receive_sizes: number of elements to and from each rank.
    """
    if group is None:
        return PendingReceive(send, list(receive_sizes))
    receive = torch.empty(sum(receive_sizes), dtype=send.dtype, device=send.device)
    work = group.alltoall_base(receive, send, list(receive_sizes), list(send_sizes), AllToAllOptions())
    return PendingReceive(receive, list(receive_sizes), work, send)


def concatenate(pieces: Sequence[Tensor], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Concatenate flat tensors as `dtype`; without any, return an empty tensor on `device`."""
    if not pieces:
        return torch.empty(0, dtype=dtype, device=device)
    return pieces[0].to(dtype) if len(pieces) == 1 else torch.cat([piece.to(dtype) for piece in pieces])


_FIELDS = 3  # of a shard in a header: bags, rows, length of each bag


@dataclass
class PoolRequest:
    """The requests of all ranks to one pool: bags in rank order, and within a rank shard by shard.

    Attributes:
        rows: [n] int64, rows of the pool's store; for a hash table ids.
        offsets: [bags + 1] int64, start of each bag.
        scale: [n], per-sample weight of each row in its sum; None if all are 1.
        bags: number of bags of each rank.
    """

    rows: Tensor
    offsets: Tensor
    scale: Tensor | None
    bags: list[int]


class Requests:
    """The requests of one batch: those that this rank sends, and those that it receives.

    Args:
        bags_to: for each rank, the bags requested from its shards, in the order of its route.
        scaled: True if some bags have a scale; the same on all ranks.
        layouts: layout of each pool of this rank, reused from batch to batch.
    """

    def __init__(
        self,
        shard_map: ShardMap,
        rank: int,
        group: ProcessGroup | None,
        bags_to: Sequence[Sequence[Bags]],
        dtype: torch.dtype,
        scaled: bool,
        layouts: list[_BatchLayout],
        device: torch.device,
    ) -> None:
        self._bags_to = bags_to
        self._group = group
        self._dtype = dtype
        self._scaled = scaled
        self._pools, self._layouts = shard_map.pools[rank], layouts
        self._rows_type = torch.int64 if group is None or shard_map.needs_int64 else torch.int32
        self._shards, self._world = len(shard_map.routes[rank]), shard_map.world
        self._device = device
        numbers = [n for to in bags_to for bags in to for n in (bags.samples, len(bags.ids), bags.hot)]
        header = torch.tensor(numbers, dtype=torch.int64)
        self._header = exchange(
            group,
            header if group is None else moved(header, device),
            [_FIELDS * len(to) for to in bags_to],
            [_FIELDS * self._shards] * self._world,
        )
        self._headers = list[list[int]]()  # from each rank, once received
        self._body: PendingReceive | None = None
        self._scales: PendingReceive | None = None

    def send_rows(self) -> None:
        """Wait for the headers and send lengths and rows."""
        if self._body is not None:
            return
        flat = self._header.wait().tolist()
        size = _FIELDS * self._shards
        self._headers = [flat[i * size : (i + 1) * size] for i in range(self._world)]
        pieces, send_sizes = list[Tensor](), list[int]()
        for shards in self._bags_to:
            lengths = [bags.lengths for bags in shards if bags.hot == VARYING]
            rows = [bags.ids for bags in shards]
            pieces += [*lengths, *rows]
            send_sizes.append(sum(map(len, lengths)) + sum(map(len, rows)))
        receive_sizes = [sum(_body_sizes(header)) for header in self._headers]
        body = concatenate(pieces, self._rows_type, self._device)
        self._body = exchange(self._group, body, send_sizes, receive_sizes)
        if self._scaled:
            scales = [
                torch.ones(len(bags.ids), dtype=self._dtype, device=bags.ids.device)
                if bags.scale is None
                else bags.scale
                for shards in self._bags_to
                for bags in shards
            ]
            rows_to = [sum(len(bags.ids) for bags in shards) for shards in self._bags_to]
            rows_from = [sum(header[1::_FIELDS]) for header in self._headers]
            flat_scales = concatenate(scales, self._dtype, self._device)
            self._scales = exchange(self._group, flat_scales, rows_to, rows_from)

    def receive(self) -> list[PoolRequest]:
        """Wait for and return the requests to each of this rank's pools."""
        self.send_rows()
        assert self._body is not None
        bodies = self._body.split()
        scales = None if self._scales is None else self._scales.split()
        requests, first = list[PoolRequest](), 0
        for pool, layout in zip(self._pools, self._layouts, strict=True):
            last = first + len(pool.shards)  # the pool's shards are [first, last) of this rank's route
            rows, scale = list[Tensor](), list[Tensor]()
            for source, (header, body) in enumerate(zip(self._headers, bodies, strict=True)):
                counts = header[1::_FIELDS]
                start, size = sum(counts[:first]), sum(counts[first:last])
                lengths, _ = _body_sizes(header)
                rows.append(body[lengths + start : lengths + start + size])
                if scales is not None:
                    scale.append(scales[source][start : start + size])
            headers = [header[_FIELDS * first : _FIELDS * last] for header in self._headers]
            store_rows = concatenate(rows, torch.int64)
            bases, offsets = layout.update(headers, pool, self._device)
            if offsets is None:
                offsets = self._varying_offsets(first, last, bodies)
            if bases is not None:
                store_rows = store_rows + bases
            row_scale = concatenate(scale, self._dtype) if scales is not None else None
            bags = [sum(header[0::_FIELDS]) for header in headers]
            requests.append(PoolRequest(store_rows, offsets, row_scale, bags))
            first = last
        return requests

    def _varying_offsets(self, first: int, last: int, bodies: list[Tensor]) -> Tensor:
        """Start of each bag of shards [first, last), if some lengths vary."""
        lengths = list[Tensor]()
        for header, body in zip(self._headers, bodies, strict=True):
            position = 0
            for shard in range(last):
                bags, _, hot = header[_FIELDS * shard : _FIELDS * (shard + 1)]
                if hot == VARYING:
                    if shard >= first:
                        lengths.append(body[position : position + bags].long())
                    position += bags
                elif shard >= first:
                    lengths.append(torch.full((bags,), hot, dtype=torch.int64, device=body.device))
        return torch.nn.functional.pad(torch.cumsum(torch.cat(lengths), 0), (1, 0))


class _BatchLayout:
    """Positions of the shards and bags of a pool in a batch, reused while headers stay the same (if every
    sample has the same number of ids)."""

    def __init__(self) -> None:
        self._headers: list[list[int]] | None = None
        self._layout: tuple[Tensor | None, Tensor | None] = (None, None)

    def update(
        self, headers: list[list[int]], pool: Pool, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the base to add to each row, or None; and the bags' offsets, or None if lengths vary."""
        if headers == self._headers:
            return self._layout
        # repeated on the host, since a device could not tell it how many numbers there are
        fields = ([n for header in headers for n in header[at::_FIELDS]] for at in range(_FIELDS))
        bags, counts, hot = map(torch.tensor, fields)
        added = offsets = None
        if len(pool.shards) > 1:
            bases = torch.tensor(pool.bases * len(headers))
            added = moved(torch.repeat_interleave(bases, counts), device)
        if VARYING not in hot:
            lengths = moved(torch.repeat_interleave(hot, bags), device)
            offsets = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
        self._headers, self._layout = headers, (added, offsets)
        return self._layout


def batch_layouts(shard_map: ShardMap, rank: int) -> list[_BatchLayout]:
    """Return a layout for each pool of this rank."""
    return [_BatchLayout() for _ in shard_map.pools[rank]]


def _body_sizes(header: list[int]) -> tuple[int, int]:
    """Return the number of lengths and of rows in the body of a header."""
    varying = sum(
        bags for bags, hot in zip(header[0::_FIELDS], header[2::_FIELDS], strict=True) if hot == VARYING
    )
    return varying, sum(header[1::_FIELDS])
