"""A store in the device's memory that grows: of a hash table's rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateSpec:
    """A state of the optimiser: of each element, or one number for each row."""

    per_row: bool
    dtype: torch.dtype


class Fetched(Protocol):
    """Rows that are on their way to where kernels can use them."""

    def slots(self) -> Tensor:
        """[n] int64: where in the store's `weight` and `states` each row is that was asked for. Waits."""
        ...


class RowStore(Protocol):
    """Rows of one width with their states. Kernels work on `weight` and `states`, by slot.

    A batch is fetched (perhaps while the one before it computes), looked up, updated, and released. At most
    two batches are fetched and not released. A store that must grow does so in `fetch`: who works on `weight`
    and `states` takes them from the store after it.
    """

    rows: int
    width: int
    weight: Tensor  # [slots, width]
    states: dict[str, Tensor]  # [slots, width], or [slots]

    def fetch(self, rows: Tensor) -> Fetched:
        """Begin to bring rows [n] (int64, in any order, some perhaps twice) to slots."""
        ...

    def release(self, fetched: Fetched) -> None:
        """The update with these rows is done: they may go."""
        ...

    def read(self, start: int, stop: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Rows [start, stop), newest values, on the CPU: `weight` and each state by name, or those of `names`
        alone. Perhaps views: good until the next batch. Between batches.
        """
        ...

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Set rows from `start` on; what is not named stays. Between batches."""
        ...

    def close(self) -> None:
        """Give back memory, threads and files."""
        ...


@dataclass
class _Here:
    rows: Tensor

    def slots(self) -> Tensor:
        return self.rows


class DeviceStore:
    """All rows in the device's memory: a slot is a row."""

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

    def fetch(self, rows: Tensor) -> _Here:
        return _Here(rows)

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
    """As DeviceStore, with `rows` that may grow. Memory is doubled, so that growing one by one costs little;
    what is asked for is `rows`, what is there `capacity`.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        dtype: torch.dtype,
        states: Mapping[str, StateSpec],
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(rows, width, dtype, states, device)

    @property
    def capacity(self) -> int:
        """Rows that there is memory for."""
        return self.weight.shape[0]

    def grow(self, rows: int) -> None:
        """At least `rows` rows; new ones are zeros. `weight` and `states` may be other tensors then."""
        if rows > self.capacity:
            room = max(rows, 2 * self.capacity, 1024)
            self.weight = _longer(self.weight, room)
            for name in self.states:
                self.states[name] = _longer(self.states[name], room)
        self.rows = max(self.rows, rows)

    def set(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Set rows [n] by `weight` [n, width], and states by name; states not named become zeros."""
        self.weight[rows] = values["weight"].to(self.weight)
        for name, state in self.states.items():
            state[rows] = values[name].to(state) if name in values else torch.zeros_like(state[:1])


def _longer(tensor: Tensor, rows: int) -> Tensor:
    longer = tensor.new_zeros(rows, *tensor.shape[1:])
    longer[: tensor.shape[0]] = tensor
    return longer
