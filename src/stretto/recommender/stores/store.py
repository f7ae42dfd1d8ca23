"""Stores of embedding rows with their optimiser states: the interface, and stores in device memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateSpec:
    """An optimiser state: one number per element, or per row."""

    per_row: bool
    dtype: torch.dtype


class Fetched(Protocol):
    """Rows that are being made accessible to kernels."""

    def slots(self) -> Tensor:
        """[n] int64, where each requested row is in the store's `weight` and `states`. Waits."""
        ...


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

    def fetch(self, rows: Tensor) -> Fetched:
        """Starts moving rows [n] (int64, in any order, with duplicates) to slots."""
        ...

    def release(self, fetched: Fetched) -> None:
        """Ends the use of these rows, which may then be evicted."""
        ...

    def read(self, start: int, stop: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Current values of rows [start, stop) on the CPU: `weight` and each state by name, or only `names`.
        Possibly views, valid until the next batch. Call it between batches.
        """
        ...

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Sets rows from `start` on; states without a value are kept. Call it between batches."""
        ...

    def close(self) -> None:
        """Frees memory, threads and files."""
        ...


@dataclass
class _Ready:
    rows: Tensor

    def slots(self) -> Tensor:
        return self.rows


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

    def fetch(self, rows: Tensor) -> _Ready:
        return _Ready(rows)

    def release(self, fetched: object) -> None:
        pass

    def read(self, start: int, stop: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
        held = {"weight": self.weight} | self.states
        return {name: held[name][start:stop].cpu() for name in (held if names is None else names)}

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            (self.weight if name == "weight" else self.states[name])[start : start + len(value)] = value

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
        """Grows to at least `rows` rows, the new ones zeros; may replace `weight` and `states`."""
        if rows > self.capacity:
            capacity = max(rows, 2 * self.capacity, 1024)
            self.weight = _longer(self.weight, capacity)
            for name in self.states:
                self.states[name] = _longer(self.states[name], capacity)
        self.rows = max(self.rows, rows)

    def set(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Sets rows [n] to `weight` [n, width] and states by name; states without a value become zeros."""
        self.weight[rows] = values["weight"].to(self.weight)
        for name, state in self.states.items():
            state[rows] = values[name].to(state) if name in values else torch.zeros_like(state[:1])


def _longer(tensor: Tensor, rows: int) -> Tensor:
    longer = tensor.new_zeros(rows, *tensor.shape[1:])
    longer[: tensor.shape[0]] = tensor
    return longer
