"""Where batches of clicks come from: files, or a stream that is computed."""

from __future__ import annotations

from typing import Protocol

from stretto.data.clicks.batch import ClickBatch


class ClickSource(Protocol):
    """Samples in an endless order, a function of the sample's number alone."""

    def __len__(self) -> int:
        """Samples in an epoch."""
        ...

    def batch(self, first: int, count: int, part: tuple[int, int] | None = None) -> ClickBatch:
        """Samples first, first + 1, ..., first + count - 1 of the order; with `part`, a rank's own of them.

        `part` is (start, stop) within the batch: samples first + start to first + stop - 1.
        """
        ...
