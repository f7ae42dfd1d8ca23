"""Stores of embedding rows with their optimiser states: the interface, and stores in device memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateSpec:
    """An optimiser state: one number per element, or per row."""

    per_row: bool
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class FetchedRows:
    """The rows of a batch, possibly still being copied to slots. `batch` is its number in a cache."""

    _slots: Tensor
    batch: int = 0
    _copies: Future[None] | None = None

    def slots(self) -> Tensor:
        """Wait for the copies, raise their errors, and return the slot of each requested row: [n] int64,
        index into the store's `weight` and `states`."""
        if self._copies is not None:
            self._copies.result()
        return self._slots


class RowStore(Protocol):
    """Rows of one width with their states. Kernels access `weight` and `states` by slot.

    A batch is fetched (possibly while the previous one computes), looked up, updated, and released. At most
    two batches are fetched and not released. A store may grow in `fetch`, so read `weight` and `states` from
    it only afterwards.
    """

    rows: int
    width: int
    weight: Tensor  # [slots, width]
    states: dict[str, Tensor]  # [slots, width], or [slots]

    def tensors(self) -> dict[str, Tensor]:
        """`weight` and each state by name."""
        ...

    def fetch(self, rows: Tensor) -> FetchedRows:
        """Start moving rows [n] (int64, in any order, with duplicates) to slots."""
        ...

    def release(self, fetched: FetchedRows) -> None:
        """End the use of these rows, which may then be evicted."""
        ...

    def read(self, start: int, stop: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return current values of rows [start, stop) on the CPU: all of `tensors`, or only `names`. They may
        be views, valid until the next batch. Call it between batches."""
        ...

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Set rows from `start` on; states without a value are unchanged. Call it between batches."""
        ...

    def close(self) -> None:
        """Free memory, threads and files."""
        ...


class DeviceStore:
    """All rows in device memory: a slot is a row."""

    def __init__(
        self,
        rows: int,
        width: int,
        dtype: torch.dtype,
        states: Mapping[str, StateSpec],
        device: torch.device | str = "cpu",
    ) -> None:
        self.rows, self.width = rows, width
        self.weight = torch.zeros(rows, width, dtype=dtype, device=device)
        self.states = {
            name: torch.zeros(rows if spec.per_row else (rows, width), dtype=spec.dtype, device=device)
            for name, spec in states.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight, **self.states}

    def fetch(self, rows: Tensor) -> FetchedRows:
        return FetchedRows(rows)

    def release(self, fetched: FetchedRows) -> None:
        pass

    def read(self, start: int, stop: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
        tensors = self.tensors()
        return {name: tensors[name][start:stop].cpu() for name in (tensors if names is None else names)}

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        tensors = self.tensors()
        for name, value in values.items():
            tensors[name][start : start + len(value)] = value

    def close(self) -> None:
        self.weight, self.states = self.weight[:0], {}


class GrowingStore(DeviceStore):
    """A `DeviceStore` that can grow, for hash tables. Its `capacity` is at least `rows` and doubles, so that
    growing row by row is cheap.
    """

    @property
    def capacity(self) -> int:
        """Rows that fit in the allocated memory."""
        return self.weight.shape[0]

    def grow(self, rows: int) -> None:
        """Grow to at least `rows` rows, the new ones zeros; may replace `weight` and `states`."""
        if rows > self.capacity:
            capacity = max(rows, 2 * self.capacity, 1024)
            longer = dict[str, Tensor]()
            for name, tensor in self.tensors().items():
                longer[name] = tensor.new_zeros(capacity, *tensor.shape[1:])
                longer[name][: len(tensor)] = tensor
            self.weight = longer.pop("weight")
            self.states.update(longer)
        self.rows = max(self.rows, rows)

    def set(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Set rows [n] to `weight` [n, width] and states by name; states without a value become zeros."""
        self.weight[rows] = values["weight"].to(self.weight)
        for name, state in self.states.items():
            state[rows] = values[name].to(state) if name in values else torch.zeros_like(state[:1])
