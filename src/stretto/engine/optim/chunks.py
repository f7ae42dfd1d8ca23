"""A batch of fragments as compiled loops see it: addresses of tensors, and boxes of their elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from stretto.engine import loops
from stretto.engine.optim import base
from stretto.engine.optim.base import (
    TensorGroup,
    counted_pieces,
    depth_of,
    member_shape,
    member_size,
    members_of,
)
from stretto.engine.parallel.fragment import ParameterFragment, TensorBox

Array = np.ndarray[Any, np.dtype[Any]]
SIZE = 1 << 16  # elements of a chunk: what a thread does at a time, and what a partial sum is of
_TYPES = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}


@dataclass(frozen=True, kw_only=True)
class Box:
    """Elements of one matrix or vector of the plain model in a local tensor.

    Attributes:
        start: offset of the first in the local tensor, in elements.
        stride: elements from a row to the next.
        first_row, first_column: of the first in the matrix.
    """

    start: int
    rows: int
    columns: int
    stride: int
    first_row: int = 0
    first_column: int = 0

    def flat(self) -> Box:
        """As a single row, where the rows lie one after the other."""
        if self.rows != 1 and self.columns != self.stride:
            return self
        n = self.rows * self.columns
        return Box(start=self.start, rows=1, columns=n, stride=n)

    def parts(self) -> Iterator[Box]:
        """Boxes of at most `SIZE` elements that cover it."""
        width = min(SIZE, self.columns)
        height = SIZE // max(1, width)
        for row, column in product(range(0, self.rows, height), range(0, self.columns, SIZE)):
            yield Box(
                start=self.start + row * self.stride + column,
                rows=min(height, self.rows - row),
                columns=min(width, self.columns - column),
                stride=self.stride,
                first_row=self.first_row + row,
                first_column=self.first_column + column,
            )


@dataclass(frozen=True)
class Run:
    """Chunks that all passes of an update go through before those of the next run: fragments whose tensors
    stay in the cache meanwhile, or where holders have to wait for each other, the whole batch.
    """

    chunks: tuple[int, int]
    members: tuple[int, int]


class Chunks:
    """The elements of a batch in chunks, which loops go through in any order and on several threads. What
    chunks sum is added up in their order, so that it does not depend on the number of threads.

    Args:
        matrices: whether loops need rows and columns; else what is contiguous is a vector.

    Attributes:
        chunks: [n, 9] int64: number of the member, whether sums count it, start, rows, columns, stride, first
            row, first column, start of its sums.
        members: [m, 6] int64, for each tensor of the plain model, each expert of a stack: number of its
            fragment in the batch, number in the stack, rows and columns (0 and 0 of a vector), starts of its
            row sums and column sums.
        lines: rows of all matrices, and columns.
        sums: of all chunks: one of each, and those of its rows and columns.
        offsets: [fragments] int64, in elements, of memory for a run, which needs `scratch` at most.
        elements: [fragments] float64, of one member.
    """

    def __init__(self, batch: TensorGroup, matrices: bool) -> None:
        chunks, members = list[tuple[int, ...]](), list[tuple[int, ...]]()
        self.runs, offsets = list[Run](), list[int]()
        all_rows = all_columns = self.sums = self.scratch = elements = 0
        begin = (0, 0)
        for number, fragment in enumerate(batch.fragments):
            first, shape = len(members), member_shape(fragment)
            is_matrix = matrices and len(shape) == 2
            for at in range(prod(members_of(fragment))):
                lines = shape if is_matrix else (0, 0)
                members.append((number, at, *lines, all_rows, all_columns))
                all_rows, all_columns = all_rows + lines[0], all_columns + lines[1]
            for member, counted, box in _boxes(fragment):
                for part in (box if is_matrix else box.flat()).parts():
                    place = (part.start, part.rows, part.columns, part.stride)
                    corner = (part.first_row, part.first_column)
                    chunks.append((first + member, counted, *place, *corner, self.sums))
                    self.sums += 1 + (part.rows + part.columns if is_matrix else 0)
            offsets.append(elements)
            elements += fragment.parameter.numel()
            self.scratch = max(self.scratch, elements)
            last = number == len(batch.fragments) - 1
            if last or (batch.alone and elements >= base.CACHED):
                end = (len(chunks), len(members))
                self.runs.append(Run((begin[0], end[0]), (begin[1], end[1])))
                begin, elements = end, 0
        self.chunks: Array = np.array(chunks, np.int64).reshape(-1, 9)
        self.members: Array = np.array(members, np.int64).reshape(-1, 6)
        self.lines: Array = np.array((all_rows, all_columns), np.int64)
        self.offsets: Array = np.array(offsets, np.int64)
        self.elements: Array = np.array([member_size(f) for f in batch.fragments], np.float64)


def _boxes(fragment: ParameterFragment) -> Iterator[tuple[int, bool, Box]]:
    """The pieces of a fragment: number in the stack, whether sums count it, and the box."""
    counted = {id(piece) for piece in counted_pieces(fragment)}
    depth, stack = depth_of(fragment), members_of(fragment)
    for piece in fragment.placed.pieces:
        start, strides = _in_memory(piece, fragment.parameter)
        for index in product(*map(range, piece.sizes[:depth])):
            at = start + sum(i * s for i, s in zip(index, strides, strict=False))
            member = 0
            for i, offset, size in zip(index, piece.offsets, stack, strict=False):
                member = member * size + offset + i
            *first, column = piece.offsets[depth:] or (0,)
            *rows, columns = piece.sizes[depth:] or (1,)
            box = Box(
                start=at,
                rows=prod(rows),
                columns=columns,
                stride=strides[-2] if rows else columns,
                first_row=sum(first),
                first_column=column,
            )
            yield member, id(piece) in counted, box


def _in_memory(piece: TensorBox, local: Tensor) -> tuple[int, tuple[int, ...]]:
    """The offset of a piece's first element in the local tensor's memory, and its strides."""
    if piece.strides is not None:
        return piece.local[0], piece.strides
    return sum(i * s for i, s in zip(piece.local, local.stride(), strict=True)), local.stride()


class BoundLoops:
    """The loops of `compiled` over the tensors of one batch.

    Args:
        addresses: of the tensors in memory, [fragments, n] int64.
        like: an empty array of their type.
        kept: memory among these that nothing else keeps.
    """

    def __init__(self, chunks: Chunks, addresses: Array, like: Array, kept: Tensor | None) -> None:
        from stretto.engine.optim import compiled

        self.chunks, self.like = chunks, like
        self._compiled, self._kept = compiled, kept
        self._tables = (chunks.chunks, chunks.members, addresses, like)

    def over_chunks(self, name: str, run: Run, *arguments: Any) -> None:
        """A loop over the chunks of a run, on as many threads as torch's operators use."""
        loop, tables = getattr(self._compiled, name), self._tables
        first, last = run.chunks
        loops.in_parts(lambda a, b: loop(first + a, first + b, *tables, *arguments), last - first)

    def over(self, name: str, numbers: tuple[int, int], *arguments: Any) -> None:
        """A loop over the sums of chunks, or over members."""
        getattr(self._compiled, name)(*numbers, *self._tables, *arguments)


class BatchLoops:
    """Binds loops to batches, whose chunks are kept from one update to the next.

    Args:
        matrices: see `Chunks`.
    """

    def __init__(self, matrices: bool) -> None:
        self._matrices, self._chunks = matrices, WeakKeyDictionary[TensorGroup, Chunks]()
        self._scratch: dict[torch.dtype, Tensor] = {}

    def bind(
        self, batch: TensorGroup, *tensors: Sequence[Tensor], scratch: bool = False
    ) -> BoundLoops | None:
        """Loops over tensors of a batch, one list for each of their arguments. None where none can be
        compiled, or tensors are not contiguous or have no values.

        Args:
            scratch: whether the last argument is memory that only a run needs, with any values.
        """
        if not batch.compilable:
            return None
        dtype = batch.parameters[0].dtype
        if not {type(tensor) for tensor in chain(*tensors)} <= {Tensor, nn.Parameter}:
            return None
        if not all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in chain(*tensors)):
            return None
        chunks = self._chunks.get(batch)
        if chunks is None:
            self._chunks[batch] = chunks = Chunks(batch, self._matrices)
        addresses = np.array([[tensor.data_ptr() for tensor in column] for column in tensors], np.int64)
        like, memory = _TYPES[dtype], None
        if scratch:
            memory = self._memory(chunks.scratch, dtype, batch.alone)
            addresses = np.vstack((addresses, memory.data_ptr() + chunks.offsets * like.itemsize))
        return BoundLoops(chunks, np.ascontiguousarray(addresses.T), like, memory)

    def _memory(self, elements: int, dtype: torch.dtype, keep: bool) -> Tensor:
        """Memory for a run, with `keep` the same for all runs and updates, so that it is in the cache."""
        memory = self._scratch.get(dtype)
        if memory is None or not keep or len(memory) < elements:
            memory = torch.empty(elements, dtype=dtype)
            if keep:
                self._scratch[dtype] = memory
        return memory
