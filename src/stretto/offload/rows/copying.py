"""Copies of scattered rows between arrays in host memory: compiled where numba is, else numpy's own."""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

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
