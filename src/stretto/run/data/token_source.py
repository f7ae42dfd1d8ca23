"""What every source of tokens offers to training, evaluation and proof, whatever files hold it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

from stretto.errors import StrettoError
from stretto.run.data.boundaries import Boundaries
from stretto.run.data.tokenizer import Tokenizer

_COUNTED = 1 << 22  # tokens whose bytes are counted at a time


class LazyArray(Protocol):
    """A read-only array of one dimension, of which only what is indexed need be in memory."""

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
        remote_bytes: of the files that it lies in, as far as they are remote.
    """

    remote_bytes: int

    def need(self, runs: Sequence[range]) -> None:
        """Fetch what the cache lacks of runs of elements that are read next, several blocks at a time."""
        ...

    def fetch_ahead(self, start: int, stop: int) -> None:
        """Have elements that will be read soon fetched meanwhile."""
        ...

    def stretch_bytes(self, length: int) -> int:
        """Bytes in the cache that `length` neighbouring elements may take."""
        ...


class TokenData(ABC):
    """What a run is trained on: one stream of tokens, or a mixture of several.

    It is opened in the process that starts the ranks and reaches them by pickling: implementations define
    `__reduce__` so that a rank opens the files itself instead of receiving their content.

    Attributes:
        name: as messages call it, such as a path.
        vocab: size of the vocabulary; all ids are below it.
        endoftext: the id that ends a document; None where no tokenizer is known.
        begin_of_text: the id that begins a document, if one does.
        fingerprint: of the tokenizer; None where it is not known.
        trained: how many tokens the loss counts; None: all.
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
        """The streams that it is made of, by name."""

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
        """What tells these tokens from others wherever they lie; a checkpoint keeps it as JSON."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises:
            StrettoError: there is none, or another one.
        """

    def describe_boundaries(self) -> str | None:
        """How texts end and begin, in words; None if no tokenizer is known."""
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
        """Content of the files that generation and export need, by name: `tokenizer.json`, and
        `tokenizer_config.json` with its special tokens, and the chat template that rendered the tokens.
        """


def check_boundaries(source: TokenData, other: TokenData) -> None:
    """Raise StrettoError if the documents of both are known to end or begin with other tokens."""
    first, second = ((one.endoftext, one.begin_of_text) for one in (source, other))
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
        mask: uint8 [size], 1 where the loss counts the token; None: it counts all.
    """

    tokens: LazyArray
    offsets: LazyArray
    mask: LazyArray | None

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
        """Have runs of tokens, which are read next, here: nothing to do for files on this machine."""
        for array in self.cached:
            array.need(runs)

    @cached_property
    def cached(self) -> list[RemoteElements]:
        """Those of the arrays of ids and mask that are read over a network."""
        arrays = (self.tokens, self.mask)
        return [one for one in arrays if isinstance(one, RemoteElements) and one.remote_bytes]

    @property
    def padding(self) -> int:
        """The id at positions without a token, whose targets do not count."""
        return 0 if self.endoftext is None else self.endoftext

    def identity(self) -> dict[str, Any]:
        facts = {"tokens": self.size, "documents": self.documents}
        return facts if self.trained is None else {**facts, "trained": self.trained}

    def text_bytes(self, tokens: range) -> int | None:
        """Bytes in UTF-8 of the text of these tokens; None where no tokenizer is known.

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
