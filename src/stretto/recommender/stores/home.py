"""Where all rows of a store are, with their states, when they are not in the cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from math import prod
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from stretto.recommender.stores.store import StateSpec

Array = np.ndarray[Any, np.dtype[Any]]

_WORDS = (np.int64, np.int32, np.int16, np.int8)


class CopyRows(Protocol):
    """A way to copy. May run in several threads at once."""

    def __call__(self, target: Array, to: Array, source: Array, rows: Array) -> None:
        """target[to[i]] = source[rows[i]] for all i.

        Args:
            target, source: [any, words] of one integer type.
            to, rows: [n] int64, no row of `to` twice.
        """
        ...


def words(*sizes: int) -> type[np.signedinteger[Any]]:
    """The widest integer that divides all sizes in bytes."""
    return next(word for word in _WORDS if all(size % word().itemsize == 0 for size in sizes))


def as_words(tensor: Tensor, word: type[np.signedinteger[Any]]) -> Array:
    """Rows of a contiguous tensor on the CPU as integers: [rows, words], the same memory."""
    rows = tensor.detach().view(-1).view(torch.uint8)
    return rows.numpy().view(word).reshape(len(tensor), -1)


@cache
def copy_rows() -> CopyRows:
    """The fastest way that this installation has."""
    try:
        import numba
    except ImportError:
        return plain
    njit = cast(Any, numba).njit
    try:
        return njit(nogil=True, cache=True)(_loop)
    except RuntimeError:  # no folder that what is compiled can be kept in
        return njit(nogil=True)(_loop)


def plain(target: Array, to: Array, source: Array, rows: Array) -> None:
    """As numpy does it."""
    target[to] = source[rows]


def _loop(target: Array, to: Array, source: Array, rows: Array) -> None:
    for i in range(len(to)):
        there, here = to[i], rows[i]
        for word in range(source.shape[1]):
            target[there, word] = source[here, word]


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
