"""Batches of clicks, and the interface of their sources: files, or a synthetic stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stretto.recommender.tables.jagged import Jagged


@dataclass
class ClickBatch:
    """Samples of a click log.

    Attributes:
        dense: [samples, numbers] float32, transformed.
        ids: ids of the categorical features.
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


class ClickSource(Protocol):
    """Samples in an endless order; each is a function of its index alone."""

    def __len__(self) -> int:
        """Samples in an epoch."""
        ...

    def batch(self, first: int, count: int, part: tuple[int, int] | None = None) -> ClickBatch:
        """Return samples [first, first + count) of the order, or only a rank's `part` of them.

        `part` is (start, stop) within the batch: samples [first + start, first + stop).
        """
        ...
