"""Click logs whose columns have names: Parquet and CSV with a header line."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError, counted, nearest
from stretto.recommender.clicks.folder import runs
from stretto.recommender.clicks.raw import (
    Columns,
    Keys,
    Parsed,
    ParsedBlock,
    RawChunk,
    line_blocks,
    text_keys,
)
from stretto.run.data.readers import opened_parquet

Cells = tuple[NDArray[np.uint64], NDArray[np.bool_], NDArray[np.int64] | None]
"""A feature's keys, which of them are missing, and their number per sample; None if each sample has one."""


@dataclass(frozen=True)
class ColumnNames:
    """Names of the columns to read.

    Attributes:
        label: the label's column, or None if samples have no labels.
        numbers: dense columns; by default I1, I2, ...
        features: categorical columns; by default C1, C2, ...
    """

    label: str | None = "label"
    numbers: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The label's column, if there is one."""
        return () if self.label is None else (self.label,)

    def find(self, header: Sequence[str], file: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the dense and the categorical columns among a file's.

        Raises:
            StrettoError: a column that does not exist or is ambiguous, or no features.
        """
        numbers = _numbered(header, "I") if self.numbers is None else self.numbers
        features = _numbered(header, "C") if self.features is None else self.features
        names = [*self.labels, *numbers, *features]
        for name in names:
            if name not in header:
                close = nearest(name, header)
                raise StrettoError(
                    f"{file}: no column {name!r}",
                    hint=f"columns are {', '.join(list(header)[:12])}"
                    + (f"; did you mean {close}?" if close else ""),
                )
            if list(header).count(name) > 1:
                raise StrettoError(
                    f"{file}: {list(header).count(name)} columns are named {name!r}",
                    hint="rename all but one of them",
                )
        if not features:
            raise StrettoError(
                f"{file}: no features: no column is named C1, C2, ...",
                hint=f"name them: --features {','.join(list(header)[1:3]) or 'NAME,NAME'}",
            )
        if len(set(names)) < len(names):
            raise StrettoError(f"{file}: a column is named twice", hint="label, numbers and features differ")
        return tuple(numbers), tuple(features)

    def find_unread(self, header: Sequence[str], file: Path) -> tuple[str, ...]:
        """Return the columns of a file that are not read."""
        numbers, features = self.find(header, file)
        return tuple(name for name in header if name not in (*self.labels, *numbers, *features))


def build_chunk(
    columns: Columns,
    labels: NDArray[np.float64] | None,
    numbers: NDArray[np.float64],
    cells: Sequence[Cells],
    wrong: Mapping[int, str],
) -> tuple[RawChunk, list[tuple[int, str]]]:
    """Return the valid samples, and (sample, reason) of the invalid ones.

    `wrong` are samples already found to be invalid; the others must have finite numbers and, if there are
    labels, 0 or 1 as theirs.
    """
    problems = dict(wrong)
    samples = len(numbers)
    for i in () if labels is None else np.flatnonzero((labels != 0) & (labels != 1)).tolist():
        assert labels is not None
        problems.setdefault(
            i, "the label is missing" if np.isnan(labels[i]) else f"label {labels[i]}, not 0 or 1"
        )
    for i in np.flatnonzero(np.isinf(numbers).any(axis=1)).tolist():
        problems.setdefault(i, "a number is infinite")
    # from feature by feature to sample by sample
    by_sample = None
    if all(lengths is None for _, _, lengths in cells):
        keys = np.stack([keys for keys, _, _ in cells], axis=1).reshape(-1)
        missing = np.stack([missing for _, missing, _ in cells], axis=1).reshape(-1)
    else:
        single = np.ones(samples, np.int64)
        lengths = np.stack([single if counts is None else counts for _, _, counts in cells])
        starts = (np.cumsum(lengths) - lengths.reshape(-1)).reshape(lengths.shape)
        by_sample = np.ascontiguousarray(lengths.T)
        order = runs(np.ascontiguousarray(starts.T), by_sample)
        keys = np.concatenate([keys for keys, _, _ in cells])[order]
        missing = np.concatenate([missing for _, missing, _ in cells])[order]
    chunk = RawChunk(
        columns=columns,
        numbers=numbers,
        keys=keys,
        missing=missing,
        lengths=by_sample,
        labels=None if labels is None else (labels == 1).astype(np.uint8),
    )
    if problems:
        good = np.ones(samples, bool)
        good[list(problems)] = False
        chunk = chunk.select(good)
    return chunk, sorted(problems.items())


def _numbered(header: Sequence[str], letter: str) -> tuple[str, ...]:
    """Columns with Criteo's names, in numerical order."""
    numbered = [name for name in header if re.fullmatch(letter + "[0-9]{1,6}", name)]
    return tuple(sorted(numbered, key=lambda name: int(name[1:])))


_ROWS = 1 << 15


class ParquetReader:
    """Reads files that have the columns of the first, in any order."""

    def __init__(self, first: Path, names: ColumnNames) -> None:
        """Read the schema of `first`.

        Raises:
            StrettoError: no pyarrow, an unreadable file, or a column that is missing or of a wrong type.
        """
        with opened_parquet(first) as file:
            schema = file.schema_arrow
            numbers, features = names.find(schema.names, first)
            types = [_value_type(schema.field(name).type, name, first) for name in features]
        self.unread = names.find_unread(schema.names, first)
        keys, lists = (tuple(column) for column in zip(*types, strict=True))
        self.columns = Columns(numbers, features, keys, lists)
        self._names = ColumnNames(names.label, numbers, features)

    def read(self, path: Path, start: int = 0, line: int = 1) -> Iterator[ParsedBlock]:
        """See LogReader; `start` counts rows, and `line` is start + 1."""
        names = [*self._names.labels, *self.columns.numbers, *self.columns.features]
        with opened_parquet(path) as file:
            schema = file.schema_arrow
            self._names.find(schema.names, path)
            for name, keys, is_list in zip(
                self.columns.features, self.columns.keys, self.columns.lists, strict=True
            ):
                if _value_type(schema.field(name).type, name, path) != (keys, is_list):
                    raise StrettoError(
                        f"{path}: column {name!r} is {schema.field(name).type}, in the first file it is not",
                        hint="a column has the same type in all files of a log",
                    )
            done = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if done + rows <= start:
                    done += rows
                    continue
                for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=names):
                    unread = batch.slice(max(0, start - done))
                    done += batch.num_rows
                    if unread.num_rows:
                        parsed = self._parse(unread, done - unread.num_rows + 1)
                        yield ParsedBlock(parsed, done, done + 1)

    def _parse(self, batch: Any, line: int) -> Parsed:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        numbers = [_number_column(columns[name], name) for name in self.columns.numbers]
        dense = np.stack(numbers, axis=1) if numbers else np.zeros((batch.num_rows, 0))
        cells = [
            read_cells(columns[name], keys, is_list)
            for name, keys, is_list in zip(
                self.columns.features, self.columns.keys, self.columns.lists, strict=True
            )
        ]
        label = self._names.label
        labels = None if label is None else _number_column(columns[label], label)
        chunk, faults = build_chunk(self.columns, labels, dense, cells, {})
        return Parsed(chunk, batch.num_rows, 0, [(line + i, reason) for i, reason in faults])


def _value_type(type_: Any, name: str, path: Path) -> tuple[Keys, bool]:
    """Return the type of a feature's values, and True if a sample has a list of them."""
    import pyarrow.types as types  # pyright: ignore[reportMissingImports]

    is_list = types.is_list(type_) or types.is_large_list(type_)
    value = type_.value_type if is_list else type_
    if types.is_dictionary(value):
        value = value.value_type
    if types.is_integer(value):
        return "int", is_list
    if types.is_string(value) or types.is_large_string(value):
        return "text", is_list
    raise StrettoError(
        f"{path}: column {name!r} is {type_}, not integers, text, or lists of them",
        hint="write it as one of these, or name it under --numbers",
    )


def _number_column(column: Any, name: str) -> NDArray[np.float64]:
    """Convert a column to numbers, NaN for nulls."""
    import pyarrow as arrow  # pyright: ignore[reportMissingImports]

    if arrow.types.is_boolean(column.type):
        column = column.cast(arrow.int8())
    if not (arrow.types.is_integer(column.type) or arrow.types.is_floating(column.type)):
        raise StrettoError(
            f"column {name!r} is {column.type}, not numbers", hint="name numbers with --numbers A,B,..."
        )
    return column.cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False).copy()


def read_cells(column: Any, keys: Keys, is_list: bool) -> Cells:
    """Read a feature's values from an arrow array."""
    lengths = None
    if is_list:
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        column = column.flatten()
    missing = column.is_null().to_numpy(zero_copy_only=False)
    if keys == "text":
        encoded = column if hasattr(column, "dictionary") else column.dictionary_encode()
        distinct = text_keys([value or "" for value in encoded.dictionary.to_pylist()])
        indices = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
        values = distinct[indices] if len(distinct) else np.zeros(len(indices), np.uint64)
    else:
        column = column.dictionary_decode() if hasattr(column, "dictionary") else column
        values = column.fill_null(0).to_numpy(zero_copy_only=False)
        values = (values if values.dtype == np.uint64 else values.astype(np.int64).view(np.uint64)).copy()
    values[missing] = 0
    return values, missing, lengths


_BLOCK = 1 << 22


class CsvReader:
    """Reads files that have the columns of the first, in any order, separated by tabs if the header has tabs,
    otherwise by commas."""

    def __init__(self, first: Path, names: ColumnNames) -> None:
        """Read the header of `first`.

        Raises:
            StrettoError: an unreadable file, or a column that is missing.
        """
        header = _read_header(first)[0]
        numbers, features = names.find(header, first)
        self.unread = names.find_unread(header, first)
        count = len(features)
        self.columns = Columns(numbers, features, ("text",) * count, (False,) * count)
        self._names = ColumnNames(names.label, numbers, features)

    def read(self, path: Path, start: int = 0, line: int = 1) -> Iterator[ParsedBlock]:
        """See LogReader."""
        header, delimiter, length = _read_header(path)
        self._names.find(header, path)
        if not start:
            start, line = length, 2
        for block in line_blocks(path, start, line, _BLOCK):
            parsed = self._parse_with_arrow(block.data, header, delimiter)
            if parsed is None:
                parsed = self._parse_lines(block.data, block.line, header, delimiter)
            yield ParsedBlock(parsed, block.end, block.line + parsed.lines)

    def _parse_lines(self, data: bytes, first: int, header: Sequence[str], delimiter: str) -> Parsed:
        """Parse a block whose first line is line `first` of its file, line by line."""
        text = data.decode("utf-8", "surrogateescape").removesuffix("\n")
        lines = text.split("\n") if data else []
        rows = list[list[str]]()
        row_lines = list[int]()
        faults = list[tuple[int, str]]()
        blank = 0
        for number, line in enumerate(lines, first):
            row = _split_line(line.removesuffix("\r"), delimiter)
            if not row:
                blank += 1
            elif len(row) == len(header):
                rows.append(row)
                row_lines.append(number)
            else:
                faults.append((number, f"{counted(len(row), 'column')}, not {len(header)}"))
        cells = dict(zip(header, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(header, ())
        wrong = dict[int, str]()
        label = self._names.label
        labels = None if label is None else _number_cells(label, cells[label], wrong)
        numbers = [_number_cells(name, cells[name], wrong) for name in self.columns.numbers]
        dense = np.stack(numbers, axis=1) if numbers else np.zeros((len(rows), 0))
        features = list[Cells]()
        for name in self.columns.features:
            distinct: dict[str, int] = {text: i for i, text in enumerate(dict.fromkeys(cells[name]))}
            keys = text_keys(list(distinct))
            if "" in distinct:
                keys[distinct[""]] = 0
            indices = np.fromiter((distinct[cell] for cell in cells[name]), np.int64, len(cells[name]))
            features.append((keys[indices], indices == distinct.get("", -1), None))
        chunk, invalid = build_chunk(self.columns, labels, dense, features, wrong)
        faults += [(row_lines[i], reason) for i, reason in invalid]
        return Parsed(chunk, len(lines), blank, sorted(faults))

    def _parse_with_arrow(self, data: bytes, header: Sequence[str], delimiter: str) -> Parsed | None:
        """Parse a block with pyarrow; None if it is not installed, or the block has quotes or faults."""
        lines, returns = data.count(b"\n") + (not data.endswith(b"\n")), data.count(b"\r")
        if b'"' in data or returns not in (0, data.count(b"\r\n")):
            return None
        try:
            import pyarrow as arrow  # pyright: ignore[reportMissingImports]
            from pyarrow import csv as arrow_csv  # pyright: ignore[reportMissingImports]
        except ImportError:
            return None
        columns, labels = self.columns, self._names.labels
        names = [*labels, *columns.numbers, *columns.features]
        try:
            table = arrow_csv.read_csv(
                arrow.BufferReader(data),
                arrow_csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=list(header)),
                arrow_csv.ParseOptions(delimiter=delimiter, quote_char=False),
                arrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(names, arrow.string()),
                    include_columns=names,
                    null_values=[""],
                    strings_can_be_null=True,
                ),
            )
            flat = (arrow.concat_arrays(column.chunks) for column in table.columns)
            arrays = dict(zip(names, flat, strict=True))
            numbers = [arrays[name].cast(arrow.float64()) for name in (*labels, *columns.numbers)]
        except (arrow.ArrowException, KeyError):
            return None
        blank = lines - table.num_rows
        if blank != sum(not line.strip(b"\r") for line in data.removesuffix(b"\n").split(b"\n")):
            return None
        dense = [column.to_numpy(zero_copy_only=False) for column in numbers]
        label_column = dense.pop(0) if labels else None
        stacked = np.stack(dense, axis=1) if dense else np.zeros((table.num_rows, 0))
        cells = [read_cells(arrays[name], "text", False) for name in columns.features]
        chunk, faults = build_chunk(columns, label_column, stacked, cells, {})
        # line by line, the lines of the faults are found
        return None if faults else Parsed(chunk, lines, blank)


def _split_line(line: str, delimiter: str) -> list[str]:
    """Split a line into fields; a blank line has none, and a line that is not CSV has one."""
    try:
        return next(csv.reader([line], delimiter=delimiter, strict=True), [])
    except csv.Error:
        return [line]


def _number_cells(name: str, cells: Sequence[str], wrong: dict[int, str]) -> NDArray[np.float64]:
    """Parse numbers, NaN for empty cells; adds the samples of invalid cells to `wrong`."""
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


def read_column_names(path: Path, form: str) -> list[str]:
    """Return the names of the columns of a Parquet or CSV file.

    Raises:
        StrettoError: an unreadable file, or no pyarrow.
    """
    if form == "csv":
        return _read_header(path)[0]
    with opened_parquet(path) as file:
        return list(file.schema_arrow.names)


def _read_header(path: Path) -> tuple[list[str], str, int]:
    """Return the column names, the delimiter, and the length of the header in bytes."""
    for block in line_blocks(path, size=1 << 16):
        line, _, _ = block.data.partition(b"\n")
        try:
            text = line.decode("utf-8-sig").removesuffix("\r")
        except UnicodeDecodeError:
            raise StrettoError(f"{path}: its first line is not UTF-8", hint="is it a CSV file?") from None
        delimiter = "\t" if "\t" in text else ","
        return [name.strip() for name in _split_line(text, delimiter)], delimiter, len(line) + 1
    raise StrettoError(f"{path}: empty file", hint="a CSV file begins with a line of column names")


def read_rows(columns: Columns, rows: Sequence[Mapping[str, Any]]) -> RawChunk:
    """Return samples that are mappings from a column's name to its value, without labels.

    Every column needs a value, None if it is missing; others are ignored. A number is an int or a float. A
    feature is, as the column was in training, eight hexadecimal digits, an integer, or a text (for which an
    integer is taken as its digits); or a list of them.

    Raises:
        StrettoError: a column without a value, or one of another type.
    """
    numbers = np.full((len(rows), len(columns.numbers)), np.nan)
    cells = list[Cells]()
    for place, name in enumerate(columns.numbers):
        for i, row in enumerate(rows):
            if (value := _value(row, name, i)) is not None:
                if not isinstance(value, int | float | np.number):
                    raise _wrong_value(i, name, value, "a number, or None")
                numbers[i, place] = value
    for name, kind, is_list in zip(columns.features, columns.keys, columns.lists, strict=True):
        values, lengths = list[Any](), list[int]()
        for i, row in enumerate(rows):
            value = _value(row, name, i)
            if is_list and not isinstance(value, list | tuple | np.ndarray | None):
                raise _wrong_value(i, name, value, "a list of values, or None")
            each = [value] if not is_list else [] if value is None else list(value)
            values += [_key(i, name, item, kind) for item in each]
            lengths.append(len(each))
        missing = np.array([value is None for value in values], bool)
        if kind == "text":
            keys = text_keys([value or "" for value in values])
            keys[missing] = 0
        else:
            keys = np.array([(value or 0) % (1 << 64) for value in values], np.uint64)
        cells.append((keys, missing, np.array(lengths, np.int64) if is_list else None))
    chunk, faults = build_chunk(columns, None, numbers, cells, {})
    if faults:
        raise StrettoError(f"row {faults[0][0]}: {faults[0][1]}", hint="None for a missing number")
    return chunk


def _value(row: Mapping[str, Any], name: str, index: int) -> Any:
    if name in row:
        return row[name]
    close = nearest(name, row)
    raise StrettoError(
        f"row {index} has no {name}", hint="None if it is missing" + (f"; is it {close}?" if close else "")
    )


def _key(index: int, name: str, value: Any, kind: Keys) -> Any:
    """Return a feature's value as an integer or a text, whose key is known; None if it is missing."""
    if value is None:
        return None
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(value) if kind == "text" else int(value)
    if kind == "text" and isinstance(value, str) and value:
        return value
    if kind == "hex" and isinstance(value, str) and re.fullmatch("[0-9a-fA-F]{8}", value):
        return int(value, 16)
    allowed = {"hex": "eight hexadecimal digits", "int": "an integer", "text": "a text that is not empty"}
    raise _wrong_value(index, name, value, f"{allowed[kind]}, or None")


def _wrong_value(index: int, name: str, value: Any, allowed: str) -> StrettoError:
    return StrettoError(f"row {index}: {name} is {str(value)[:40]!r}", hint=allowed)
