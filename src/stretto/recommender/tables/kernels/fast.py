"""Lookups, sums and updates on the CPU by compiled loops, over the threads that torch may use."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.recommender.tables.kernels import plain
from stretto.recommender.tables.kernels.plain import Divided, Grouped

Array = np.ndarray[Any, np.dtype[Any]]

_WORDS = {torch.bfloat16: torch.uint16, torch.int16: torch.uint16}
_SMALL = 4096  # rows, bags: below, threads cost more than they save
_MOST = 1 << 32  # rows and lookups that one word of the sort can tell apart


class CompiledKernels:
    """As `kernels.interface`; needs numba. Results do not depend on the number of threads."""

    def __init__(self) -> None:
        from stretto.recommender.tables.kernels import compiled

        self._compiled: Any = compiled
        self._initial: Any = compiled.initial
        self._divide: Any = compiled.divide
        self._kept = threading.local()

    def lookup(
        self,
        weight: Tensor,
        rows: Tensor,
        offsets: Tensor,
        scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As `plain.lookup`.

        Raises:
            IndexError, or for float32 RuntimeError: a row that `weight` does not have.
        """
        if dtype is None:
            dtype = torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype
        if not weight.is_contiguous() or weight.dtype == dtype == torch.float32 or not _known(weight, dtype):
            # in float32 that is FBGEMM's loop, which torch has inside, and 10% faster than ours
            return plain.lookup(weight, rows, offsets, scale, dtype)
        bags, width = len(offsets) - 1, weight.shape[1]
        _check(offsets, len(rows))
        out = torch.empty(bags, width, dtype=dtype)
        scales = np.empty(0, np.float32) if scale is None else _flat(scale.to(dtype))
        arguments = (_flat(weight), np.uint64(width), np.uint64(len(weight)))
        arguments += (_flat(rows), _flat(offsets), scales, _flat(out))

        def part(first: int, last: int) -> None:
            wrong = self._compiled.lookup(*arguments, first, last)
            if wrong >= 0:
                raise IndexError(f"row {int(rows[wrong])} of {len(weight)}")

        _in_parts(part, bags)
        return out

    def group(self, rows: Tensor) -> Grouped:
        """As `plain.group`, by a radix sort."""
        if not len(rows) or len(rows) >= _MOST:
            return plain.group(rows)
        least, most = (int(x) for x in torch.aminmax(rows))
        if most - least >= _MOST:
            return plain.group(rows)
        words, others = (self._room(name, len(rows), np.dtype(np.uint64)) for name in ("words", "others"))
        grouped = self._compiled.group(_flat(rows.to(torch.int64)), least, most, words, others)
        return Grouped(*map(torch.from_numpy, grouped))

    def segment_sum(
        self, gradient: Tensor, offsets: Tensor, grouped: Grouped, scale: Tensor | None = None
    ) -> Tensor:
        """As `plain.segment_sum`."""
        gradient = plain.widened(gradient)
        out = torch.empty(len(grouped.rows), gradient.shape[1], dtype=gradient.dtype)
        self._over_rows(
            call=self._compiled.segment_sum,
            out=out,
            gradient=gradient,
            offsets=offsets,
            grouped=grouped,
            scale=scale,
        )
        return out

    def squares(
        self, gradient: Tensor, offsets: Tensor, grouped: Grouped, scale: Tensor | None = None
    ) -> Tensor:
        """As `plain.squares`, without the gradients of rows in memory."""
        gradient = plain.widened(gradient)
        out = torch.empty(len(grouped.rows), dtype=gradient.dtype)
        self._over_rows(
            call=self._compiled.squares,
            out=out,
            gradient=gradient,
            offsets=offsets,
            grouped=grouped,
            scale=scale,
        )
        return out

    def update(
        self,
        rule: str,
        numbers: tuple[float, ...],
        weight: Tensor,
        states: Sequence[Tensor],
        grouped: Grouped,
        offsets: Tensor,
        gradient: Tensor,
        scale: Tensor | None = None,
        mean_square: Tensor | None = None,
    ) -> None:
        """Sum and apply a rule row by row: nothing of all rows' size is made.

        Args:
            rule: name of a function in `compiled`; `numbers` and `states` are what it takes.
        """
        if len(grouped.rows) and not 0 <= int(grouped.rows[0]) <= int(grouped.rows[-1]) < len(weight):
            raise IndexError(f"rows {int(grouped.rows[0])} to {int(grouped.rows[-1])} of {len(weight)}")
        of = self._lookups(gradient, offsets, grouped, scale, mean_square)
        call = getattr(self._compiled, rule)
        arguments = (_flat(weight), tuple(map(_flat, states)), np.uint64(weight.shape[1]))
        rows = _flat(grouped.rows)
        _in_parts(lambda first, last: call(*arguments, rows, of, numbers, first, last), len(rows))

    def divide(self, rows: Tensor, offsets: Tensor, parts: int) -> Divided:
        """As `plain.divide`."""
        _check(offsets, len(rows))
        order, own = torch.empty_like(rows), torch.empty_like(rows)
        lengths = torch.zeros(parts, len(offsets) - 1, dtype=torch.int64)
        arrays = (rows, offsets), (order, own, lengths, torch.zeros(parts, dtype=torch.int64))
        given, made = ([_flat(each).view(np.uint64) for each in of] for of in arrays)
        self._divide(*given, np.uint64(parts), *made)
        return Divided(order, own, lengths)

    def initial(self, out: Tensor, rows: Tensor, columns: Tensor, key: int, bound: float) -> None:
        """Initial values into `out` [n, width]; see `initial.initial_rows`. columns: [width] int64, mixed."""
        flat, numbers = _flat(out), _flat(rows.to(torch.int64)).view(np.uint64)
        arguments, width = (_flat(columns).view(np.uint64), np.uint64(key), bound), out.shape[1]

        def part(first: int, last: int) -> None:
            self._initial(flat[first * width : last * width], numbers[first:last], *arguments)

        _in_parts(part, len(rows))

    def _over_rows(
        self,
        call: Any,
        out: Tensor,
        gradient: Tensor,
        offsets: Tensor,
        grouped: Grouped,
        scale: Tensor | None,
    ) -> None:
        of, width = self._lookups(gradient, offsets, grouped, scale), np.uint64(gradient.shape[1])
        _in_parts(lambda first, last: call(_flat(out), width, of, first, last), len(grouped.rows))

    def _lookups(
        self,
        gradient: Tensor,
        offsets: Tensor,
        grouped: Grouped,
        scale: Tensor | None,
        mean_square: Tensor | None = None,
    ) -> Any:
        _check(offsets, len(grouped.order))
        if len(gradient) != len(offsets) - 1:
            raise IndexError(f"gradients of {len(gradient)} bags, where there are {len(offsets) - 1}")
        where = self._room("where", len(grouped.order), np.dtype(np.int64))
        self._compiled.spread(_flat(offsets), np.uint64(gradient.shape[1]), where)
        none = np.empty(0, np.float64 if gradient.dtype == torch.float64 else np.float32)
        return self._compiled.Lookups(
            _flat(gradient.contiguous()),
            where,
            _flat(grouped.order),
            _flat(grouped.starts),
            none if scale is None else _flat(scale.to(gradient.dtype)),
            none if mean_square is None else _flat(mean_square.to(gradient.dtype)),
        )

    def _room(self, name: str, count: int, kind: np.dtype[Any]) -> Array:
        """Memory of this thread to work in, kept: pages that are new in each step cost more than the work."""
        room: Array | None = getattr(self._kept, name, None)
        if room is None or len(room) < count:
            room = np.empty(count, kind)
            setattr(self._kept, name, room)
        return room[:count]


def _check(offsets: Tensor, lookups: int) -> None:
    """Compiled loops do not look where they read."""
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != lookups:
        raise IndexError(f"offsets of bags must go from 0 to {lookups}, the number of lookups")


def _known(weight: Tensor, dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64) and (
        weight.dtype == torch.bfloat16 or weight.dtype in (torch.float32, torch.float64)
    )


def _flat(tensor: Tensor) -> Array:
    """The same memory as one run of numbers; 16-bit words as uint16."""
    word = _WORDS.get(tensor.dtype)
    flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().contiguous().view(-1)
    return (flat if word is None else flat.view(word)).numpy()


def _in_parts(call: Callable[[int, int], None], count: int) -> None:
    """`call(first, last)` for parts of [0, count), each on a thread of its own."""
    threads = torch.get_num_threads()
    if threads == 1 or count < _SMALL:
        call(0, count)
        return
    edges = [count * i // threads for i in range(threads + 1)]
    pool = _threads(os.getpid(), threads - 1)
    others = [pool.submit(call, *each) for each in pairwise(edges[1:])]
    call(edges[0], edges[1])
    for other in others:
        other.result()


@cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Of this process: those of one it was forked from are not there."""
    return ThreadPoolExecutor(count, "table-rows")
