"""Gather matrices that are split over ranks, each on one rank, and scatter the results back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.optim.base import depth_of, member_shape, members_of
from stretto.engine.optim.whole import sendable
from stretto.engine.parallel.collectives import start_exchange, start_gather
from stretto.engine.parallel.fragment import Fragment


class Box(NamedTuple):
    """A part of one matrix that a rank holds."""

    tensor: int  # of the fragments, in order
    piece: int  # of the fragment
    member: tuple[int, ...]  # of the stack
    offsets: tuple[int, ...]  # in the matrix
    sizes: tuple[int, ...]
    owned: bool

    @property
    def matrix(self) -> tuple[int, tuple[int, ...]]:
        return self.tensor, self.member

    def of(self, matrix: Tensor) -> Tensor:
        """The box as a view of its matrix."""
        return matrix[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))]


class Exchange:
    """Assigns matrices to the holders of some fragments, and moves their boxes there and back.

    Greedy: the costliest matrices first, each to the least loaded rank; a matrix costs rows x columns x the
    smaller of the two. Every rank computes the same assignment from all ranks' boxes, which are gathered on
    construction: collective over the holders.

    Args:
        fragments: with the same `holders`, matrices or stacks of them.
    """

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self._fragments = fragments
        self._group: ProcessGroup | None = fragments[0].holders
        self._rank = 0 if self._group is None else self._group.rank()
        self._boxes = _boxes_of_all(fragments, self._group)
        owners = self._share_out()
        n = range(len(self._boxes))
        mine = [[b for b in boxes if owners[b.matrix] == self._rank] for boxes in self._boxes]
        self._arriving = [[b for b in boxes if b.owned] for boxes in mine]  # by sender
        self._leaving_back = mine  # by receiver: copies get their part too
        boxes_here = self._boxes[self._rank]
        self._leaving = [[b for b in boxes_here if b.owned and owners[b.matrix] == rank] for rank in n]
        self._arriving_back = [[b for b in boxes_here if owners[b.matrix] == rank] for rank in n]
        self._matrices = [matrix for matrix, owner in owners.items() if owner == self._rank]

    def _share_out(self) -> dict[tuple[int, tuple[int, ...]], int]:
        """The rank of each matrix."""
        costs = dict[tuple[int, tuple[int, ...]], int]()
        held = {box.matrix for boxes in self._boxes for box in boxes}
        for i, fragment in enumerate(self._fragments):
            rows, columns = member_shape(fragment)
            for member in product(*map(range, members_of(fragment))):
                if (i, member) in held:  # only a server holds anything
                    costs[i, member] = rows * columns * min(rows, columns)
        loads, owners = [0] * len(self._boxes), dict[tuple[int, tuple[int, ...]], int]()
        for matrix in sorted(costs, key=lambda m: -costs[m]):
            owners[matrix] = loads.index(min(loads))
            loads[owners[matrix]] += costs[matrix]
        return owners

    def gather(self, tensors: Sequence[Tensor]) -> dict[tuple[int, tuple[int, ...]], Tensor]:
        """Send this rank's part of every tensor, in its local shape; returns this rank's whole matrices."""
        came = self._move([self._view(b, tensors) for part in self._leaving for b in part], tensors[0], True)
        matrices = {
            matrix: tensors[0].new_zeros(member_shape(self._fragments[matrix[0]]))
            for matrix in self._matrices
        }
        at = 0
        for box in (b for part in self._arriving for b in part):
            size = prod(box.sizes)
            box.of(matrices[box.matrix]).copy_(came[at : at + size].view(box.sizes))
            at += size
        return matrices

    def scatter(self, matrices: dict[tuple[int, tuple[int, ...]], Tensor], tensors: Sequence[Tensor]) -> None:
        """Scatter the results into every rank's part of the tensors; padding is left alone."""
        leaving = [b.of(matrices[b.matrix]) for part in self._leaving_back for b in part]
        came, at = self._move(leaving, tensors[0], False), 0
        for box in (b for part in self._arriving_back for b in part):
            size = prod(box.sizes)
            self._view(box, tensors).copy_(came[at : at + size].view(box.sizes))
            at += size

    def _view(self, box: Box, tensors: Sequence[Tensor]) -> Tensor:
        fragment = self._fragments[box.tensor]
        piece = fragment.placed.pieces[box.piece]
        inside = zip(box.member, piece.offsets, strict=False)
        return piece.of_local(tensors[box.tensor])[tuple(m - o for m, o in inside)]

    def _move(self, views: Sequence[Tensor], like: Tensor, there: bool) -> Tensor:
        """One all-to-all of the views, ordered by receiver."""
        flat = torch.cat([v.reshape(-1) for v in views]) if views else like.new_empty(0)
        send, receive = (
            (self._leaving, self._arriving) if there else (self._leaving_back, self._arriving_back)
        )
        if self._group is None:
            return flat
        flat = sendable(flat, self._group)
        out, work = start_exchange(flat, _elements(send), _elements(receive), self._group)
        work.wait()
        return out.to(like.device)


def _elements(parts: Sequence[Sequence[Box]]) -> list[int]:
    return [sum(prod(box.sizes) for box in part) for part in parts]


def _boxes(tensor: int, fragment: Fragment) -> list[Box]:
    """This rank's boxes of one fragment."""
    depth, held = depth_of(fragment), list[Box]()
    for i, piece in enumerate(fragment.placed.pieces):
        owned = piece.owned or fragment.holders is None
        stack = (range(o, o + n) for o, n in zip(piece.offsets[:depth], piece.sizes[:depth], strict=True))
        for member in product(*stack):
            box = Box(
                tensor=tensor,
                piece=i,
                member=member,
                offsets=piece.offsets[depth:],
                sizes=piece.sizes[depth:],
                owned=owned,
            )
            held.append(box)
    return held


def _boxes_of_all(fragments: Sequence[Fragment], group: ProcessGroup | None) -> list[list[Box]]:
    """Every holder's boxes, gathered as integers, a row a box: tensor, piece, owned, offsets, sizes, and
    members padded to the deepest stack.
    """
    local_boxes = [box for i, fragment in enumerate(fragments) for box in _boxes(i, fragment)]
    if group is None:
        return [local_boxes]
    depths = [depth_of(fragment) for fragment in fragments]
    device = sendable(fragments[0].parameter.detach()[:0], group).device
    width = 7 + max(depths)
    rows = [
        [b.tensor, b.piece, b.owned, *b.offsets, *b.sizes, *b.member, *[0] * (width - 7 - len(b.member))]
        for b in local_boxes
    ]
    counts, work = start_gather(torch.tensor([len(local_boxes)], device=device), group)
    work.wait()
    lengths = counts.flatten().tolist()
    table = torch.zeros((max(lengths), width), dtype=torch.int64, device=device)
    if rows:
        table[: len(rows)] = torch.tensor(rows, device=device)
    tables, work = start_gather(table, group)
    work.wait()
    return [
        [
            Box(
                tensor=row[0],
                piece=row[1],
                member=tuple(row[7 : 7 + depths[row[0]]]),
                offsets=(row[3], row[4]),
                sizes=(row[5], row[6]),
                owned=bool(row[2]),
            )
            for row in part[:length]
        ]
        for part, length in zip(tables.tolist(), lengths, strict=True)
    ]
