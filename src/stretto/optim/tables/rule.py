"""What an update of embedding tables is: a rule for the rows that a step saw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from stretto.offload.rows.store import StateSpec


class TableRule(Protocol):
    """A rule. Its states begin as zeros.

    Attributes:
        row_statistic: it needs the mean of a row's squared gradient over all columns of the table, wherever
            they are.
    """

    name: str
    row_statistic: bool

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        """The states that a table of this type has."""
        ...

    def weight_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type that rows are looked up in, where the job's is `dtype`."""
        ...

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """`weight`, and states that are part of it, for rows of these values [rows, width]."""
        ...

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """The values [rows, width] of rows and their states."""
        ...

    def apply(
        self,
        weight: Tensor,
        states: dict[str, Tensor],
        slots: Tensor,
        gradient: Tensor,
        lr: float,
        mean_square: Tensor | None = None,
    ) -> None:
        """Update the rows at `slots` [u], each once, by their summed gradient [u, width], in place.

        Args:
            mean_square: [u], with `row_statistic`: of the whole row; None: `gradient` is the whole row.
        """
        ...
