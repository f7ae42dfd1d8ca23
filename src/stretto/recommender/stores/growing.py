"""A store in the device's memory that grows: of a hash table's rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stretto.recommender.stores.store import DeviceStore, StateSpec


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
