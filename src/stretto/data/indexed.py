"""A token folder: the tokens of a corpus in one flat file, where its documents begin, and what they are.

tokens.bin      ids, little endian, uint16 where the vocabulary has at most 65536 tokens, else uint32
documents.bin   int64, little endian: the first token of each document, then the number of tokens
tokenizer.json  what made them
index.json      counts, sizes, checksums (see index.py)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.data.checksum import CHUNK, FileSums, SummedFile, check_chunks, check_size
from stretto.data.commit import PartialFolder
from stretto.data.index import (
    DOCUMENTS,
    INDEX,
    ITEM_BYTES,
    TOKENIZER,
    TOKENS,
    Index,
    dtype_for,
    is_token_folder,
    read_index,
)
from stretto.data.tokenizer import Tokenizer
from stretto.errors import StrettoError

CHECKED_WHOLE = 1 << 28
"""Opening checks every byte of files smaller than this, and the first and last chunk of larger ones."""
_BUFFERED = 1 << 16


class TokenFolder:
    """An open token folder, mapped into memory.

    `tokens` [index.tokens] and `offsets` [index.documents + 1] are read-only maps; document i is
    `tokens[offsets[i]:offsets[i + 1]]` and ends with `index.endoftext`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open and check.

        Raises:
            StrettoError: not a token folder, another version, truncated, corrupt, ids outside the vocabulary.
        """
        self.path = Path(path)
        self.index: Index = read_index(self.path)
        for name, sums in self.index.files.items():
            check_size(self.path / name, sums)
        self.tokens: NDArray[np.uint16 | np.uint32] = self._map(TOKENS, f"<u{self._item}")
        self.offsets: NDArray[np.int64] = self._map(DOCUMENTS, "<i8")
        for name, sums in self.index.files.items():
            self._check(name, None if sums.bytes < CHECKED_WHOLE else {0, len(sums.crc32) - 1})
        if (int(self.offsets[0]), int(self.offsets[-1])) != (0, self.index.tokens):
            raise StrettoError(
                f"{self.path / DOCUMENTS}: does not span the {self.index.tokens} tokens",
                hint="build the folder again",
            )

    def __reduce__(self) -> tuple[object, ...]:
        # other processes map the file again; the tokens are not copied
        return TokenFolder, (self.path,)

    @property
    def _item(self) -> int:
        return ITEM_BYTES[self.index.dtype]

    def _map(self, name: str, dtype: str) -> NDArray[Any]:
        try:
            return np.memmap(self.path / name, dtype=np.dtype(dtype), mode="r")
        except (OSError, ValueError) as error:
            raise StrettoError(
                f"{self.path / name}: cannot be mapped: {error}", hint="check its permissions"
            ) from None

    def verify(self) -> None:
        """Check every byte of every file, every id and every document boundary.

        Raises:
            StrettoError: the first fault found.
        """
        for name, sums in self.index.files.items():
            check_size(self.path / name, sums)
            self._check(name, None)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises:
            StrettoError: the folder has none, or another one.
        """
        if TOKENIZER not in self.index.files:
            raise StrettoError(
                f"{self.path}: has no {TOKENIZER}", hint="put the one that made the tokens there"
            )
        found = Tokenizer.load(self.path / TOKENIZER)
        if found.fingerprint != self.index.tokenizer:
            raise StrettoError(
                f"{self.path / TOKENIZER}: not the tokenizer that made the tokens",
                hint="build the folder again",
            )
        return found

    def _check(self, name: str, which: Iterable[int] | None) -> None:
        look: dict[str, Callable[[int, bytes], None]] = {
            TOKENS: self._check_ids,
            DOCUMENTS: self._check_offsets,
        }
        check_chunks(self.path / name, self.index.files[name], self.index.chunk, which, look.get(name))

    def _check_ids(self, start: int, data: bytes) -> None:
        ids = np.frombuffer(data, dtype=f"<u{self._item}")
        if int(ids.max()) >= self.index.vocab:
            at = int(np.argmax(ids >= self.index.vocab))
            raise StrettoError(
                f"{self.path / TOKENS}: token {start // self._item + at} is {ids[at]},"
                f" outside the vocabulary of {self.index.vocab}",
                hint="build the folder again",
            )

    def _check_offsets(self, start: int, data: bytes) -> None:
        before = self.offsets[start // 8 - 1 : start // 8] if start else np.array([-1])
        offsets = np.concatenate([before, np.frombuffer(data, dtype="<i8")])
        if bool((np.diff(offsets) <= 0).any()):
            at = start // 8 + int(np.argmax(np.diff(offsets) <= 0))
            raise StrettoError(
                f"{self.path / DOCUMENTS}: boundary {at} is not after boundary {at - 1}",
                hint="build the folder again",
            )


class TokenWriter:
    """Writes a token folder in a stream: memory does not grow with the corpus.

        with TokenWriter(path, tokenizer, key="...", source=["..."]) as writer:
            writer.add(ids, ends=True)
            writer.commit()

    Nothing is seen at `path` before the commit.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        *,
        key: str = "",
        source: Sequence[str] = (),
        chunk: int = CHUNK,
    ) -> None:
        self.tokens = 0
        self.documents = 0
        self.skipped = 0
        self._tokenizer, self._key, self._source, self._chunk = tokenizer, key, list(source), chunk
        self._dtype = np.dtype(dtype_for(tokenizer.vocab_size)).newbyteorder("<")
        self._partial = PartialFolder(path)
        self._starts: list[int] = []
        self._within = False

    def __enter__(self) -> TokenWriter:
        with ExitStack() as stack:
            folder = stack.enter_context(self._partial).path
            self._tokens = stack.enter_context(SummedFile(folder / TOKENS, self._chunk))
            self._offsets = stack.enter_context(SummedFile(folder / DOCUMENTS, self._chunk))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, ids: Sequence[int] | NDArray[np.integer], ends: bool) -> None:
        """Append token ids to the document at hand; `ends` closes it with the end-of-text token.

        Raises:
            StrettoError: an id outside the tokenizer's vocabulary.
        """
        if not self._within:
            self._starts.append(self.tokens)
            self.documents += 1
        self._within = not ends
        array = np.asarray(ids, dtype=np.int64)
        if len(array) and not 0 <= int(array.min()) <= int(array.max()) < self._tokenizer.vocab_size:
            raise StrettoError(
                f"token ids {array.min()} to {array.max()}: the vocabulary has {self._tokenizer.vocab_size}",
                hint="the tokenizer does not belong to these ids",
            )
        array = np.append(array, self._tokenizer.endoftext) if ends else array
        self._tokens.write(array.astype(self._dtype).tobytes())
        self.tokens += len(array)
        if len(self._starts) >= _BUFFERED:
            self._write_starts()

    def _write_starts(self) -> None:
        self._offsets.write(np.array(self._starts, dtype="<i8").tobytes())
        self._starts = []

    def commit(self) -> None:
        """Make all durable and rename the folder into its place, unless one of the same key is there."""
        assert self.documents, "no documents"
        assert not self._within, "the last document has no end"
        self._starts.append(self.tokens)
        self._write_starts()
        files = {TOKENS: self._tokens.close(), DOCUMENTS: self._offsets.close()}
        files[TOKENIZER] = self._save_tokenizer()
        index = Index(
            dtype=self._dtype.name,
            tokens=self.tokens,
            documents=self.documents,
            vocab=self._tokenizer.vocab_size,
            endoftext=self._tokenizer.endoftext,
            tokenizer=self._tokenizer.fingerprint,
            key=self._key,
            source=self._source,
            skipped=self.skipped,
            chunk=self._chunk,
            files=files,
        )
        with SummedFile(self._partial.path / INDEX) as file:
            file.write(index.to_bytes())
            file.close()
        self._partial.commit(lambda there: bool(self._key) and open_if_current(there, self._key) is not None)

    def _save_tokenizer(self) -> FileSums:
        with SummedFile(self._partial.path / TOKENIZER, self._chunk) as file:
            file.write(self._tokenizer.to_bytes())
            return file.close()


def open_if_current(path: Path, key: str) -> TokenFolder | None:
    """The token folder at `path` if it is whole and was made for `key`."""
    if not is_token_folder(path):
        return None
    try:
        folder = TokenFolder(path)
    except StrettoError:
        return None
    return folder if folder.index.key == key else None
