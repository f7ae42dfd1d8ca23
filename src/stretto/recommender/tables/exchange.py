"""Exchanges between the ranks of a job: all-to-alls, and a batch's lookup requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import AllToAllOptions, ProcessGroup, Work

from stretto.recommender.tables.jagged import VARYING, Bags
from stretto.recommender.tables.shard_map import Pool, Wiring


@dataclass
class Arriving:
    """A message on its way.

    Attributes:
        tensor: [sum of `sizes`], whole after `wait`.
        sizes: elements from each rank.
        sent: kept until all is done.
    """

    tensor: Tensor
    sizes: list[int]
    work: Work | None = None
    sent: Tensor | None = None

    def wait(self) -> Tensor:
        """All of it, one rank's part after another's."""
        if self.work is not None:
            self.work.wait()
            self.work = self.sent = None
        return self.tensor

    def split(self) -> list[Tensor]:
        """The part of each rank."""
        return list(self.wait().split(self.sizes))


def exchange(group: ProcessGroup | None, send: Tensor, to: Sequence[int], sizes: Sequence[int]) -> Arriving:
    """Begin an all-to-all.

    Args:
        group: None where this rank is alone.
        send: flat, the part of each rank after that of the one before.
        to: elements for each rank.
        sizes: elements from each.
    """
    if group is None:
        return Arriving(send, list(sizes))
    receive = torch.empty(sum(sizes), dtype=send.dtype, device=send.device)
    work = group.alltoall_base(receive, send, list(sizes), list(to), AllToAllOptions())
    return Arriving(receive, list(sizes), work, send)


def joined(pieces: Sequence[Tensor], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Flat tensors after one another in one type; of none, an empty one on `device`."""
    if not pieces:
        return torch.empty(0, dtype=dtype, device=device)
    return pieces[0].to(dtype) if len(pieces) == 1 else torch.cat([piece.to(dtype) for piece in pieces])


_FACTS = 3  # of a shard in a header: bags, rows, ids of each bag


@dataclass
class Asked:
    """What all ranks ask of one pool: their bags after one another, of each rank shard by shard.

    Attributes:
        rows: [n] int64, of the pool's store; ids of a hash table.
        offsets: [bags + 1].
        scale: [n], or None for ones.
        bags: of each rank.
    """

    rows: Tensor
    offsets: Tensor
    scale: Tensor | None
    bags: list[int]


class Requests:
    """This rank's requests of one batch, and those of the others to this rank.

    Args:
        asked: for each rank, what its shards are asked for, in the order of the route.
        scaled: some bags have a scale; the same on all ranks.
        caches: what is the same from batch to batch, by pool.
    """

    def __init__(
        self,
        wiring: Wiring,
        rank: int,
        group: ProcessGroup | None,
        asked: Sequence[Sequence[Bags]],
        dtype: torch.dtype,
        scaled: bool,
        caches: list[_Layout],
        device: torch.device,
    ) -> None:
        self.asked = asked
        self._group = group
        self._dtype = dtype
        self._scaled = scaled
        self._pools, self._caches = wiring.pools[rank], caches
        self._rows_type = torch.int64 if group is None or wiring.wide else torch.int32
        self._own, self._world = len(wiring.routes[rank]), wiring.world
        self._device = device
        facts = [n for to in asked for bags in to for n in (bags.samples, len(bags.ids), bags.hot)]
        self._header = exchange(
            group,
            torch.tensor(facts, dtype=torch.int64, device=device),
            [_FACTS * len(to) for to in asked],
            [_FACTS * self._own] * self._world,
        )
        self._facts = list[list[int]]()
        self._body: Arriving | None = None
        self._scales: Arriving | None = None

    def send_rows(self) -> None:
        """Once the headers are there: send lengths and rows."""
        if self._body is not None:
            return
        flat = self._header.wait().tolist()
        size = _FACTS * self._own
        self._facts = [flat[i * size : (i + 1) * size] for i in range(self._world)]
        pieces, to = list[Tensor](), list[int]()
        for bags in self.asked:
            lengths = [each.lengths for each in bags if each.hot == VARYING]
            rows = [each.ids for each in bags]
            pieces += [*lengths, *rows]
            to.append(sum(map(len, lengths)) + sum(map(len, rows)))
        sizes = [sum(_sizes(facts)) for facts in self._facts]
        self._body = exchange(self._group, joined(pieces, self._rows_type, self._device), to, sizes)
        if self._scaled:
            scales = [_scale(each, self._dtype) for bags in self.asked for each in bags]
            counts = [sum(len(each.ids) for each in bags) for bags in self.asked]
            rows_of = [sum(facts[1::_FACTS]) for facts in self._facts]
            self._scales = exchange(self._group, joined(scales, self._dtype, self._device), counts, rows_of)

    def receive(self) -> list[Asked]:
        """What is asked of each of this rank's pools. Waits."""
        self.send_rows()
        assert self._body is not None
        bodies = self._body.split()
        scales = None if self._scales is None else self._scales.split()
        asked, first = list[Asked](), 0
        for pool, cache in zip(self._pools, self._caches, strict=True):
            last = first + len(pool.shards)
            asked.append(
                self._asked_of(pool=pool, cache=cache, first=first, last=last, bodies=bodies, scales=scales)
            )
            first = last
        return asked

    def _asked_of(
        self,
        pool: Pool,
        cache: _Layout,
        first: int,
        last: int,
        bodies: list[Tensor],
        scales: list[Tensor] | None,
    ) -> Asked:
        rows, scale = list[Tensor](), list[Tensor]()
        for source, (facts, body) in enumerate(zip(self._facts, bodies, strict=True)):
            counts = facts[1::_FACTS]
            before, here = sum(counts[:first]), sum(counts[first:last])
            lengths, _ = _sizes(facts)
            rows.append(body[lengths + before : lengths + before + here])
            if scales is not None:
                scale.append(scales[source][before : before + here])
        facts_of = [facts[_FACTS * first : _FACTS * last] for facts in self._facts]
        local, bases, offsets = joined(rows, torch.int64), *cache.of(facts_of, pool, self._device)
        if offsets is None:
            offsets = self._offsets(first, last, bodies)
        if bases is not None:
            local = local + bases
        bags = [sum(facts[0::_FACTS]) for facts in facts_of]
        return Asked(local, offsets, joined(scale, self._dtype) if scales is not None else None, bags)

    def _offsets(self, first: int, last: int, bodies: list[Tensor]) -> Tensor:
        """Where each bag begins, when some lengths vary."""
        lengths = list[Tensor]()
        for facts, body in zip(self._facts, bodies, strict=True):
            at = 0
            for shard in range(last):
                bags, _, hot = facts[_FACTS * shard : _FACTS * (shard + 1)]
                if hot == VARYING:
                    if shard >= first:
                        lengths.append(body[at : at + bags].long())
                    at += bags
                elif shard >= first:
                    lengths.append(torch.full((bags,), hot, dtype=torch.int64, device=body.device))
        return torch.nn.functional.pad(torch.cumsum(torch.cat(lengths), 0), (1, 0))


class _Layout:
    """Where shards and bags of a pool begin in a batch, kept while batches are of one shape."""

    def __init__(self) -> None:
        self._facts: list[list[int]] | None = None
        self._found: tuple[Tensor | None, Tensor | None] = (None, None)

    def of(
        self, facts: list[list[int]], pool: Pool, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """What is added to rows, None for nothing; and the offsets of bags, None where lengths vary."""
        if facts == self._facts:
            return self._found
        counts = [n for of in facts for n in of[1::_FACTS]]
        bases = torch.tensor(pool.bases * len(facts), device=device)
        added = None
        if len(pool.shards) > 1:
            added = torch.repeat_interleave(bases, torch.tensor(counts, device=device))
        offsets = None
        hot = [n for of in facts for n in of[2::_FACTS]]
        if VARYING not in hot:
            bags = torch.tensor([n for of in facts for n in of[0::_FACTS]], device=device)
            lengths = torch.repeat_interleave(torch.tensor(hot, device=device), bags)
            offsets = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
        self._facts, self._found = facts, (added, offsets)
        return self._found


def layouts(wiring: Wiring, rank: int) -> list[_Layout]:
    """One for each pool of this rank."""
    return [_Layout() for _ in wiring.pools[rank]]


def _sizes(facts: list[int]) -> tuple[int, int]:
    """Lengths and rows in the body that a header announces."""
    varying = sum(
        bags for bags, hot in zip(facts[0::_FACTS], facts[2::_FACTS], strict=True) if hot == VARYING
    )
    return varying, sum(facts[1::_FACTS])


def _scale(bags: Bags, dtype: torch.dtype) -> Tensor:
    return (
        bags.scale
        if bags.scale is not None
        else torch.ones(len(bags.ids), dtype=dtype, device=bags.ids.device)
    )
