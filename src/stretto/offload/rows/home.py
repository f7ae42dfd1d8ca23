"""Where all rows of a store are, with their states, when they are not in the cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from stretto.offload.rows.copying import Array, as_words, copy_rows, words
from stretto.offload.rows.store import StateSpec

_ALIGN = 8  # bytes that records are a multiple of


class Home:
    """Rows of a store in host memory or in a file that is mapped to it, all zeros at first.

    A row is a record: its weights, then its states. So what moves together lies together, in one page of a
    file mostly.

    Args:
        rows, width, dtype, states: as of the store.
    """

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, states: Mapping[str, StateSpec], pin: bool = False
    ) -> None:
        kinds = {"weight": StateSpec(False, dtype), **states}
        self.rows, self.width = rows, width
        self.shapes = {name: () if kind.per_row else (width,) for name, kind in kinds.items()}
        self.dtypes = {name: kind.dtype for name, kind in kinds.items()}
        self._spans = dict[str, tuple[int, int]]()
        size = 0
        for name in sorted(kinds, key=lambda name: -kinds[name].dtype.itemsize):  # each at its own multiple
            end = size + prod(self.shapes[name]) * self.dtypes[name].itemsize
            self._spans[name] = size, end
            size = end
        self.record = -(-size // _ALIGN) * _ALIGN
        self.memory = self._take(rows * self.record, pin)
        self._copy = copy_rows()

    def _take(self, size: int, pin: bool) -> Tensor:
        """uint8 [size], zeros."""
        return torch.zeros(size, dtype=torch.uint8, pin_memory=pin)

    def get(self, rows: Tensor, into: Mapping[str, Tensor], to: Tensor) -> None:
        """Rows [n] int64, each once, to rows `to` [n] of tensors on the CPU."""
        for ours, theirs in self._pairs(into):
            self._copy(theirs, to.numpy(), ours, rows.numpy())

    def put(self, rows: Tensor, source: Mapping[str, Tensor], where: Tensor) -> None:
        """Rows [n] int64, each once, from rows `where` [n] of tensors on the CPU."""
        for ours, theirs in self._pairs(source):
            self._copy(ours, rows.numpy(), theirs, where.numpy())

    def read(self, start: int, stop: int, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of rows [start, stop)."""
        return {name: self._view(name, start, stop).clone() for name in names}

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Set rows from `start` on."""
        for name, value in values.items():
            self._view(name, start, start + len(value)).copy_(value)

    def close(self) -> None:
        """Give back the memory."""
        self.memory = self.memory[:0]

    def _view(self, name: str, start: int, stop: int) -> Tensor:
        first, end = self._spans[name]
        records = self.memory[start * self.record : stop * self.record].view(stop - start, self.record)
        found = records[:, first:end].view(self.dtypes[name])
        return found if self.shapes[name] else found[:, 0]

    def _pairs(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Array, Array]]:
        """Of each tensor: its part of the records, and itself, in the same words."""
        for name, tensor in tensors.items():
            first, end = self._spans[name]
            word = words(first, end, self.record)
            size = word().itemsize
            records = as_words(self.memory.view(self.rows, self.record), word)
            yield records[:, first // size : end // size], as_words(tensor, word)
