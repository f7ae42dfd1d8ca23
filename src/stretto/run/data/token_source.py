"""Sources of tokens as training, evaluation and proof see them, whatever files hold the tokens; and several
sources of one tokenizer as one stream, in the order in which they are named.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.run.data.boundaries import Boundaries
from stretto.run.data.tokenizer import Tokenizer

_COUNTED = 1 << 22  # tokens whose bytes are counted at a time


class LazyArray(Protocol):
    """A read-only array of one dimension, of which only the indexed part need be in memory."""

    def __len__(self) -> int:
        """Elements."""
        ...

    def __getitem__(self, key: Any, /) -> Any:
        """One element for an int; an ndarray for a slice or an int64 ndarray of any shape."""
        ...


@runtime_checkable
class RemoteElements(LazyArray, Protocol):
    """An array that is read by blocks over a network, through a cache on the disk.

    Attributes:
        remote_bytes: size of its remote files.
    """

    remote_bytes: int

    def need(self, runs: Sequence[range]) -> None:
        """Fetch what the cache lacks of runs of elements that are read next, several blocks at a time."""
        ...

    def fetch_ahead(self, start: int, stop: int) -> None:
        """Fetch elements that will be read soon in the background."""
        ...

    def stretch_bytes(self, length: int) -> int:
        """Return the bytes of the cache that `length` neighbouring elements may take."""
        ...


class TokenData(ABC):
    """The training data of a run: one stream of tokens, or a mixture of several.

    It is opened in the process that starts the ranks and reaches them by pickling: implementations define
    `__reduce__` so that a rank opens the files itself instead of receiving their content.

    Attributes:
        name: name in messages, such as a path.
        vocab: size of the vocabulary; all ids are below it.
        endoftext: the id that ends a document, or None if no tokenizer is known.
        begin_of_text: the id that begins a document, or None.
        fingerprint: fingerprint of the tokenizer, or None if it is unknown.
        trained: number of tokens that the loss counts, or None for all.
    """

    name: str
    vocab: int
    endoftext: int | None
    begin_of_text: int | None
    fingerprint: str | None
    trained: int | None

    @property
    @abstractmethod
    def streams(self) -> Mapping[str, TokenSource]:
        """The streams that it consists of, by name."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Tokens."""

    @property
    @abstractmethod
    def documents(self) -> int:
        """Documents."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what distinguishes these tokens from others, wherever they lie, for checkpoints (JSON)."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the tokens.

        Raises:
            StrettoError: there is none, or another one.
        """

    def describe_boundaries(self) -> str | None:
        """Describe how texts end and begin; None if no tokenizer is known."""
        if self.endoftext is None:
            return None
        ids, texts = Boundaries(self.endoftext, self.begin_of_text), dict[int, str]()
        try:
            tokenizer = self.tokenizer()
        except StrettoError:  # their ids suffice: training needs no tokenizer
            return ids.describe()
        for token in (ids.end, ids.begin):
            texts |= {} if token is None else {token: tokenizer.text_of(token)}
        return ids.describe(texts)

    @abstractmethod
    def companions(self) -> Mapping[str, bytes]:
        """Return the content of the files that generation and export need, by name: `tokenizer.json`, and
        `tokenizer_config.json` with its special tokens, and the chat template that rendered the tokens.
        """


def check_boundaries(source: TokenData, other: TokenData) -> None:
    """Raise StrettoError if the documents of both are known to end or begin with other tokens."""
    first, second = ((each.endoftext, each.begin_of_text) for each in (source, other))
    if None not in (first[0], second[0]) and first != second:
        raise StrettoError(
            f"{source.name} and {other.name}: documents of one have other ends or beginnings:"
            f" {source.describe_boundaries()}, and {other.describe_boundaries()}",
            hint="build both with the same --tokenizer, --end-of-text and --begin-of-text",
        )


class TokenSource(TokenData):
    """A stream of tokens, cut into documents.

    Attributes:
        tokens: ids [size].
        offsets: int64 [documents + 1]; document i is `tokens[offsets[i]:offsets[i + 1]]`.
        mask: uint8 [size], 1 if the loss counts the token; None if it counts all.
        named_splits: number of tokens and files, as printed, of train, valid and test, which follow one
            another, if they are kept apart by the names of files; else empty.
    """

    tokens: LazyArray
    offsets: LazyArray
    mask: LazyArray | None
    named_splits: Mapping[str, tuple[int, str]] = {}

    @property
    def streams(self) -> Mapping[str, TokenSource]:
        return {self.name: self}

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    def need(self, runs: Sequence[range]) -> None:
        """Fetch runs of tokens that are read next: nothing to do for files on this machine."""
        for array in self.cached:
            array.need(runs)

    @cached_property
    def cached(self) -> list[RemoteElements]:
        """The arrays of ids and mask that are read over a network."""
        arrays = (self.tokens, self.mask)
        return [array for array in arrays if isinstance(array, RemoteElements) and array.remote_bytes]

    @property
    def padding(self) -> int:
        """The id at positions without a token, whose targets do not count."""
        return 0 if self.endoftext is None else self.endoftext

    def identity(self) -> dict[str, Any]:
        counts = {"tokens": self.size, "documents": self.documents}
        return counts if self.trained is None else {**counts, "trained": self.trained}

    def text_bytes(self, tokens: range) -> int | None:
        """Return the bytes in UTF-8 of the text of some tokens, or None if no tokenizer is known.

        Raises:
            StrettoError: as `tokenizer`.
        """
        if self.fingerprint is None:
            return None
        tokenizer = self.tokenizer()
        if tokenizer.token_bytes is not None:
            cuts = [*range(tokens.start, tokens.stop, _COUNTED), tokens.stop]
        else:  # decoded document by document, as other tokenizers treat the first token in a way of its own
            first, last = bisect_right(self.offsets, tokens.start), bisect_left(self.offsets, tokens.stop)
            cuts = [tokens.start, *map(int, self.offsets[first:last]), tokens.stop]
        return sum(tokenizer.text_bytes(self.tokens[a:b]) for a, b in pairwise(cuts) if a < b)


class JoinedArray:
    """Arrays one after another, without a copy: the first `lengths[i]` elements of each, plus `shifts[i]`.

    Attributes:
        remote_bytes: size of all remote files.
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
            inside = which == part
            values[inside] = self._parts[part][flat[inside] - self._starts[part]] + self._shifts[part]
        return values.reshape(indices.shape) if indices.ndim else int(values[0])

    def need(self, runs: Sequence[range]) -> None:
        """See `RemoteElements.need`."""
        for part, inside in self._parted(runs):
            part.need(inside)

    def fetch_ahead(self, start: int, stop: int) -> None:
        """See `RemoteElements.fetch_ahead`."""
        for part, inside in self._parted([range(start, stop)]):
            part.fetch_ahead(inside[0].start, inside[0].stop)

    def _parted(self, runs: Sequence[range]) -> Iterator[tuple[RemoteElements, list[range]]]:
        """Yield the remote parts with the runs inside them."""
        for part, (start, end) in zip(self._remote, pairwise(self._bounds), strict=True):
            inside = [range(max(run.start, start) - start, min(run.stop, end) - start) for run in runs]
            if part is not None and (inside := [run for run in inside if run]):
                yield part, inside

    def stretch_bytes(self, length: int) -> int:
        """See `RemoteElements.stretch_bytes`."""
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

    def __init__(
        self, sources: Sequence[TokenSource], named_splits: Mapping[str, tuple[int, str]] | None = None
    ) -> None:
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
        self.named_splits = named_splits or {}
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
        return JoinedSource, (self.sources, self.named_splits)

    def tokenizer(self) -> Tokenizer:
        """As `TokenSource.tokenizer`."""
        return self.sources[0].tokenizer()

    def companions(self) -> dict[str, bytes]:
        """As `TokenSource.companions`."""
        return dict(self.sources[0].companions())
