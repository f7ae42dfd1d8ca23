"""Megatron's indexed datasets: `PREFIX.bin`, the ids of all sequences one after another, and `PREFIX.idx`.

The index, little endian: magic (9 bytes), version (uint64), code of the ids' type (uint8), number of
sequences s (uint64), number of document boundaries d (uint64); then the length of each sequence (int32 [s]),
its first byte in the `.bin` (int64 [s]), the first sequence of each document followed by s (int64 [d]), and
of multimodal datasets a mode for each sequence (int8 [s]). Described in `megatron/core/datasets/readme.md` of
Megatron-LM; a document of plain text is one sequence.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.run.config.sources import BIN, IDX, missing_half
from stretto.run.data.boundaries import Boundary, token_number
from stretto.run.data.checksum import SummedFile
from stretto.run.data.commit import PartialFolder
from stretto.run.data.remote import Place, RemotePath, load_tokenizer, mapped, read_head
from stretto.run.data.token_source import LazyArray, TokenSource
from stretto.run.data.tokenizer import TOKENIZER, TOKENIZER_CONFIG, Tokenizer
from stretto.run.data.tokenizer_files import TokenizerPath

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
# codes of numpy's types; 6 and 7, float64 and float32, hold no ids
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_UINT16_BELOW = 65_500
"""Vocabularies that Megatron's builder writes as uint16; larger ones as int32."""
_CHUNK = 1 << 24  # ids or entries that are checked at a time
_FETCHED = 1 << 20  # the same, where they are at a URL
_TOKENIZER_SUFFIX, _CONFIG_SUFFIX = ".tokenizer.json", ".tokenizer_config.json"


P = TypeVar("P", bound=Place)


def dataset_file(prefix: P, suffix: str) -> P:
    """Return the file of a dataset with a suffix."""
    return cast(P, prefix.with_name(prefix.name + suffix))


def check_halves(prefix: Place) -> None:
    """Raise StrettoError if one of the two files is missing."""
    if (half := missing_half(prefix)) is not None:
        raise StrettoError(
            f"{half[0]}: missing, and {half[1]} alone is half of a Megatron dataset",
            hint=f"copy it beside {half[1].name}",
        )


@dataclass(frozen=True, kw_only=True)
class DatasetVocabulary:
    """The vocabulary of a dataset, which its files do not describe.

    Attributes:
        size: number of ids.
        tokenizer: file or folder of the tokenizer, or None if it is unknown.
        endoftext: the id that ends a document; None without a tokenizer, or if its files do not name it.
        begin_of_text: the id that begins a document, or None.
        fingerprint: fingerprint of the tokenizer, or None.
    """

    size: int
    tokenizer: TokenizerPath | RemotePath | None = None
    endoftext: int | None = None
    begin_of_text: int | None = None
    fingerprint: str | None = None

    @classmethod
    def of(
        cls,
        prefix: Place,
        tokenizer: TokenizerPath | None,
        size: int | None = None,
        *,
        end: Boundary | None = None,
        begin: Boundary | None = None,
    ) -> DatasetVocabulary:
        """Return the vocabulary of a tokenizer: the one named, else the one that `stretto data build` left
        next to the dataset; without either, `size` ids.

        Args:
            end: the token that ends a document; None for the tokenizer's.
            begin: likewise.

        Raises:
            StrettoError: none of the three, or not a tokenizer, or one without a token that is named.
        """
        saved = dataset_file(prefix, _TOKENIZER_SUFFIX)
        path = saved if tokenizer is None and saved.is_file() else tokenizer
        if path is not None:
            loaded = load_tokenizer(path, end, begin)
            try:
                boundaries = loaded.boundaries
            except StrettoError:
                if (end, begin) != (None, None):
                    raise
                boundaries = None  # the documents are cut already: only spans need them, and ask
            return cls(
                size=loaded.vocab_size,
                tokenizer=path,
                endoftext=None if boundaries is None else boundaries.end,
                begin_of_text=None if boundaries is None else boundaries.begin,
                fingerprint=loaded.fingerprint,
            )
        if size is None:
            check_halves(prefix)  # which is the likelier reason
            raise StrettoError(
                f"{prefix}: a Megatron dataset does not say what vocabulary its ids are of",
                hint="name its tokenizer with data.tokenizer, or only the number of ids with model.vocab=N",
            )
        ids = [None if token is None else token_number(token) for token in (end, begin)]
        if any(id_ is None and token for id_, token in zip(ids, (end, begin), strict=True)):
            raise StrettoError(
                f"{prefix}: its tokenizer is not known, so the tokens around a text are named by their ids",
                hint="such as data.end_of_text=0, or name the tokenizer with data.tokenizer",
            )
        return cls(size=size, endoftext=ids[0], begin_of_text=ids[1])


class MegatronDataset(TokenSource):
    """An open indexed dataset, mapped into memory, or read by blocks from a URL.

    Attributes:
        sequences: number of sequences, of which documents consist.
    """

    def __init__(self, prefix: Place, vocabulary: DatasetVocabulary) -> None:
        """Open and check: of large files the sizes, and the first and last entries and ids.

        Raises:
            StrettoError: a file is missing, truncated, or of another format; ids outside the vocabulary.
        """
        check_halves(prefix)
        self.path, self._vocabulary = prefix, vocabulary
        self.name = str(prefix)
        self.vocab, self.endoftext = vocabulary.size, vocabulary.endoftext
        self.begin_of_text = vocabulary.begin_of_text
        self.fingerprint = vocabulary.fingerprint
        self.mask = self.trained = None
        self._index = _Index(dataset_file(prefix, IDX))
        self.sequences, self.dtype = len(self._index.lengths), self._index.dtype
        self._ids = self._index.map_ids(dataset_file(prefix, BIN))
        self.tokens, self.offsets = self._ids, self._index
        limit = _FETCHED if isinstance(prefix, RemotePath) else _CHUNK
        for start in {0, max(0, len(self._ids) - limit)}:
            self._check_ids(start, limit)

    def __reduce__(self) -> tuple[object, ...]:
        return MegatronDataset, (self.path, self._vocabulary)

    def verify(self) -> None:
        """Check every id and every entry of the index.

        Raises:
            StrettoError: the first fault.
        """
        self._index.check(full=True)
        for start in range(0, len(self._ids), _CHUNK):
            self._check_ids(start)

    def tokenizer(self) -> Tokenizer:
        """As `TokenSource.tokenizer`."""
        if self._vocabulary.tokenizer is None:
            raise StrettoError(
                f"{self.path}: the tokenizer that made these ids is not known",
                hint="name it with data.tokenizer in a config, or with --tokenizer",
            )
        begin = "" if self.begin_of_text is None else self.begin_of_text
        if self.endoftext is None:
            return load_tokenizer(self._vocabulary.tokenizer)
        return load_tokenizer(self._vocabulary.tokenizer, self.endoftext, begin)

    def companions(self) -> dict[str, bytes]:
        """As `TokenSource.companions`; nothing where no tokenizer is known."""
        if self.fingerprint is None:
            return {}
        tokenizer = self.tokenizer()
        config = {} if self.endoftext is None else {TOKENIZER_CONFIG: tokenizer.config_bytes({})}
        return {TOKENIZER: tokenizer.to_bytes(), **config}

    def _check_ids(self, start: int, count: int = _CHUNK) -> None:
        ids = self._ids[start : start + count]
        wrong = (ids < 0) | (ids >= self.vocab) if ids.dtype.kind == "i" else ids >= self.vocab
        if wrong.any():
            at = int(np.argmax(wrong))
            of = self._vocabulary.tokenizer or f"model.vocab={self.vocab}"
            raise StrettoError(
                f"{dataset_file(self.path, BIN)}: token {start + at} is {ids[at]}, outside the vocabulary of"
                f" {self.vocab} ({of})",
                hint="name the tokenizer that made these ids with data.tokenizer, or their number with"
                " model.vocab",
            )


class _Index:
    """The index of a dataset; as a sequence, the first token of each document, then the number of tokens."""

    def __init__(self, path: Place) -> None:
        self._path = path
        self.dtype, sequences, boundaries = self._header()
        self._item = self.dtype.itemsize
        pointers_at = _HEADER.size + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        modes_at = documents_at + 8 * boundaries
        size = path.stat().st_size
        if size not in (modes_at, modes_at + sequences):
            problem = "truncated" if size < modes_at else "too long"
            raise StrettoError(
                f"{path}: {problem}: {size} bytes, {modes_at} belong to {sequences} sequences and"
                f" {boundaries - 1} documents",
                hint="copy it again",
            )
        self.lengths = mapped(path, "<i4", start=_HEADER.size, length=sequences)
        self._pointers = mapped(path, "<i8", start=pointers_at, length=sequences)
        self._documents = mapped(path, "<i8", start=documents_at, length=boundaries)
        modes = mapped(path, "u1", start=modes_at, length=sequences)[:] if size > modes_at else np.zeros(1)
        if modes.any():
            raise StrettoError(
                f"{path}: multimodal: {np.count_nonzero(modes)} of {sequences} sequences are not text",
                hint="name a dataset of text alone",
            )
        self.tokens = (int(self._pointers[-1]) // self._item) + int(self.lengths[-1])
        self._checked = _FETCHED if isinstance(path, RemotePath) else _CHUNK
        self.check(full=sequences <= self._checked)

    def _header(self) -> tuple[np.dtype[Any], int, int]:
        """Return the type of the ids, the number of sequences and that of document boundaries."""
        head = read_head(self._path, _HEADER.size)
        if not head.startswith(MAGIC):
            older = head.startswith(b"TNTIDX")
            raise StrettoError(
                f"{self._path}: not the index of a Megatron dataset: it begins with {head[:9]!r},"
                f" not {MAGIC!r}",
                hint="build it again with --dataset-impl mmap: the older kinds are not read"
                if older
                else "name the .idx that was written together with the .bin",
            )
        if len(head) < _HEADER.size:
            raise StrettoError(f"{self._path}: truncated: {len(head)} bytes", hint="copy it again")
        _, version, code, sequences, boundaries = _HEADER.unpack(head)
        if version != VERSION:
            raise StrettoError(
                f"{self._path}: format version {version}; only {VERSION} is known",
                hint="build it again with a current Megatron-LM",
            )
        if code not in _TYPES:
            name = _FLOATS.get(code, f"type code {code}")
            raise StrettoError(
                f"{self._path}: its values are {name}, which are no token ids",
                hint="name a dataset of integers: " + ", ".join(np.dtype(t).name for t in _TYPES.values()),
            )
        if not sequences or boundaries < 2:
            raise StrettoError(f"{self._path}: holds no document", hint="build it from text")
        return np.dtype(_TYPES[code]), sequences, boundaries

    def map_ids(self, path: Place) -> LazyArray:
        """Return the ids in the `.bin`: [tokens]."""
        size, expected = path.stat().st_size, self.tokens * self._item
        if size != expected:
            problem = "truncated" if size < expected else "too long"
            raise StrettoError(
                f"{path}: {problem}: {size} bytes, and {self._path.name} describes {expected}",
                hint="copy it again" if size < expected else f"name the .bin that {self._path.name} is of",
            )
        return mapped(path, self.dtype)

    def check(self, *, full: bool) -> None:
        """Check that sequences and documents follow one another; without `full` only the first and last of
        them.
        """
        sequences, boundaries = len(self.lengths), len(self._documents)
        limit = self._checked
        for start in range(0, sequences, limit) if full else {0, sequences - min(sequences, limit)}:
            lengths = self.lengths[start : start + limit].astype(np.int64)
            pointers = self._pointers[start : start + limit]
            last = start + len(lengths)
            end = self.tokens * self._item if last == sequences else int(self._pointers[last])
            following = np.append(pointers[1:], end)
            wrong = (lengths < 0) | (following - pointers != lengths * self._item)
            if start == 0:
                wrong[0] |= pointers[0] != 0
            if wrong.any():
                raise self._damaged("sequence", start + int(np.argmax(wrong)))
        for start in range(0, boundaries, limit) if full else {0, boundaries - min(boundaries, limit)}:
            documents = self._documents[max(0, start - 1) : start + limit]
            wrong = np.append(documents[0] < 0, np.diff(documents) < 0) | (documents > sequences)
            if wrong.any():
                raise self._damaged("document", start + int(np.argmax(wrong)))
        if (int(self._documents[0]), int(self._documents[-1])) != (0, sequences):
            raise self._damaged("document", boundaries - 1)

    def _damaged(self, kind: str, index: int) -> StrettoError:
        return StrettoError(
            f"{self._path}: corrupt: {kind} {index} does not follow the one before it",
            hint="copy it again, or build it again",
        )

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, key: Any) -> Any:
        sequences = self._documents[key]
        within = np.minimum(sequences, len(self._pointers) - 1)
        first = np.where(sequences < len(self._pointers), self._pointers[within] // self._item, self.tokens)
        return int(first) if first.ndim == 0 else first


class MegatronWriter:
    """Writes an indexed dataset as Megatron's builder does from `tools/preprocess_data.py --append-eod`: each
    document is one sequence that ends with the end of text. The tokenizer is left beside it, as
    `PREFIX.tokenizer.json`. Without a tokenizer, sequences are written as they are.

        with MegatronWriter(prefix, tokenizer) as writer:
            writer.add(ids, ends=True)
            writer.commit()

    Nothing appears at `prefix` before the commit.
    """

    def __init__(self, prefix: Path, tokenizer: Tokenizer | None = None) -> None:
        self.tokens = 0
        self.documents = 0
        self.skipped = 0
        self.blank = 0
        self.bad_rows: dict[str, Any] | None = None
        self._prefix, self._tokenizer = prefix, tokenizer
        small = tokenizer is not None and tokenizer.vocab_size < _UINT16_BELOW
        self._code, self._dtype = (8, np.dtype("<u2")) if small else (4, np.dtype("<i4"))
        self._partial = PartialFolder(prefix)
        self._lengths = array("i")
        self._length = 0
        self._within = False

    def __enter__(self) -> MegatronWriter:
        with ExitStack() as stack:
            folder = stack.enter_context(self._partial).path
            self._bin = stack.enter_context(SummedFile(folder / BIN))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, ids: Sequence[int] | NDArray[np.integer], ends: bool) -> None:
        """Append ids to the current document, after the begin of text if it is a new one and texts begin with
        one; `ends` closes it with the end of text.
        """
        begin = [] if self._within or self._tokenizer is None else self._tokenizer.begin
        end = [self._tokenizer.endoftext] if ends and self._tokenizer is not None else []
        self._within = not ends
        data = np.concatenate([begin, np.asarray(ids), end]).astype(self._dtype)
        self._bin.write(data.tobytes())
        self.tokens += len(data)
        self._length += len(data)
        if ends:
            if self._length >= 1 << 31:
                raise StrettoError(
                    f"document {self.documents} has {self._length} tokens, and a Megatron dataset holds less"
                    " than 2^31 in one",
                    hint="cut the text into documents",
                )
            self._lengths.append(self._length)
            self._length = 0
            self.documents += 1

    def commit(self) -> None:
        """Make the files durable and rename them to their places, the index last."""
        assert self.documents, "no documents"
        assert not self._length, "the last document has no end"
        self._bin.close()
        lengths = np.frombuffer(self._lengths, dtype=np.int32).astype("<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
        with SummedFile(self._partial.path / IDX) as index:
            index.write(
                _HEADER.pack(MAGIC, VERSION, self._code, self.documents, self.documents + 1)
                + lengths.tobytes()
                + np.append(np.int64(0), ends[:-1]).astype("<i8").tobytes()
                + np.arange(self.documents + 1, dtype="<i8").tobytes()
            )
            index.close()
        companions = [] if self._tokenizer is None else [_TOKENIZER_SUFFIX, _CONFIG_SUFFIX]
        if self._tokenizer is not None:
            self._tokenizer.save(self._partial.path / _TOKENIZER_SUFFIX)
            (self._partial.path / _CONFIG_SUFFIX).write_bytes(self._tokenizer.config_bytes({}))
        for suffix in (*companions, BIN, IDX):
            (self._partial.path / suffix).replace(dataset_file(self._prefix, suffix))
