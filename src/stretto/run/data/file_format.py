"""The format of a file of text, by its first bytes and its name.

The content decides if the two differ. A file that may be read in two ways is asked about (`data.format`),
and one that is not UTF-8 text is reported as what its bytes show it to be.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import PurePath
from typing import Any, cast

from stretto.errors import StrettoError
from stretto.run.config.data import InputFormat
from stretto.run.data.unpacking import SUFFIXES, packing_of

HEAD = 1 << 16
"""Bytes of the content that are read; of one line up to a hundred times as many."""
_BY_NAME: dict[str, InputFormat] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv"}
_TEXT_NAMES = (".txt", ".md", ".json", *_BY_NAME)
_UTF = (  # the longer mark first: that of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_PDF = b"%PDF-"  # may have no zero byte at its beginning
_BINARY = (
    *((0, magic, "a zip archive") for magic in (b"PK\x03\x04", b"PK\x05\x06")),
    (0, b"\x89PNG", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (0, _PDF, "a PDF document"),
    (0, b"\x7fELF", "a program"),
    (0, b"SQLite format 3\0", "an SQLite database"),
    (0, b"ARROW1\0\0", "an Arrow file"),
    (0, b"Obj\x01", "an Avro file"),
    (0, b"ORC", "an ORC file"),
    (0, b"\x89HDF\r\n", "an HDF5 file"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"Rar!\x1a\x07", "a RAR archive"),
    (0, b"\x04\x22\x4d\x18", "a file packed with LZ4"),
    (0, b"\x1f\x9d", "a file packed with compress"),
    (0, b"\xff\x06\0\0sNaPpY", "a file packed with Snappy"),
    (0, b"RIFF", "a sound or image"),
    (0, b"ID3", "a sound"),
    (4, b"ftyp", "a video"),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of an old office program"),
    (257, b"ustar", "a tar archive"),
)
_PRINTED = bytes([*b"\t\n\r", *range(0x20, 0x7F)])
# a text that names its own encoding, as XML, HTML and Python do
_DECLARED = re.compile(rb"""(?:coding|charset)\s*[=:]\s*["']?([A-Za-z0-9_.:-]{2,40})""")


class EncodingError(StrettoError):
    """A file that is not UTF-8."""


def not_text(path: object, head: bytes) -> EncodingError | None:
    """Return the error for a file whose first bytes are no text, or of another encoding that they show; None
    if they may be UTF-8.
    """
    for mark, name in _UTF:
        if head.startswith(mark):
            return _encoded(path, f"{name} text, by its byte-order mark", name)
    if b"\0" in head or head.startswith(_PDF):
        return (
            _binary(path, head)
            or _wide(path, head)
            or EncodingError(
                f"{path}: binary data (a zero byte at byte {head.index(0)})", hint="name files of text"
            )
        )
    if b"\x1b$B" in head or b"\x1b$@" in head:
        return _encoded(path, "ISO-2022-JP text, by its escapes", "ISO-2022-JP")
    return None


def is_binary(head: bytes) -> bool:
    """Return True if a file with these first bytes holds no text in any encoding."""
    text = head.startswith(tuple(mark for mark, _ in _UTF)) or _wide("", head) is not None
    return head.startswith(_PDF) or (b"\0" in head and not text)


def undecodable(path: object, start: int, data: bytes, position: int) -> EncodingError:
    """Return the error for data that begin `start` bytes into the (unpacked) file and are not UTF-8 at
    `position`.
    """
    bad = f"not UTF-8 at byte {start + position} (0x{data[position]:02x})"
    if start == 0:
        if (error := _binary(path, data)) is not None:
            return error
        if (match := _DECLARED.search(data[:1024])) is not None:  # the encoding that the text names
            name = match[1].decode()
            with suppress(LookupError, ValueError):  # the text is in another
                codecs.getincrementaldecoder(name)().decode(data)
                return _encoded(path, f"{bad}, but {name}, as it says itself", name)
    return EncodingError(
        f"{path}: {bad}", hint="find out its encoding, and write it again as UTF-8, or leave it out"
    )


def _encoded(path: object, description: str, encoding: str) -> EncodingError:
    """Return the error for a text whose encoding is certain."""
    return EncodingError(
        f"{path}: {description}", hint=f"re-encode it: iconv -f {encoding} -t UTF-8 FILE > NEW"
    )


def _binary(path: object, head: bytes) -> EncodingError | None:
    """Return the error for data of another kind; their first bytes alone may be those of a text."""
    packing = packing_of(head)
    kind = f"a file packed with {packing}, packed again" if packing else None
    kind = kind or next((kind for start, magic, kind in _BINARY if head[start:].startswith(magic)), None)
    return EncodingError(f"{path}: {kind}, not text", hint="unpack or convert it first") if kind else None


def _wide(path: object, head: bytes) -> EncodingError | None:
    """Return the error for UTF-16 without a mark: every second byte is zero, the others are printed ASCII."""
    for name, zeros, others in (("UTF-16LE", head[1::2], head[::2]), ("UTF-16BE", head[::2], head[1::2])):
        if len(head) >= 4 and not any(zeros) and not others.translate(None, _PRINTED):
            return _encoded(path, f"{name} text without a byte-order mark", name)
    return None


def detect_format(path: object, head: bytes, ends: bool, text_field: str) -> InputFormat:
    """Return the format of a file by the first bytes of its content and its name.

    Args:
        head: at least the first line, unless that is very long.
        ends: True if the file ends with it.
        text_field: the field of rows that holds the text.

    Raises:
        StrettoError: not text, or text that may be read in two ways.
    """
    if head.startswith(b"PAR1"):
        return "parquet"
    suffix = suffix_of(str(path))
    if suffix == ".parquet":
        raise StrettoError(
            f"{path}: damaged Parquet file (it does not begin with PAR1)", hint="copy or write it again"
        )
    if (error := not_text(path, head)) is not None:
        raise error
    text = head.decode("utf-8-sig", "ignore")
    lines = [line for line in (text if ends else text[: text.rfind("\n") + 1]).splitlines() if line.strip()]
    content = _json_format(text, lines)
    by_name = _BY_NAME.get(suffix)
    if by_name is not None:
        return content or by_name
    if suffix == ".json":
        if content is None:
            kinds = "neither lines that are JSON objects nor a JSON array of them"
            raise _ambiguous(path, kinds, "jsonl", "json")
        return content
    if content == "json":
        raise _ambiguous(path, "a JSON array of objects, but not named .json", "json")
    if content == "jsonl" and _all_objects(lines, text_field):
        raise _ambiguous(path, "every line is a JSON object, but it is not named .jsonl or .json", "jsonl")
    for name, delimiter in (("tsv", "\t"), ("csv", ",")):
        if _is_table(lines, delimiter, text_field):
            columns = f"rows of columns, one of them {text_field!r}"
            raise _ambiguous(path, f"{columns}, but it is not named .{name}", name)
    return "text"


def suffix_of(name: str) -> str:
    """Return the end of a name that tells the format, in small letters, without that of a packing program."""
    suffixes = [suffix.lower() for suffix in PurePath(name).suffixes]
    while suffixes[-1:] and suffixes[-1] in SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def is_named_text(name: str) -> bool:
    """Return True if a file's name promises text: with other content it is refused, not skipped."""
    return suffix_of(name) in _TEXT_NAMES


def _ambiguous(path: object, description: str, *formats: str) -> StrettoError:
    options = ", ".join((*formats, "text"))
    return StrettoError(
        f"{path}: {description}: the format is not clear",
        hint=f"name it: data.format=NAME in a config, or --input-format NAME, one of {options}",
    )


def _json_format(text: str, lines: Sequence[str]) -> InputFormat | None:
    """Return the kind of JSON by the start of a text and its complete lines: an array of objects, or lines
    that are objects.
    """
    if re.match(r"\s*\[\s*(\{|\]\s*$)", text):
        return "json"
    if not text.lstrip().startswith("{"):
        return None
    # without a line: one that is longer than what was read
    return "jsonl" if not lines or _object(lines[0]) is not None else None


def _object(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, Any], row) if isinstance(row, dict) else None


def _all_objects(lines: Sequence[str], text_field: str) -> bool:
    """Return True if lines are rows: several that are all objects, or one that has the field."""
    if len(lines) == 1:
        return text_field in (_object(lines[0]) or ())
    return all(_object(line) is not None for line in lines)


def _is_table(lines: Sequence[str], delimiter: str, text_field: str) -> bool:
    """Return True if lines begin with a row of names, one of them the field, and a row of as many cells."""
    try:
        rows = list(islice(csv.reader(lines, delimiter=delimiter), 2))
    except csv.Error:
        return False
    return len(rows) == 2 and len(rows[0]) == len(rows[1]) > 1 and text_field in rows[0]
