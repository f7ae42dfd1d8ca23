"""Samples of the next step, read by a thread while the current one computes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

B = TypeVar("B", covariant=True)


class Batched(Protocol[B]):
    """Samples by index, such as `dataset.WindowSamples`."""

    def batch(self, indices: Sequence[int]) -> B:
        """Return several samples."""
        ...


class Prefetcher(Generic[B]):
    """The same samples, of which those `stride` further on are read before they are requested.

    Any samples may be requested at any time; only those that follow at the stride come without a wait. Errors
    of the thread are raised when the samples are requested.
    """

    def __init__(self, samples: Batched[B], stride: int) -> None:
        """Read ahead by `stride` samples: those of a step, over all replicas."""
        self._samples, self._stride = samples, stride
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self._pending = dict[range, Future[B]]()

    def batch(self, indices: Sequence[int]) -> B:
        """Return the samples of a range of indices."""
        assert isinstance(indices, range)
        pending = self._pending.pop(indices, None)
        window = range(indices.start, indices.start + 2 * self._stride)
        for other in [pending for pending in self._pending if pending.start not in window]:
            self._pending.pop(other).cancel()  # the position has moved
        batch = self._samples.batch(indices) if pending is None else pending.result()
        later = range(indices.start + self._stride, indices.stop + self._stride)
        self._pending[later] = self._thread.submit(self._samples.batch, later)
        return batch

    def close(self) -> None:
        """Stop the thread; what it has read is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)
