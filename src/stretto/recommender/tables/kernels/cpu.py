"""Compiled, multithreaded embedding kernels on the CPU, and the choice of kernels for a device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.engine import loops
from stretto.recommender.tables.kernels.plain import Divided, Grouped, Kernels, sum_dtype, widened

Array = np.ndarray[Any, np.dtype[Any]]

_UINT16 = {torch.bfloat16: torch.uint16, torch.int16: torch.uint16}
_PARALLEL = 4096  # rows or bags from which on threads save more than they cost
_SORT_LIMIT = 1 << 32  # rows or lookups that a 64-bit key of the radix sort can distinguish


class CompiledKernels(Kernels):
    """Loops compiled by numba. Results do not depend on the number of threads."""

    def __init__(self) -> None:
        from stretto.recommender.tables.kernels import compiled

        self._compiled: Any = compiled
        self._buffers = threading.local()

    def lookup(
        self,
        weight: Tensor,
        rows: Tensor,
        offsets: Tensor,
        scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `Kernels.lookup`.

        Raises:
            IndexError, or in float32 RuntimeError: a row is out of range of `weight`.
        """
        dtype = dtype or sum_dtype(weight)
        floats = (torch.float32, torch.float64)
        compiled = dtype in floats and weight.dtype in (torch.bfloat16, *floats) and weight.is_contiguous()
        if not compiled or weight.dtype == dtype == torch.float32:
            # in float32 PyTorch calls FBGEMM's loop, which is 10% faster
            return super().lookup(weight, rows, offsets, scale, dtype)
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

        loops.in_parts(part, bags, _PARALLEL)
        return out

    def group(self, rows: Tensor, unique: int | None = None) -> Grouped:
        """See `Kernels.group`; a radix sort."""
        if not len(rows) or len(rows) >= _SORT_LIMIT:
            return super().group(rows)
        lowest, highest = (int(row) for row in torch.aminmax(rows))
        if highest - lowest >= _SORT_LIMIT:
            return super().group(rows)
        keys, scratch = (self._buffer(name, len(rows), np.dtype(np.uint64)) for name in ("keys", "scratch"))
        grouped = self._compiled.group(_flat(rows.to(torch.int64)), lowest, highest, keys, scratch)
        return Grouped(*map(torch.from_numpy, grouped))

    def segment_sum(
        self, gradient: Tensor, offsets: Tensor, grouped: Grouped, scale: Tensor | None = None
    ) -> Tensor:
        """See `Kernels.segment_sum`."""
        gradient = widened(gradient)
        out = torch.empty(len(grouped.rows), gradient.shape[1], dtype=gradient.dtype)
        lookups = self._lookups(gradient, offsets, grouped, scale)
        return self._by_row(self._compiled.segment_sum, out, gradient.shape[1], lookups)

    def squares(
        self, gradient: Tensor, offsets: Tensor, grouped: Grouped, scale: Tensor | None = None
    ) -> Tensor:
        """See `Kernels.squares`; the rows' gradients are not materialised."""
        gradient = widened(gradient)
        out = torch.empty(len(grouped.rows), dtype=gradient.dtype)
        lookups = self._lookups(gradient, offsets, grouped, scale)
        return self._by_row(self._compiled.squares, out, gradient.shape[1], lookups)

    def update(
        self,
        rule: str,
        options: tuple[float, ...],
        weight: Tensor,
        states: Sequence[Tensor],
        grouped: Grouped,
        offsets: Tensor,
        gradient: Tensor,
        scale: Tensor | None = None,
        mean_square: Tensor | None = None,
    ) -> None:
        """Sum the gradient of each row and apply an optimiser, fused: row gradients are not materialised.

        Args:
            rule: name of a function in `compiled`, which takes `options` and `states`.
        """
        if len(grouped.rows) and not 0 <= int(grouped.rows[0]) <= int(grouped.rows[-1]) < len(weight):
            raise IndexError(f"rows {int(grouped.rows[0])} to {int(grouped.rows[-1])} of {len(weight)}")
        lookups = self._lookups(gradient, offsets, grouped, scale, mean_square)
        call = getattr(self._compiled, rule)
        arguments = (_flat(weight), tuple(map(_flat, states)), np.uint64(weight.shape[1]))
        rows = _flat(grouped.rows)

        def part(first: int, last: int) -> None:
            call(*arguments, rows, lookups, options, first, last)

        loops.in_parts(part, len(rows), _PARALLEL)

    def divide(self, rows: Tensor, offsets: Tensor, parts: int) -> Divided:
        """See `Kernels.divide`."""
        _check(offsets, len(rows))
        order, local_rows = torch.empty_like(rows), torch.empty_like(rows)
        lengths = torch.zeros(parts, len(offsets) - 1, dtype=torch.int64)
        starts = torch.zeros(parts, dtype=torch.int64)
        tensors = (rows, offsets, order, local_rows, lengths, starts)
        flat = [_flat(tensor).view(np.uint64) for tensor in tensors]
        self._compiled.divide(*flat[:2], np.uint64(parts), *flat[2:])
        return Divided(order, local_rows, lengths)

    def initial(self, out: Tensor, rows: Tensor, columns: Tensor, key: int, bound: float) -> None:
        """Fill `out` [n, width] with initial values; see `initial_rows`. columns: [width] int64 hashes."""
        flat, row_ids = _flat(out), _flat(rows.to(torch.int64)).view(np.uint64)
        arguments, width = (_flat(columns).view(np.uint64), np.uint64(key), bound), out.shape[1]

        def part(first: int, last: int) -> None:
            self._compiled.initial(flat[first * width : last * width], row_ids[first:last], *arguments)

        loops.in_parts(part, len(rows), _PARALLEL)

    def _by_row(self, kernel: Any, out: Tensor, width: int, lookups: Any) -> Tensor:
        """Fill `out` [u, ...] row by row."""
        flat, columns = _flat(out), np.uint64(width)
        loops.in_parts(lambda first, last: kernel(flat, columns, lookups, first, last), len(out), _PARALLEL)
        return out

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
            raise IndexError(f"gradients of {len(gradient)} bags for {len(offsets) - 1} bags")
        bag_offsets = self._buffer("bag_offsets", len(grouped.order), np.dtype(np.int64))
        self._compiled.fill_bag_offsets(_flat(offsets), np.uint64(gradient.shape[1]), bag_offsets)
        empty = np.empty(0, np.float64 if gradient.dtype == torch.float64 else np.float32)
        return self._compiled.Lookups(
            _flat(gradient.contiguous()),
            bag_offsets,
            _flat(grouped.order),
            _flat(grouped.starts),
            empty if scale is None else _flat(scale.to(gradient.dtype)),
            empty if mean_square is None else _flat(mean_square.to(gradient.dtype)),
        )

    def _buffer(self, name: str, count: int, kind: np.dtype[Any]) -> Array:
        """Return a scratch buffer of this thread, reused between calls: page faults of a new buffer at every
        step cost more than the loops."""
        buffer: Array | None = getattr(self._buffers, name, None)
        if buffer is None or len(buffer) < count:
            buffer = np.empty(count, kind)
            setattr(self._buffers, name, buffer)
        return buffer[:count]


def _check(offsets: Tensor, lookups: int) -> None:
    """Check that offsets match the lookups: compiled loops have no bounds checks."""
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != lookups:
        raise IndexError(f"the offsets of bags must go from 0 to {lookups}, the number of lookups")


def _flat(tensor: Tensor) -> Array:
    """View a tensor's memory as a flat array; 16-bit types as uint16."""
    view_dtype = _UINT16.get(tensor.dtype)
    flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().contiguous().view(-1)
    return (flat if view_dtype is None else flat.view(view_dtype)).numpy()


def kernels_for(device: torch.device | str, dtype: torch.dtype | None = None) -> Kernels:
    """Return the fastest kernels for tables of `dtype` on `device`: compiled ones on the CPU in float32 and
    float64 if numba is installed, otherwise PyTorch's. Their results agree up to rounding."""
    wide = dtype in (None, torch.float32, torch.float64)
    return (
        CompiledKernels() if torch.device(device).type == "cpu" and wide and loops.has_numba() else Kernels()
    )
