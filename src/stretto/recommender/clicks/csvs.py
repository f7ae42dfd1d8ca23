"""Click logs as CSV with a header line. Values of features are text; no field may hold a line end."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.recommender.clicks.columns import Cells, Named, chunk_of
from stretto.recommender.clicks.parquets import cells_of
from stretto.recommender.clicks.raw import Columns, Parsed, Piece, text_keys
from stretto.recommender.clicks.text import blocks

_BLOCK = 1 << 22


class CsvReader:
    """Reads files that have the columns of the first, in any order; fields stand between commas, or between
    tabs where the header does."""

    def __init__(self, first: Path, named: Named) -> None:
        """Look at the header of `first`.

        Raises:
            StrettoError: unreadable, or a column is not there.
        """
        self._label = named.label
        numbers, features = named.of(_header(first)[0], str(first))
        count = len(features)
        self.columns = Columns(numbers, features, ("text",) * count, (False,) * count)

    def read(self, path: Path, start: int = 0, line: int = 1) -> Iterator[Piece]:
        """See Reader."""
        header, mark, length = _header(path)
        Named(self._label, self.columns.numbers, self.columns.features).of(header, str(path))
        if not start:
            start, line = length, 2
        for block in blocks(path, start, line, _BLOCK):
            parsed = self._parse(block.data, block.line, header, mark)
            yield Piece(parsed, block.end, block.line + parsed.lines)

    def _parse(self, data: bytes, line: int, header: Sequence[str], mark: str) -> Parsed:
        quick = _quick(data, self._label, self.columns, header, mark)
        return self._slow(data, line, header, mark) if quick is None else quick

    def _slow(self, data: bytes, line: int, header: Sequence[str], mark: str) -> Parsed:
        text = data.decode("utf-8", "surrogateescape").removesuffix("\n")
        lines = text.split("\n") if data else []
        rows = list[list[str]]()
        at = list[int]()
        faults = list[tuple[int, str]]()
        blank = 0
        for number, each in enumerate(lines, line):
            row = _fields(each.removesuffix("\r"), mark)
            if not row:
                blank += 1
            elif len(row) == len(header):
                rows.append(row)
                at.append(number)
            else:
                faults.append((number, f"{len(row)} columns, not {len(header)}"))
        cells = dict(zip(header, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(header, ())
        wrong = dict[int, str]()
        labels = _numbers(self._label, cells[self._label], wrong)
        numbers = [_numbers(name, cells[name], wrong) for name in self.columns.numbers]
        dense = np.stack(numbers, axis=1) if numbers else np.zeros((len(rows), 0))
        chunk, more = chunk_of(
            self.columns, labels, dense, [_keys(cells[name]) for name in self.columns.features], wrong
        )
        return Parsed(chunk, len(lines), blank, sorted(faults + [(at[i], why) for i, why in more]))


def _quick(data: bytes, label: str, columns: Columns, header: Sequence[str], mark: str) -> Parsed | None:
    """A block by pyarrow; None where that is not here, or anything about the block is unusual."""
    lines, returns = data.count(b"\n") + (not data.endswith(b"\n")), data.count(b"\r")
    if b'"' in data or returns not in (0, data.count(b"\r\n")):
        return None
    try:
        import pyarrow as arrow  # pyright: ignore[reportMissingImports]
        from pyarrow import csv as arrow_csv  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    wanted = [label, *columns.numbers, *columns.features]
    try:
        table = arrow_csv.read_csv(
            arrow.BufferReader(data),
            arrow_csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=list(header)),
            arrow_csv.ParseOptions(delimiter=mark, quote_char=False),
            arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(wanted, arrow.string()),
                include_columns=wanted,
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
        arrays = dict(zip(wanted, (arrow.concat_arrays(each.chunks) for each in table.columns), strict=True))
        numbers = [arrays[name].cast(arrow.float64()) for name in (label, *columns.numbers)]
    except (arrow.ArrowException, KeyError):
        return None
    blank = lines - table.num_rows
    if blank != sum(not each.strip(b"\r") for each in data.removesuffix(b"\n").split(b"\n")):
        return None
    labels, *dense = (each.to_numpy(zero_copy_only=False) for each in numbers)
    stacked = np.stack(dense, axis=1) if dense else np.zeros((len(labels), 0))
    cells = [cells_of(arrays[name], "text", False) for name in columns.features]
    chunk, faults = chunk_of(columns, labels, stacked, cells, {})
    # which line a fault is in takes the slow way
    return None if faults else Parsed(chunk, lines, blank)


def _fields(line: str, mark: str) -> list[str]:
    """The fields of a line; none of a blank one; one of what is no CSV."""
    try:
        return next(csv.reader([line], delimiter=mark), [])
    except csv.Error:
        return [line]


def _numbers(name: str, cells: Sequence[str], wrong: dict[int, str]) -> NDArray[np.float64]:
    """Numbers, NaN for empty cells; `wrong` gets the samples with what is none."""
    try:
        return np.array([cell or "nan" for cell in cells], np.str_).astype(np.float64)
    except ValueError:
        numbers = np.full(len(cells), np.nan)
        for i, cell in enumerate(cells):
            try:
                numbers[i] = float(cell or "nan")
            except ValueError:
                wrong.setdefault(i, f"{name} is {cell[:20]!r}, not a number")
        return numbers


def _keys(cells: Sequence[str]) -> Cells:
    distinct = list(dict.fromkeys(cells))
    numbers = dict(zip(distinct, range(len(distinct)), strict=True))
    keys = text_keys(distinct)
    if "" in numbers:
        keys[numbers[""]] = 0
    which = np.fromiter((numbers[cell] for cell in cells), np.int64, len(cells))
    return keys[which], which == numbers.get("", -1), None


def _header(path: Path) -> tuple[list[str], str, int]:
    """Names of the columns, what stands between them, and the length of the header in bytes."""
    for block in blocks(path, size=1 << 16):
        line, _, _ = block.data.partition(b"\n")
        try:
            text = line.decode("utf-8-sig").removesuffix("\r")
        except UnicodeDecodeError:
            raise StrettoError(f"{path}: its first line is not UTF-8", hint="is it a CSV file?") from None
        mark = "\t" if "\t" in text else ","
        return [name.strip() for name in _fields(text, mark)], mark, len(line) + 1
    raise StrettoError(f"{path}: empty file", hint="a CSV file begins with a line of column names")
