"""A batch of a click log."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stretto.parallel.tables.jagged import Jagged


@dataclass
class ClickBatch:
    """Samples of a click log.

    Attributes:
        dense: [samples, numbers] float32, transformed.
        ids: the categorical features.
        labels: [samples] float32, 0 or 1.
    """

    dense: Tensor
    ids: Jagged
    labels: Tensor

    @property
    def samples(self) -> int:
        return self.labels.shape[0]

    def part(self, start: int, stop: int) -> ClickBatch:
        """Samples [start, stop)."""
        return ClickBatch(self.dense[start:stop], self.ids.part(start, stop), self.labels[start:stop])
