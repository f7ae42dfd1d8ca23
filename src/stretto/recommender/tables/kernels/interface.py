"""Interface of the kernels of embedding tables."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from stretto.recommender.tables.kernels.plain import Divided, Grouped


class Kernels(Protocol):
    """Lookups and sums of rows; `stretto.recommender.tables.kernels.plain` says what each does."""

    def lookup(
        self,
        weight: Tensor,
        rows: Tensor,
        offsets: Tensor,
        scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor: ...

    def group(self, rows: Tensor) -> Grouped: ...

    def segment_sum(
        self, gradient: Tensor, offsets: Tensor, grouped: Grouped, scale: Tensor | None = None
    ) -> Tensor: ...

    def squares(
        self, gradient: Tensor, offsets: Tensor, grouped: Grouped, scale: Tensor | None = None
    ) -> Tensor: ...

    def divide(self, rows: Tensor, offsets: Tensor, parts: int) -> Divided: ...
