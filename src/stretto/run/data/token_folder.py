"""A token folder: the tokens of a corpus in one flat file, its document boundaries, and its metadata.

tokens.bin             ids, little endian, uint16 where the vocabulary has at most 65536 tokens, else uint32
documents.bin          int64, little endian: the first token of each document, then the number of tokens
mask.bin               uint8, only of conversations: 1 where the loss counts the token, else 0
tokenizer.json         the tokenizer that made them
tokenizer_config.json  its special tokens, and the chat template that rendered the tokens, if one did
index.json             counts, sizes, checksums (see Index)
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.run.config.sources import INDEX, TOKENS, is_token_folder
from stretto.run.data.checksum import FileSums, SummedFile, check_chunks, check_size
from stretto.run.data.commit import PartialFolder
from stretto.run.data.remote import BLOCK, Place, RemoteFile, RemotePath, load_tokenizer, mapped
from stretto.run.data.split import SPLITS
from stretto.run.data.token_source import LazyArray, TokenSource
from stretto.run.data.tokenizer import TOKENIZER, TOKENIZER_CONFIG, Tokenizer
from stretto.versions import TOKEN_FOLDER

FORMAT = TOKEN_FOLDER.name
VERSION = 1
MASKED_VERSION = 2
"""Of folders with a mask, which readers of version 1 would train on without it."""
NAMED_VERSION = 3
"""Of folders with splits by the names of files, with a mask or without, of which readers of earlier versions
would train on held-out text.
"""
DOCUMENTS = "documents.bin"
MASK = "mask.bin"
FILES = (INDEX, TOKENS, DOCUMENTS, MASK, TOKENIZER, TOKENIZER_CONFIG)
ITEM_BYTES = {"uint16": 2, "uint32": 4}
_BIGGEST_CHUNK = 1 << 30
_REBUILD = "build the folder again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The metadata of a token folder.

    `dtype` is uint16 or uint32, `tokens` and `documents` are counts, all ids are below `vocab`, `endoftext`
    is the id that ends each document, `begin_of_text` the one that begins it, if any does, `tokenizer` the
    fingerprint of the tokenizer, `key` the fingerprint of source and settings, `source` as the user named it,
    `skipped` the number of skipped files, `blank` the number of documents left out because they were blank,
    or conversations with nothing to train on; `files` has the checksums of each file per `chunk` bytes.
    `trained` counts the tokens that the mask selects; None: there is no mask, all count. `bad_rows` tells of
    rows that could not be read (`RowErrors.as_dict`); `named_splits` is as in `TokenSource`.
    """

    dtype: str
    tokens: int
    documents: int
    vocab: int
    endoftext: int
    tokenizer: str
    key: str
    source: list[str]
    skipped: int
    chunk: int
    files: dict[str, FileSums]
    blank: int = 0
    begin_of_text: int | None = None
    trained: int | None = None
    bad_rows: dict[str, Any] | None = None
    named_splits: dict[str, tuple[int, str]] | None = None

    def to_bytes(self) -> bytes:
        """Return the file's content; `crc32` covers all other fields."""
        version = VERSION if self.trained is None else MASKED_VERSION
        version = version if self.named_splits is None else NAMED_VERSION
        body: dict[str, Any] = {"format": FORMAT, "version": version, **asdict(self)}
        body = {name: value for name, value in body.items() if value is not None}
        return (json.dumps({**body, "crc32": _crc32(body)}, indent=1) + "\n").encode()


def _crc32(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def dtype_for(vocab: int) -> str:
    """Return the narrowest dtype that holds ids below `vocab`."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def read_index(folder: Place) -> Index:
    """Read and check `index.json`.

    Raises:
        StrettoError: not a token folder, of another version, corrupt.
    """
    path = folder / INDEX
    try:
        data = path.read_bytes()
    except OSError:
        raise StrettoError(
            f"{folder}: not a token folder (no readable {INDEX})",
            hint="make one: stretto data build SOURCE --out DIR",
        ) from None
    return parse_index(data, path)


def parse_index(data: bytes, path: Place) -> Index:
    """Return the index in `data`, which came from `path`; raises as `read_index`."""
    try:
        parsed: object = json.loads(data)
    except (ValueError, RecursionError):
        raise StrettoError(f"{path}: corrupt: not JSON", hint=_REBUILD) from None
    if not isinstance(parsed, dict) or "format" not in parsed:
        raise StrettoError(f"{path}: not the index of a token folder", hint=f"it says no format {FORMAT!r}")
    body = cast(dict[str, Any], parsed)
    if body["format"] != FORMAT:
        raise StrettoError(
            f"{path}: format {str(body['format'])[:80]!r}, not {FORMAT!r}", hint="name a token folder"
        )
    TOKEN_FOLDER.check(body.get("version"), str(path))
    if body.pop("crc32", None) != _crc32(body):
        raise StrettoError(f"{path}: corrupt: its own checksum does not match", hint=_REBUILD)
    index = _from_body(body, path)
    _check(index, path)
    return index


def _from_body(body: Mapping[str, Any], path: Place) -> Index:
    """Return the fields, checked for their types."""

    def take(name: str, kind: type) -> Any:
        value = body.get(name)
        if type(value) is not kind:
            raise StrettoError(f"{path}: field {name!r} is not {kind.__name__}", hint=_REBUILD)
        return value

    files: dict[str, FileSums] = {}
    for name, sums in take("files", dict).items():
        match sums:
            case {"bytes": int(size), "crc32": list(crcs)} if all(
                type(c) is int for c in cast(list[Any], crcs)
            ):
                files[name] = FileSums(size, cast(list[int], crcs))
            case _:
                raise StrettoError(f"{path}: field 'files' has no sums for {name!r}", hint=_REBUILD)
    source = [str(part) for part in take("source", list)]
    text = {name: take(name, str) for name in ("dtype", "tokenizer", "key")}
    counts = {
        name: take(name, int) for name in ("tokens", "documents", "vocab", "endoftext", "skipped", "chunk")
    }
    blank = take("blank", int) if "blank" in body else 0  # folders of earlier versions lack it
    begin = take("begin_of_text", int) if "begin_of_text" in body else None
    masked = body["version"] == MASKED_VERSION or (body["version"] == NAMED_VERSION and "trained" in body)
    trained = take("trained", int) if masked else None
    named_splits = dict[str, tuple[int, str]]()
    for name, split in take("named_splits", dict).items() if body["version"] == NAMED_VERSION else ():
        match split:
            case [int(tokens), str(names)] if name in SPLITS:
                named_splits[name] = (tokens, names)
            case _:
                raise StrettoError(f"{path}: field 'named_splits' has no tokens of {name!r}", hint=_REBUILD)
    match bad_rows := body.get("bad_rows"):
        case None:
            pass
        case {"rows": int(), "skipped": dict(counted), "examples": list(examples)} if all(
            type(count) is int for count in cast(dict[str, Any], counted).values()
        ) and all(isinstance(example, str) for example in cast(list[Any], examples)):
            pass
        case _:
            raise StrettoError(f"{path}: field 'bad_rows' has no counts of rows", hint=_REBUILD)
    return Index(
        **text,
        **counts,
        source=source,
        files=files,
        blank=blank,
        begin_of_text=begin,
        trained=trained,
        bad_rows=bad_rows,
        named_splits=named_splits or None,
    )


def _check(index: Index, path: Place) -> None:
    """Check that the fields agree with one another."""
    if index.dtype not in ITEM_BYTES:
        raise StrettoError(
            f"{path}: dtype {index.dtype[:80]!r}; allowed are {', '.join(ITEM_BYTES)}", hint=_REBUILD
        )
    if not 0 < index.vocab <= 1 << 8 * ITEM_BYTES[index.dtype]:
        raise StrettoError(f"{path}: vocab {index.vocab} does not fit {index.dtype}", hint=_REBUILD)
    rules = {
        "endoftext": 0 <= index.endoftext < index.vocab,
        "begin_of_text": index.begin_of_text is None or 0 <= index.begin_of_text < index.vocab,
        "tokens": index.tokens > 0,
        "documents": 0 < index.documents <= index.tokens,
        "chunk": 0 < index.chunk <= _BIGGEST_CHUNK and index.chunk % 8 == 0,
        "files": {TOKENS, DOCUMENTS} <= index.files.keys() <= {*FILES} - {INDEX},
        "named_splits": not index.named_splits
        or (
            index.named_splits.keys() == {*SPLITS}
            and all(tokens >= 0 for tokens, _ in index.named_splits.values())
            and sum(tokens for tokens, _ in index.named_splits.values()) == index.tokens
        ),
        "trained": (index.trained is not None) == (MASK in index.files)
        and 0 < (1 if index.trained is None else index.trained) <= index.tokens,
    }
    sizes = {
        TOKENS: index.tokens * ITEM_BYTES[index.dtype],
        DOCUMENTS: (index.documents + 1) * 8,
        MASK: index.tokens,
    }
    for name, sums in index.files.items() if rules["chunk"] and rules["files"] else ():
        rules[f"files.{name}.bytes"] = sums.bytes == sizes.get(name, sums.bytes) and sums.bytes >= 0
        rules[f"files.{name}.crc32"] = len(sums.crc32) == -(-sums.bytes // index.chunk)
    for field, good in rules.items():
        if not good:
            raise StrettoError(f"{path}: field {field!r} contradicts the rest", hint=_REBUILD)


CHECKED_WHOLE = 1 << 28
"""Opening checks every byte of files smaller than this, and the first and last chunk of larger ones."""
_BUFFERED = 1 << 16


class TokenFolder(TokenSource):
    """An open token folder, mapped into memory, or at a URL read by blocks.

    `tokens`, `offsets` and `mask` are read-only maps; a document of text ends with `endoftext`, a
    conversation as its template has it.
    """

    def __init__(self, path: str | os.PathLike[str] | RemotePath, tokenizer: Tokenizer | None = None) -> None:
        """Open and check; of a folder at a URL the ends of the files, each block being checked as it comes.

        Args:
            tokenizer: the folder's, if it is loaded already: large ones take seconds.

        Raises:
            StrettoError: not a token folder, another version, truncated, corrupt, ids outside the vocabulary.
        """
        self.path: Place = path if isinstance(path, RemotePath) else Path(path)
        self.index: Index = read_index(self.path)
        self._tokenizer = tokenizer
        self.name = str(self.path)
        self.vocab, self.endoftext = self.index.vocab, self.index.endoftext
        self.begin_of_text = self.index.begin_of_text
        self.fingerprint, self.trained = self.index.tokenizer, self.index.trained
        self.named_splits = self.index.named_splits or {}
        for name, sums in self.index.files.items():
            check_size(self.path / name, sums)
        self.tokens = self._map(TOKENS, f"<u{self._item}")
        self.offsets = self._map(DOCUMENTS, "<i8")
        self.mask = self._map(MASK, "u1") if MASK in self.index.files else None
        limit = 0 if isinstance(self.path, RemotePath) else CHECKED_WHOLE
        for name, sums in self.index.files.items():
            self._check(name, None if sums.bytes < limit else {0, len(sums.crc32) - 1})
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

    def _map(self, name: str, dtype: str) -> LazyArray:
        sums, block = self.index.files[name], self.index.chunk
        try:
            return mapped(self.path / name, dtype, sums=sums, block=block)
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
        """Return the tokenizer that made the tokens.

        Raises:
            StrettoError: the folder has no tokenizer, or a different one.
        """
        if TOKENIZER not in self.index.files:
            raise StrettoError(
                f"{self.path}: has no {TOKENIZER}", hint="put the one that made the tokens there"
            )
        if self._tokenizer is None:
            begin = "" if self.begin_of_text is None else self.begin_of_text
            self._tokenizer = load_tokenizer(self.path / TOKENIZER, self.index.endoftext, begin)
        tokenizer = self._tokenizer
        if tokenizer.fingerprint != self.index.tokenizer:
            raise StrettoError(
                f"{self.path / TOKENIZER}: not the tokenizer that made the tokens",
                hint="build the folder again",
            )
        return tokenizer

    def companions(self) -> dict[str, bytes]:
        """Return the sidecar files; see `TokenData.companions`."""
        names = [name for name in (TOKENIZER, TOKENIZER_CONFIG) if name in self.index.files]
        return {name: (self.path / name).read_bytes() for name in names}

    def text_bytes(self, tokens: range) -> int | None:
        """See `TokenSource.text_bytes`; None if the tokenizer's file is missing."""
        return super().text_bytes(tokens) if TOKENIZER in self.index.files else None

    def _check(self, name: str, which: Iterable[int] | None) -> None:
        look: dict[str, Callable[[int, bytes], None]] = {
            TOKENS: self._check_ids,
            DOCUMENTS: self._check_offsets,
            MASK: self._check_mask,
        }
        sums, path = self.index.files[name], self.path / name
        chunk = self.index.chunk
        if not isinstance(path, RemotePath):
            check_chunks(path, sums, chunk, which, look.get(name))
            return
        file = RemoteFile(path, sums, chunk)
        for number in range(len(sums.crc32)) if which is None else sorted(which):
            start = number * chunk
            data = file.read(start, min(start + chunk, sums.bytes))
            if name in look:
                look[name](start, data)

    def _check_ids(self, start: int, data: bytes) -> None:
        ids = np.frombuffer(data, dtype=f"<u{self._item}")
        if int(ids.max()) >= self.index.vocab:
            at = int(np.argmax(ids >= self.index.vocab))
            raise StrettoError(
                f"{self.path / TOKENS}: token {start // self._item + at} is {ids[at]},"
                f" outside the vocabulary of {self.index.vocab}",
                hint="build the folder again",
            )

    def _check_mask(self, start: int, data: bytes) -> None:
        values = np.frombuffer(data, dtype="u1")
        if int(values.max()) > 1:
            at = int(np.argmax(values > 1))
            raise StrettoError(
                f"{self.path / MASK}: token {start + at} has mask {values[at]}; 0 and 1 are allowed",
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
    """Writes a token folder as a stream: memory does not grow with the corpus.

        with TokenWriter(path, tokenizer, key="...", source=["..."]) as writer:
            writer.add(ids, ends=True)
            writer.commit()

    Nothing appears at `path` before the commit.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        *,
        key: str = "",
        source: Sequence[str] = (),
        chunk: int = BLOCK,
        masked: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Write at `path`; `masked`: with a mask; `config`: the chat template's, if any."""
        self.tokens = 0
        self.trained = 0
        self.documents = 0
        self.skipped = 0
        self.blank = 0
        self.bad_rows: dict[str, Any] | None = None
        self.named_splits = dict[str, tuple[int, str]]()
        self._tokenizer = tokenizer
        self._key = key
        self._source = list(source)
        self._chunk = chunk
        self._config = config
        self._masked = masked
        self._mask: SummedFile | None = None
        self._dtype = np.dtype(dtype_for(tokenizer.vocab_size)).newbyteorder("<")
        self._partial = PartialFolder(path)
        self._starts: list[int] = []
        self._within = False

    def __enter__(self) -> TokenWriter:
        with ExitStack() as stack:
            folder = stack.enter_context(self._partial).path
            self._tokens = stack.enter_context(SummedFile(folder / TOKENS, self._chunk))
            self._offsets = stack.enter_context(SummedFile(folder / DOCUMENTS, self._chunk))
            if self._masked:
                self._mask = stack.enter_context(SummedFile(folder / MASK, self._chunk))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, ids: Sequence[int] | NDArray[np.integer], ends: bool) -> None:
        """Append token ids to the current document, after the begin-of-text token if it is a new one and
        texts begin with one; `ends` closes it with the end-of-text token.

        Raises:
            StrettoError: an id outside the tokenizer's vocabulary.
        """
        begin = [] if self._within else self._tokenizer.begin
        self._start_document()
        self._within = not ends
        end = [self._tokenizer.endoftext] if ends else []
        self._write(np.concatenate([begin, np.asarray(ids), end]).astype(np.int64))

    def add_masked(self, ids: Sequence[int], mask: Sequence[bool]) -> None:
        """Append a whole document with the mask of its tokens, as they are.

        Raises:
            StrettoError: an id outside the tokenizer's vocabulary.
        """
        assert self._mask is not None, "the folder has no mask"
        assert len(ids) == len(mask) > 0
        self._start_document()
        self._write(np.asarray(ids, dtype=np.int64))
        values = np.asarray(mask, dtype=np.uint8)
        self._mask.write(values.tobytes())
        self.trained += int(values.sum())

    def _start_document(self) -> None:
        if not self._within:
            self._starts.append(self.tokens)
            self.documents += 1

    def _write(self, array: NDArray[np.int64]) -> None:
        if len(array) and not 0 <= int(array.min()) <= int(array.max()) < self._tokenizer.vocab_size:
            raise StrettoError(
                f"token ids {array.min()} to {array.max()}: the vocabulary has {self._tokenizer.vocab_size}",
                hint="the tokenizer does not belong to these ids",
            )
        self._tokens.write(array.astype(self._dtype).tobytes())
        self.tokens += len(array)
        if len(self._starts) >= _BUFFERED:
            self._write_starts()

    def _write_starts(self) -> None:
        self._offsets.write(np.array(self._starts, dtype="<i8").tobytes())
        self._starts = []

    def commit(self) -> None:
        """Make the files durable and rename the folder to `path`, unless one of the same key is there."""
        assert self.documents, "no documents"
        assert not self._within, "the last document has no end"
        self._starts.append(self.tokens)
        self._write_starts()
        files = {TOKENS: self._tokens.close(), DOCUMENTS: self._offsets.close()}
        if self._mask is not None:
            files[MASK] = self._mask.close()
        files[TOKENIZER] = self._save(TOKENIZER, self._tokenizer.to_bytes())
        files[TOKENIZER_CONFIG] = self._save(
            TOKENIZER_CONFIG, self._tokenizer.config_bytes(self._config or {})
        )
        index = Index(
            dtype=self._dtype.name,
            tokens=self.tokens,
            documents=self.documents,
            vocab=self._tokenizer.vocab_size,
            endoftext=self._tokenizer.endoftext,
            begin_of_text=self._tokenizer.boundaries.begin,
            tokenizer=self._tokenizer.fingerprint,
            key=self._key,
            source=self._source,
            skipped=self.skipped,
            blank=self.blank,
            chunk=self._chunk,
            files=files,
            trained=self.trained if self._masked else None,
            bad_rows=self.bad_rows,
            named_splits=self.named_splits or None,
        )
        with SummedFile(self._partial.path / INDEX) as file:
            file.write(index.to_bytes())
            file.close()
        self._partial.commit(lambda path: bool(self._key) and open_if_current(path, self._key) is not None)

    def _save(self, name: str, data: bytes) -> FileSums:
        with SummedFile(self._partial.path / name, self._chunk) as file:
            file.write(data)
            return file.close()


def open_if_current(path: Path, key: str) -> TokenFolder | None:
    """Return the token folder at `path` if it is complete and was made for `key`."""
    if not is_token_folder(path):
        return None
    try:
        folder = TokenFolder(path)
    except StrettoError:
        return None
    return folder if folder.index.key == key else None
