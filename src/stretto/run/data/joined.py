"""Several token sources of one tokenizer as one stream, in the order in which they are named."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.run.data.token_source import LazyArray, RemoteElements, TokenSource, check_boundaries
from stretto.run.data.tokenizer import Tokenizer


class JoinedArray:
    """Arrays one after another, read where they lie: of each the first `lengths[i]` elements, plus
    `shifts[i]`.

    Attributes:
        remote_bytes: of the files of all of them, as far as they are remote.
    """

    def __init__(self, parts: Sequence[LazyArray], lengths: Sequence[int], shifts: Sequence[int]) -> None:
        self._parts, self._shifts = parts, shifts
        self._bounds = [0, *accumulate(lengths)]
        self._starts = np.array(self._bounds, dtype=np.int64)
        self._remote = [part if isinstance(part, RemoteElements) else None for part in parts]
        self.remote_bytes = sum(part.remote_bytes for part in self._remote if part is not None)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            first, stop, step = key.indices(len(self))
            assert step == 1, "only runs are read"
            return self._run(first, max(first, stop))
        indices = np.asarray(key, dtype=np.int64)
        flat = np.where(indices < 0, indices + len(self), indices).ravel()
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < len(self):
            raise IndexError(f"{key} of {len(self)}")
        which = np.searchsorted(self._starts, flat, "right") - 1
        dtype = np.result_type(*(part[0:0].dtype for part in self._parts))
        values = np.empty(len(flat), dtype=dtype)
        for part in np.unique(which):
            here = which == part
            values[here] = self._parts[part][flat[here] - self._starts[part]] + self._shifts[part]
        return values.reshape(indices.shape) if indices.ndim else int(values[0])

    def need(self, runs: Sequence[range]) -> None:
        """As `RemoteElements.need`."""
        for part, inside in self._parted(runs):
            part.need(inside)

    def fetch_ahead(self, start: int, stop: int) -> None:
        """As `RemoteElements.fetch_ahead`."""
        for part, inside in self._parted([range(start, stop)]):
            part.fetch_ahead(inside[0].start, inside[0].stop)

    def _parted(self, runs: Sequence[range]) -> Iterator[tuple[RemoteElements, list[range]]]:
        """The remote parts with what of the runs lies in them."""
        for part, (start, end) in zip(self._remote, pairwise(self._bounds), strict=True):
            inside = [range(max(run.start, start) - start, min(run.stop, end) - start) for run in runs]
            if part is not None and (inside := [run for run in inside if run]):
                yield part, inside

    def stretch_bytes(self, length: int) -> int:
        """As `RemoteElements.stretch_bytes`."""
        return max((part.stretch_bytes(length) for part in self._remote if part is not None), default=0)

    def _run(self, first: int, stop: int) -> NDArray[Any]:
        pieces = list[NDArray[Any]]()
        part = max(0, min(bisect_right(self._bounds, first), len(self._parts)) - 1)
        while not pieces or self._bounds[part] < stop:  # an empty run has a type too
            start, end = self._bounds[part : part + 2]
            values: NDArray[Any] = self._parts[part][max(first, start) - start : min(stop, end) - start]
            pieces.append(values + self._shifts[part] if self._shifts[part] else values)
            part += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


class JoinedSource(TokenSource):
    """Token sources one after another: the documents of the first, then those of the second, ..."""

    def __init__(self, sources: Sequence[TokenSource]) -> None:
        """Join.

        Raises:
            StrettoError: sources of different tokenizers, or with a mask and without.
        """
        first = sources[0]
        for other in sources[1:]:
            if other.fingerprint == first.fingerprint:
                check_boundaries(first, other)
            else:
                raise StrettoError(
                    f"{first.name} and {other.name}: their tokens are not of one tokenizer",
                    hint="build both with the same --tokenizer",
                )
            if (other.mask is None) != (first.mask is None):
                raise StrettoError(
                    f"{first.name} and {other.name}: one holds conversations, the other text",
                    hint="join sources of one kind",
                )
        self.sources = list(sources)
        self.name = ", ".join(source.name for source in sources)
        self.vocab = max(source.vocab for source in sources)
        self.endoftext, self.begin_of_text = first.endoftext, first.begin_of_text
        self.fingerprint = first.fingerprint
        sizes = [source.size for source in sources]
        starts, none = [0, *accumulate(sizes)][:-1], [0] * len(sources)
        self.tokens = JoinedArray([source.tokens for source in sources], sizes, none)
        masks = [source.mask for source in sources if source.mask is not None]
        self.mask = JoinedArray(masks, sizes, none) if masks else None
        counts = [source.trained for source in sources if source.trained is not None]
        self.trained = sum(counts) if masks else None
        documents = [source.documents for source in sources]
        documents[-1] += 1  # the end of the last
        self.offsets = JoinedArray([source.offsets for source in sources], documents, starts)

    def __reduce__(self) -> tuple[object, ...]:
        return JoinedSource, (self.sources,)

    def tokenizer(self) -> Tokenizer:
        """As `TokenSource.tokenizer`."""
        return self.sources[0].tokenizer()

    def companions(self) -> dict[str, bytes]:
        """As `TokenSource.companions`."""
        return dict(self.sources[0].companions())
