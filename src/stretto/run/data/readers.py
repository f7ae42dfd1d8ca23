"""Read one file as documents: plain text, JSON, CSV or Parquet, in constant memory.

A plain text comes as pieces of up to 262,144 characters, so that one of any length fits in memory. They are
cut anywhere; `run/data/cuts.py` cuts them where their tokens stay the same.
A JSON array is read element by element: memory is that of the longest element.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any, cast

from stretto.errors import StrettoError, counted, nearest
from stretto.run.config.data import InputFormat, ReadOptions
from stretto.run.data.cuts import ExactCuts
from stretto.run.data.file_format import HEAD, detect_format, not_text, undecodable
from stretto.run.data.remote import Place
from stretto.run.data.row_errors import RowError, RowErrors
from stretto.run.data.unpacking import is_damage, packing_of, unpacked

_LONGEST_TOKEN = 16  # characters of -Infinity, of a pair of escapes
_SPACE = re.compile(r"[ \t\r\n]*")


def _may_be_cut_off(error: Exception, length: int) -> bool:
    """Return True if more text could mend the error: it is at the end, or in a string that has not ended.

    Without this a mistake in the first element would read all of a large file into memory.
    """
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.pos > length - _LONGEST_TOKEN or error.msg.startswith("Unterminated string")


def array_elements(path: object, blocks: Iterable[str]) -> Iterator[Any]:
    """Yield the elements of the array whose text comes in blocks.

    Raises:
        StrettoError: not JSON, with the number of the element; or something before or after the array.
    """
    source = iter(blocks)
    text, at = "", 0
    number = 0
    decoder = json.JSONDecoder()

    def more() -> bool:
        """Read as much again as is waiting, so that a long element is parsed few times."""
        nonlocal text, at
        parts = [text[at:]]
        wanted = max(len(parts[0]), 1)
        while wanted > 0 and (block := next(source, None)) is not None:
            parts.append(block)
            wanted -= len(block)
        text, at = "".join(parts), 0
        return len(parts) > 1

    def next_character() -> str:
        """Return the next character that is no white space, without consuming it; empty at the end."""
        nonlocal at
        while True:
            at = _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if at < len(text) or not more():
                return text[at : at + 1]

    def broken(reason: str) -> StrettoError:
        return StrettoError(f"{path}, element {number}: not JSON ({reason})", hint="write the array again")

    if next_character() != "[":
        raise StrettoError(
            f"{path}: not an array of JSON objects", hint="write one object a line, or an array"
        )
    at += 1
    if next_character() == "]":
        at += 1
    else:
        while True:
            number += 1
            next_character()
            while True:
                try:
                    element, end = decoder.raw_decode(text, at)
                except (ValueError, RecursionError) as error:
                    if _may_be_cut_off(error, len(text)) and more():
                        continue
                    raise broken(str(error)) from None
                if end < len(text) or not more():  # a number may continue in the next block
                    break
            yield element
            at = end
            separator = next_character()
            at += 1
            if separator == "]":
                break
            if separator != ",":
                raise broken(f"{separator!r} after it" if separator else "it ends within the array")
    if next_character():
        raise StrettoError(
            f"{path}: text after the JSON array", hint="write one array, or one JSON object a line"
        )


Row = tuple[int, dict[str, Any] | RowError | None]
"""The number of a row, and its fields; or its error, or None if it is blank."""
PIECE = 1 << 18
_REACH = 1 << 14  # characters in which a place to cut is looked for
_LONGEST_FIRST_LINE = 1 << 24  # bytes, to see whether it is JSON
_LONGEST_CELL = 1 << 30  # characters; the library's own limit is 131,072


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A run of one document's text.

    Attributes:
        ends: this is the document's last piece.
        blank: the document has no text but white space; this is its only piece.
    """

    name: str
    text: str
    ends: bool
    blank: bool = False


def read_documents(path: Place, name: str, reading: ReadOptions, errors: RowErrors) -> Iterator[TextPiece]:
    """Yield the documents of one file, in the file's order; a blank one is a single piece without text.

    Plain text is one document; of other formats every row is one: the text in its field `reading.text_field`.

    Raises:
        StrettoError: unreadable file, format or encoding (byte offset); a bad row (its number), unless
            `errors` leaves it out.
    """
    kind, field = _format_of(path, reading), reading.text_field
    if kind == "text":
        with opened(path) as file:
            yield from _pieces(name, _decoded(path, file))
        return
    errors.begin_file()
    rows = _parquet_rows(path, [field]) if kind == "parquet" else _rows(path, kind, field)
    unit = _UNITS[kind]
    for number, row in rows:
        errors.rows += row is not None
        content, location = "" if row is None else row, f"{path}, {unit} {number}"
        if isinstance(content, dict):
            value = content.get(field)
            if isinstance(value, str):
                content = _invalid_unicode(value, f"{location}: field {field!r}") or value
            else:
                content = _no_field(location, field, content)
        if isinstance(content, RowError):
            errors.skip(content)
        else:
            yield from _pieces(f"{name}:{number}", [content])
    errors.end_file()


def read_rows(path: Place, reading: ReadOptions, errors: RowErrors) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a file of JSON or Parquet with their places, for messages. Empty lines are left out.

    Raises:
        StrettoError: another format; not readable; a row that is no JSON object or not valid Unicode, unless
            `errors` leaves it out.
    """
    kind = _format_of(path, reading)
    if kind not in ("jsonl", "json", "parquet"):
        raise StrettoError(
            f"{path}: conversations are read from JSON lines, JSON arrays and Parquet, and this is {kind}",
            hint="write one JSON object a line into a .jsonl file",
        )
    errors.begin_file()
    for number, row in _parquet_rows(path, None) if kind == "parquet" else _rows(path, kind, "messages"):
        errors.rows += row is not None
        location = f"{path}, {_UNITS[kind]} {number}"
        if isinstance(row, dict) and kind != "parquet":
            row = _invalid_unicode(json.dumps(row, ensure_ascii=False), location) or row
        if isinstance(row, RowError):
            errors.skip(row)
        elif row is not None:
            yield location, row
    errors.end_file()


_UNITS = {"jsonl": "line", "csv": "line", "tsv": "line", "json": "element", "parquet": "row"}


def _format_of(path: Place, reading: ReadOptions) -> InputFormat:
    """Return the format of a file: the configured one, else by its content and its name.

    Raises:
        StrettoError: not text, or text that may be read in two ways.
    """
    if reading.input_format == "parquet":
        return "parquet"
    with opened(path) as file:
        head = file.read(HEAD)
        if head.lstrip()[:1] in (b"{", b"[") and b"\n" not in head:
            head += file.readline(_LONGEST_FIRST_LINE)
        ends = not file.read(1)
    if reading.input_format is None:
        return detect_format(path, head, ends, reading.text_field)
    if (error := not_text(path, head)) is not None:
        raise error
    return reading.input_format


@contextmanager
def opened(path: Place) -> Generator[IO[bytes]]:
    """Open a file's bytes, unpacked; errors while reading become a StrettoError."""
    packing = None
    try:
        with path.open("rb") as file:
            content, packing = unpacked(path, file)
            yield content
    except StrettoError:
        raise
    except Exception as error:
        if packing is not None and is_damage(error):
            raise StrettoError(
                f"{path}: damaged {packing} file ({error})", hint="copy or pack it again"
            ) from None
        if isinstance(error, OSError):
            raise unreadable(path, error) from None
        raise


@contextmanager
def opened_parquet(path: Place) -> Generator[Any]:
    """Open a `pyarrow.parquet.ParquetFile`; errors while reading become a StrettoError."""
    try:
        import pyarrow as arrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise StrettoError(
            f"{path}: reading Parquet takes the package pyarrow", hint="pip install 'stretto[parquet]'"
        ) from None
    try:
        with path.open("rb") as content:
            if (packing := packing_of(content.read(16))) is not None:
                raise StrettoError(
                    f"{path}: Parquet within a file packed with {packing}",
                    hint="unpack it: Parquet is packed inside",
                )
            with parquet.ParquetFile(content) as file:
                yield file
    except OSError as error:
        raise unreadable(path, error) from None
    except arrow.ArrowException as error:
        raise StrettoError(f"{path}: damaged Parquet file ({error})", hint="copy or write it again") from None


def unreadable(path: Place, error: OSError) -> StrettoError:
    """Return the error for a file that cannot be read."""
    return StrettoError(f"{path}: cannot be read: {error.strerror or error}", hint="check its permissions")


def _decoded(path: Place, file: IO[bytes]) -> Iterator[str]:
    """Yield the file's text in blocks, without a byte-order mark."""
    start = 0
    pending = b""
    head = True
    while True:
        block = file.read(PIECE)
        data = pending + block
        try:
            text, used = codecs.utf_8_decode(data, "strict", not block)
        except UnicodeDecodeError as error:
            raise undecodable(path, start, data, error.start) from None
        yield text.removeprefix("\ufeff") if head else text
        if not block:
            return
        start = start + used
        pending = data[used:]
        head = False


def _pieces(name: str, blocks: Iterable[str]) -> Iterator[TextPiece]:
    """Yield one document's blocks of text as pieces."""
    waiting, begun = "", False
    for block in blocks:
        if waiting and block:
            yield TextPiece(name, waiting, ends=False)
            waiting, begun = "", True
        waiting += block
    blank = not begun and not waiting.strip()
    yield TextPiece(name, "" if blank else waiting, ends=True, blank=blank)


def cut_pieces(pieces: Iterable[TextPiece], cuts_of: Callable[[], ExactCuts | None]) -> Iterator[TextPiece]:
    """Yield the same documents in pieces of about `PIECE` characters whose tokens are those of the whole;
    each in one piece if no text may be cut.

    Args:
        cuts_of: returns the allowed cuts; called when a document is long.
    """
    cuts, waiting = None, ""
    searched = 0
    for piece in pieces:
        waiting += piece.text
        start = 0
        cuts = cuts_of() if len(waiting) > PIECE else cuts
        while cuts is not None and len(waiting) - start > PIECE and searched < len(waiting) - 1:
            first = start + PIECE
            stop = min(first if searched < first else searched + _REACH, len(waiting) - 1)
            at = cuts.last(waiting, max(start + 1, searched + 1, stop - _REACH), stop)
            searched = stop
            if at is not None:
                yield TextPiece(piece.name, waiting[start:at], ends=False)
                start = searched = at
        waiting, searched = waiting[start:], searched - start
        if piece.ends:
            yield replace(piece, text=waiting)
            waiting, searched = "", 0


def _rows(path: Place, kind: InputFormat, field: str) -> Iterator[Row]:
    """Yield the rows of a file of JSON lines, a JSON array or a table; `field` is named in hints."""
    if kind == "jsonl":
        for number, line, error in _lines(path):
            location = f"{path}, line {number}"
            if error is None and line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as problem:
                    hint = "write one JSON object a line"
                    yield number, RowError("not JSON", f"{location}: not JSON ({problem})", hint=hint)
                else:
                    yield number, _checked_object(row, location, field)
            else:
                yield number, error
    elif kind == "json":
        with opened(path) as file:
            for number, element in enumerate(array_elements(path, _decoded(path, file)), 1):
                yield number, _checked_object(element, f"{path}, element {number}", field)
    else:
        yield from _table_rows(path, "," if kind == "csv" else "\t", field)


def _lines(path: Place) -> Iterator[tuple[int, str, RowError | None]]:
    """Yield the lines of a file of UTF-8 text, numbered from 1, and the error of one that is not."""
    offset = 0
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            bad = None
            data = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                at = error.start + len(line) - len(data)
                fault = undecodable(f"{path}, line {number}", offset, line, at)
                bad = RowError("not UTF-8", fault.message, hint=fault.hint)
                text = data.decode(errors="replace")
            yield number, text, bad
            offset += len(line)


def _table_rows(path: Place, delimiter: str, field: str) -> Iterator[Row]:
    """Yield the rows of a table (RFC 4180; a quoted cell may hold delimiters and line ends), by the names in
    its first line.
    """
    bad = list[RowError]()  # lines of the row that is being read

    def texts() -> Iterator[str]:
        for _, line, error in _lines(path):
            bad.extend([error] if error is not None else [])
            yield line

    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        number, problem = reader.line_num + 1, None
        cells = list[str]()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):  # all lines since then would be lost
                raise StrettoError(
                    f"{path}, line {number}: a quotation mark that is not closed",
                    hint='close it, or double it: a mark within a quoted cell is written ""',
                ) from None
            problem = RowError(
                "not CSV", f"{path}, line {number}: not a row of cells ({error})", hint=_QUOTED
            )
        if bad:
            problem = bad[0]
            bad.clear()
        if names is None:
            if problem is not None:
                raise problem
            names = cells
            if field not in names:
                if len(names) == 1 and (mark := next((m for m in ";|,\t" if m in names[0]), None)):
                    raise StrettoError(
                        f"{path}, line {number}: {mark!r} separates cells, where {delimiter!r} must",
                        hint="cells are read if commas separate them in a .csv, or tabs in a .tsv",
                    )
                raise _no_field(f"{path}, line {number}", field, names)
            if names.count(field) > 1:
                raise StrettoError(
                    f"{path}, line {number}: {names.count(field)} columns {field!r}",
                    hint="rename one of them",
                )
        elif problem is None and cells and len(cells) != len(names):
            rule = f"{path}, line {number}: {counted(len(cells), 'cell')} for {counted(len(names), 'name')}"
            yield number, RowError("with too many or too few cells", rule, hint=_QUOTED)
        else:
            yield number, problem or (dict(zip(names, cells, strict=True)) if cells else None)


_QUOTED = 'quote a cell with a delimiter, line end or quotation mark in it, and double its marks: ""'


def _checked_object(row: object, location: str, field: str) -> dict[str, Any] | RowError:
    if isinstance(row, dict):
        return cast(dict[str, Any], row)
    kind = type(row).__name__
    return RowError("no object", f"{location}: a JSON {kind}, not an object", hint=f'{{"{field}": ...}}')


def _invalid_unicode(text: str, description: str) -> RowError | None:
    """Return the error for text from JSON whose escapes spell half a surrogate pair, or None if valid."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return RowError(
            "not Unicode",
            f"{description} holds half a surrogate pair at character {error.start}",
            hint="write the line again from valid Unicode text",
        )
    return None


def _no_field(location: str, field: str, row: Iterable[str]) -> RowError:
    columns = list(row)
    if field in columns:
        return RowError(
            "whose field is no text", f"{location}: field {field!r} is not text", hint=_text_field("NAME")
        )
    kind = "without the field"
    if "messages" in columns:
        return RowError(
            kind,
            f"{location}: no field {field!r}, but messages",
            hint="conversations: set data.chat=assistant in a config, or --chat assistant",
        )
    close = nearest(field, columns) or (columns[0] if columns else None)
    hint = f"fields are {', '.join(columns[:8])}: {_text_field(close)}" if close else "it is empty"
    return RowError(kind, f"{location}: no field {field!r}", hint=hint)


def _text_field(name: str) -> str:
    """Return how a config and a command name the field of the text."""
    return f"set data.text_field={name} in a config, or --text-field {name}"


def _parquet_rows(path: Place, columns: list[str] | None) -> Iterator[Row]:
    """Yield the rows of a Parquet file, with one column of text, or with all columns if None is named."""
    with opened_parquet(path) as file:
        types = {column.name: str(column.type) for column in file.schema_arrow}
        for name in columns or ():
            if types.get(name) not in ("string", "large_string"):
                raise _no_field(str(path), name, types)
        number = 0
        for batch in file.iter_batches(batch_size=1024 if columns else 256, columns=columns):
            for row in cast(list[dict[str, Any]], batch.to_pylist()):
                number += 1
                yield number, None if columns and row[columns[0]] is None else row
