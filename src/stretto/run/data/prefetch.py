"""Samples of the next step, read by a thread while this one computes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

B = TypeVar("B", covariant=True)


class Batched(Protocol[B]):
    """Samples by index."""

    def batch(self, indices: Sequence[int]) -> B:
        """Of several samples."""
        ...


class Prefetcher(Generic[B]):
    """The same samples, of which those `stride` further on are read before they are taken.

    Any samples may be taken at any time; only those that follow at the stride come without a wait. What goes
    wrong in the thread is raised where the samples are taken.
    """

    def __init__(self, samples: Batched[B], stride: int) -> None:
        """Read ahead by `stride` samples: those of a step, over all replicas."""
        self._samples, self._stride = samples, stride
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self._coming = dict[range, Future[B]]()

    def batch(self, indices: Sequence[int]) -> B:
        """The samples of a range of indices."""
        assert isinstance(indices, range)
        coming = self._coming.pop(indices, None)
        near = range(indices.start, indices.start + 2 * self._stride)
        for other in [one for one in self._coming if one.start not in near]:  # the position has moved
            self._coming.pop(other).cancel()
        batch = self._samples.batch(indices) if coming is None else coming.result()
        later = range(indices.start + self._stride, indices.stop + self._stride)
        self._coming[later] = self._thread.submit(self._samples.batch, later)
        return batch

    def close(self) -> None:
        """Stop the thread; what it has read is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)
