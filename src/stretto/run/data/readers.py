"""Read one file as documents: plain text, JSON lines or Parquet, in constant memory.

A document comes as one or more pieces of up to 262,144 characters, so that a text of any length fits in
memory and a long one is still encoded on all cores. Pieces are cut between a word and the line end after it:
GPT-2's word pattern never reaches across that place, so its byte-level BPE gives the same tokens for the
pieces as for the whole. Other tokenizers get a document as a whole (`whole_documents`).
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

from stretto.errors import StrettoError, nearest
from stretto.run.data.remote import Place

PIECE = 1 << 18
_TAIL = 1 << 14
_LINE_END = re.compile(r"\S(?=\r?\n)")
_WORD_END = re.compile(r"\S(?=\s)")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one document's text.

    Attributes:
        ends: this is the document's last piece.
        blank: the document has no text but white space; this is its only piece.
    """

    name: str
    text: str
    ends: bool
    blank: bool = False


class EncodingError(StrettoError):
    """A file that is not UTF-8."""


def read_documents(path: Place, name: str, field: str) -> Iterator[Piece]:
    """The documents of one file, in the file's order; a blank one is a single piece without text.

    `.jsonl` (also `.jsonl.gz`) and `.parquet` hold one document a row in `field`; any other file is one
    document of UTF-8 text, and is unpacked first if it ends in `.gz`.

    Raises:
        StrettoError: unreadable file or encoding (byte offset), a row without the field (row number).
    """
    suffixes = [s.lower() for s in path.suffixes]
    kind = suffixes[-2:-1] if suffixes[-1:] == [".gz"] else suffixes[-1:]
    if suffixes[-1:] == [".parquet"]:
        yield from _read_parquet(path, name, field)
    elif kind == [".jsonl"]:
        yield from _read_jsonl(path, name, field)
    else:
        with opened(path) as file:
            yield from _pieces(name, _decoded(path, file))


@contextmanager
def opened(path: Place) -> Generator[IO[bytes]]:
    """The file's bytes, unpacked; what goes wrong while reading becomes a StrettoError."""
    try:
        with path.open("rb") as file:
            yield cast(IO[bytes], gzip.GzipFile(fileobj=file) if path.suffix.lower() == ".gz" else file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise StrettoError(f"{path}: damaged gzip file ({error})", hint="copy or pack it again") from None
    except OSError as error:
        raise unreadable(path, error) from None


@contextmanager
def opened_parquet(path: Place) -> Generator[Any]:
    """A `pyarrow.parquet.ParquetFile`; what goes wrong while reading becomes a StrettoError."""
    try:
        import pyarrow as arrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise StrettoError(
            f"{path}: reading Parquet takes the package pyarrow", hint="pip install 'stretto[parquet]'"
        ) from None
    try:
        with path.open("rb") as content, parquet.ParquetFile(content) as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from None
    except arrow.ArrowException as error:
        raise StrettoError(f"{path}: damaged Parquet file ({error})", hint="copy or write it again") from None


def unreadable(path: Place, error: OSError) -> StrettoError:
    """The error message for a file that cannot be read."""
    return StrettoError(f"{path}: cannot be read: {error.strerror or error}", hint="check its permissions")


def _decoded(path: Place, file: IO[bytes]) -> Iterator[str]:
    """The file's text in blocks, less a byte-order mark."""
    start = 0
    pending = b""
    head = True
    while True:
        block = file.read(PIECE)
        data = pending + block
        try:
            text, used = codecs.utf_8_decode(data, "strict", not block)
        except UnicodeDecodeError as error:
            raise _undecodable(path, start, data, error.start) from None
        yield text.removeprefix("\ufeff") if head else text
        if not block:
            return
        start = start + used
        pending = data[used:]
        head = False


def _undecodable(path: Place, start: int, data: bytes, at: int) -> EncodingError:
    """`at` is the bad byte within `data`, which begins `start` bytes into the (unpacked) file."""
    wide = start == 0 and data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    guess = "UTF-16" if wide else "ISO-8859-1"
    return EncodingError(
        f"{path}: not UTF-8 at byte {start + at} (0x{data[at]:02x})",
        hint=f"re-encode it as UTF-8; if it is {guess}: iconv -f {guess} -t UTF-8 FILE > NEW",
    )


def _cut(text: str) -> int:
    """Where to cut a long text: before the last line end in reach, else the last space, else at its end."""
    tail = max(0, len(text) - _TAIL)
    for pattern in (_LINE_END, _WORD_END):
        ends = [match.end() for match in pattern.finditer(text, tail)]
        if ends:
            return ends[-1]
    return len(text)


def _pieces(name: str, blocks: Iterable[str]) -> Iterator[Piece]:
    """One document's blocks of text as pieces."""
    held, begun = "", False
    for block in blocks:
        held += block
        start = 0
        while len(held) - start > PIECE:
            text = held[start : start + PIECE]
            text = text[: _cut(text)]
            yield Piece(name, text, ends=False)
            start += len(text)
            begun = True
        held = held[start:]
    if begun or held.strip():
        yield Piece(name, held, ends=True)
    else:
        yield Piece(name, "", ends=True, blank=True)


def whole_documents(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same documents, each as one piece."""
    parts = list[str]()
    for piece in pieces:
        if piece.ends and not parts:
            yield piece
            continue
        parts.append(piece.text)
        if piece.ends:
            yield Piece(piece.name, "".join(parts), ends=True)
            parts = []


def read_rows(path: Place) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a `.jsonl` (also `.jsonl.gz`) or `.parquet` file, and where each is, for messages. Empty
    lines are left out.

    Raises:
        StrettoError: another kind of file; not readable; a line that is no JSON object or not valid Unicode.
    """
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes[-1:] == [".parquet"]:
        yield from _parquet_rows(path)
        return
    if ".jsonl" not in suffixes[-2:]:
        raise StrettoError(
            f"{path}: conversations are read from .jsonl, .jsonl.gz and .parquet files",
            hint="write one JSON object a line into a .jsonl file",
        )
    for number, text in _lines(path):
        if text.strip():
            where = f"{path}, line {number}"
            row = _object(text, where, "messages")
            if "\\u" in text:  # only an escape can spell half a surrogate pair
                _check_unicode(json.dumps(row, ensure_ascii=False), where)
            yield where, row


def _read_jsonl(path: Place, name: str, field: str) -> Iterator[Piece]:
    for number, text in _lines(path):
        content = _field(text, field, f"{path}, line {number}") if text.strip() else ""
        yield from _pieces(f"{name}:{number}", [content])


def _lines(path: Place) -> Iterator[tuple[int, str]]:
    """The lines of a file of UTF-8 text, from 1."""
    offset = 0
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _undecodable(path, offset, line, error.start) from None
            offset += len(line)


def _object(line: str, where: str, field: str) -> dict[str, Any]:
    """The JSON object in a line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StrettoError(f"{where}: not JSON ({error})", hint="write one JSON object a line") from None
    if not isinstance(row, dict):
        raise StrettoError(f"{where}: a JSON {type(row).__name__}, not an object", hint=f'{{"{field}": ...}}')
    return cast(dict[str, Any], row)


def _field(line: str, field: str, where: str) -> str:
    """The text in one JSON line."""
    row = _object(line, where, field)
    value = row.get(field)
    if not isinstance(value, str):
        raise _no_field(where, field, row)
    _check_unicode(value, f"{where}: field {field!r}")
    return value


def _check_unicode(text: str, what: str) -> None:
    """Check text from JSON, whose escapes can spell what is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EncodingError(
            f"{what} holds half a surrogate pair at character {error.start}",
            hint="write the line again from valid Unicode text",
        ) from None


def _no_field(where: str, field: str, row: Iterable[str]) -> StrettoError:
    columns = list(row)
    if field in columns:
        return StrettoError(f"{where}: field {field!r} is not text", hint=_text_field("NAME"))
    if "messages" in columns:
        return StrettoError(
            f"{where}: no field {field!r}, but messages",
            hint="conversations: say data.chat=assistant in a config, or --chat assistant",
        )
    close = nearest(field, columns) or (columns[0] if columns else None)
    hint = f"fields are {', '.join(columns[:8])}: {_text_field(close)}" if close else "it is empty"
    return StrettoError(f"{where}: no field {field!r}", hint=hint)


def _text_field(name: str) -> str:
    """How a config and a command name the field of the text."""
    return f"say data.text_field={name} in a config, or --text-field {name}"


def _parquet_rows(path: Place) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    with opened_parquet(path) as file:
        for batch in file.iter_batches(batch_size=256):
            for row in cast(list[dict[str, Any]], batch.to_pylist()):
                number += 1
                yield f"{path}, row {number}", row


def _read_parquet(path: Place, name: str, field: str) -> Iterator[Piece]:
    with opened_parquet(path) as file:
        columns = {column.name: column.type for column in file.schema_arrow}
        if field not in columns or str(columns[field]) not in ("string", "large_string"):
            raise _no_field(str(path), field, columns)
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            for value in cast(list[str | None], batch.column(0).to_pylist()):
                row += 1
                yield from _pieces(f"{name}:{row}", [value or ""])
