"""Text to tokens and back: byte-level BPE, trained and run by the `tokenizers` library.

Byte-level BPE as in GPT-2 (Radford et al. 2019, section 2.2): every byte is a token to begin with, so any
text can be written and nothing is unknown.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from stretto.errors import StrettoError
from stretto.run.data.boundaries import (
    END,
    Boundaries,
    Boundary,
    ModelFiles,
    find_boundaries,
    find_token,
    token_number,
    tokenizer_config,
)
from stretto.run.data.cuts import ExactCuts
from stretto.run.data.rank_files import END_OF_TEXT
from stretto.run.data.tokenizer_files import TokenizerPath, library_errors, parse_tokenizer, read_tokenizer

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_BATCH_CHARACTERS = 2 << 20
SMALLEST_VOCAB = 257
"""256 bytes and the end of text."""

T = TypeVar("T")


class Tokenizer:
    """A tokenizer, and the tokens that end and begin a text.

    `vocab_size` is one more than the largest id, `fingerprint` a digest of everything that decides how text
    becomes tokens.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        boundaries: Boundaries | Callable[[tokenizers.Tokenizer], Boundaries] | None = None,
        name: str = "tokenizer",
    ) -> None:
        """Wrap a tokenizer with the boundaries of its texts, or a function that finds them on first use; None
        for those that the tokenizer itself names.
        """
        inner.no_truncation()
        inner.no_padding()
        # Text that spells a special token is text: only this code puts one into the stream.
        inner.encode_special_tokens = True
        self._inner, self.name = inner, name
        self._boundaries = boundaries
        self._text = inner.to_str(pretty=True)
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint: str = hashlib.blake2b(self._text.encode(), digest_size=16).hexdigest()

    @classmethod
    def load(
        cls,
        path: TokenizerPath,
        *,
        chat: bool = False,
        end: Boundary | None = None,
        begin: Boundary | None = None,
    ) -> Tokenizer:
        """Read a tokenizer of any kind that `read_tokenizer` knows.

        Args:
            chat, end, begin: see `find_boundaries`.

        Raises:
            StrettoError: no such file, not a tokenizer.
        """
        files = [path] if isinstance(path, str | os.PathLike) else path
        places = [Path(file).expanduser() for file in files]
        name = f"tokenizer {', '.join(map(str, files))}"
        ids = [token_number(token) for token in (end, begin) if token is not None]
        inner, stated = read_tokenizer(path, [id_ for id_ in ids if id_ is not None])

        def find(inner: tokenizers.Tokenizer) -> Boundaries:
            model_files = ModelFiles.find(places[0])
            return find_boundaries(inner, name, model_files, stated=stated, chat=chat, end=end, begin=begin)

        return cls(inner, find, name)

    @classmethod
    def parse(
        cls,
        origin: str,
        data: bytes,
        config: bytes,
        *,
        end: Boundary | None = None,
        begin: Boundary | None = None,
    ) -> Tokenizer:
        """The tokenizer in the content of a `tokenizer.json` and the `tokenizer_config.json` beside it;
        `origin` it came from, for messages.

        Raises:
            StrettoError: not a tokenizer.
        """
        name = f"tokenizer {origin}"

        def find(inner: tokenizers.Tokenizer) -> Boundaries:
            return find_boundaries(inner, name, ModelFiles.parse(origin, config), end=end, begin=begin)

        return cls(parse_tokenizer(origin, data), find, name)

    @cached_property
    def boundaries(self) -> Boundaries:
        """The tokens that end and begin a text.

        Raises:
            StrettoError: the files of its model do not name them.
        """
        if self._boundaries is None:
            return find_boundaries(self._inner, self.name, ModelFiles())
        return self._boundaries if isinstance(self._boundaries, Boundaries) else self._boundaries(self._inner)

    def with_boundaries(self, end: Boundary | None, begin: Boundary | None) -> Tokenizer:
        """Return the same tokenizer, whose texts end and begin with other tokens.

        Raises:
            StrettoError: it does not have them.
        """
        if (end, begin) == (None, None):
            return self
        others = find_boundaries(
            self._inner,
            self.name,
            ModelFiles(),
            end=self.endoftext if end is None else end,
            begin=(self.begin or [""])[0] if begin is None else begin,
        )
        return Tokenizer(self._inner, others, self.name)

    @property
    def endoftext(self) -> int:
        """The id of the token that ends a text; raises as `boundaries`."""
        return self.boundaries.end

    def describe_boundaries(self) -> str:
        """Describe how texts end and begin; raises as `boundaries`."""
        ids = [self.boundaries.end, *self.begin]
        return self.boundaries.describe({id_: self.text_of(id_) for id_ in ids})

    def config_bytes(self, config: Mapping[str, Any]) -> bytes:
        """Return a `tokenizer_config.json` with the boundaries, and with the settings of the model's own."""
        begin = self.text_of(self.begin[0]) if self.begin else None
        return tokenizer_config(self.text_of(self.endoftext), begin, config)

    @property
    def begin(self) -> list[int]:
        """The ids that begin a text: one, or none; raises as `boundaries`."""
        return [] if self.boundaries.begin is None else [self.boundaries.begin]

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int) -> Tokenizer:
        """Train on `texts`; the vocabulary is smaller than `vocab` when the text gives no more merges.

        Raises:
            StrettoError: `vocab` below 257.
        """
        check_vocab(vocab)
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner, Boundaries(find_token(inner, "tokenizer", END, END_OF_TEXT)))

    def to_bytes(self) -> bytes:
        """Return the content of a `tokenizer.json`."""
        return self._text.encode()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a `tokenizer.json`."""
        Path(path).write_bytes(self.to_bytes())

    @contextmanager
    def _encoding(self) -> Generator[None]:
        """Turn errors of the library while it encodes or decodes into a StrettoError."""
        hint = "copy the file again, or name another tokenizer"
        with library_errors(
            lambda reason: StrettoError(f"{self.name}: fails on the text: {reason}", hint=hint)
        ):
            yield

    def encode(self, text: str) -> list[int]:
        """Return the token ids of one text, without any special token."""
        with self._encoding():
            return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the token ids of each text, on the library's threads (one, if TOKENIZERS_PARALLELISM is
        false).
        """
        with self._encoding():
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        # from a list, array is far quicker than numpy
        return [np.frombuffer(array("I", encoding.ids), np.uint32) for encoding in encodings]

    def encode_templated(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the token ids of each text, and the span of characters of each token. Special tokens that
        the texts spell become single ids, as chat templates write them; no others are added.
        """
        self._inner.encode_special_tokens = False
        try:
            with self._encoding():
                encodings = self._inner.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self._inner.encode_special_tokens = True
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def special(self, text: str) -> int | None:
        """Return the id of the special token with this text, or None."""
        added = self._inner.get_added_tokens_decoder()
        return next((id_ for id_, token in added.items() if token.content == text), None)

    def text_of(self, token: int) -> str:
        """Return the text of a special token."""
        return self._inner.id_to_token(token) or ""

    @cached_property
    def cuts(self) -> ExactCuts | None:
        """The places at which a text may be cut into parts with the same tokens; None if there are none."""
        return ExactCuts.of(self._inner)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text of token ids; special tokens are left out unless `special`."""
        with self._encoding():
            return self._inner.decode([int(i) for i in ids], skip_special_tokens=not special)

    @cached_property
    def token_bytes(self) -> NDArray[np.int64] | None:
        """Bytes of text of each id, int64 [vocab_size], 0 for special tokens; None if tokens are not
        sequences of bytes, because the tokenizer is no byte-level BPE.
        """
        if not isinstance(self._inner.decoder, decoders.ByteLevel):
            return None
        sizes = np.zeros(self.vocab_size, np.int64)
        special = self._inner.get_added_tokens_decoder()
        for token, id_ in self._inner.get_vocab(with_added_tokens=True).items():
            # byte-level tokens are spelt with one character a byte
            added = special.get(id_)
            sizes[id_] = len(token) if added is None else 0 if added.special else len(token.encode())
        return sizes

    def text_bytes(self, ids: NDArray[np.integer]) -> int:
        """Return the bytes of the text of token ids in UTF-8. If tokens are not sequences of bytes the ids
        are decoded together, so they should be of complete documents or long.
        """
        if (sizes := self.token_bytes) is not None:
            return int(np.bincount(ids, minlength=len(sizes)) @ sizes)
        return len(self.decode(ids.tolist()).encode())


def in_batches(items: Iterable[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield items with texts in batches of bounded size, each large enough for all threads.

    Args:
        length: returns the length of an item's text.
    """
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += length(item) + 64
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def check_vocab(vocab: int) -> None:
    """Raise StrettoError if a byte-level BPE cannot have `vocab` tokens."""
    if not SMALLEST_VOCAB <= vocab < 1 << 32:
        raise StrettoError(
            f"vocab {vocab}: at least {SMALLEST_VOCAB} are needed, for 256 bytes and the end of text",
            hint="the usual sizes are 4096 to 131072",
        )
