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

from stretto.errors import StrettoError, nearest
from stretto.recommender.clicks.folder import runs
from stretto.recommender.clicks.raw import Columns, Keys, Parsed, Piece, RawChunk, blocks, text_keys
from stretto.run.data.readers import opened_parquet

Cells = tuple[NDArray[np.uint64], NDArray[np.bool_], NDArray[np.int64] | None]
"""A feature's keys, where they are missing, and how many there are a sample; None: one each."""


@dataclass(frozen=True)
class Named:
    """Column names; `numbers` defaults to I1, I2, ..., and `features` to C1, C2, ...; `label` is None where
    samples have none.
    """

    label: str | None = "label"
    numbers: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The label's column, if there is one."""
        return () if self.label is None else (self.label,)

    def of(self, columns: Sequence[str], where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The numbers and the features among `columns`.

        Raises:
            StrettoError: a column that is not there, or no features.
        """
        numbers = _numbered(columns, "I") if self.numbers is None else self.numbers
        features = _numbered(columns, "C") if self.features is None else self.features
        every = [*self.labels, *numbers, *features]
        for name in every:
            if name not in columns:
                near = nearest(name, columns)
                raise StrettoError(
                    f"{where}: no column {name!r}",
                    hint=f"columns are {', '.join(list(columns)[:12])}"
                    + (f"; did you mean {near}?" if near else ""),
                )
            if list(columns).count(name) > 1:
                raise StrettoError(
                    f"{where}: {list(columns).count(name)} columns are named {name!r}",
                    hint="rename all but one: which is meant is not clear",
                )
        if not features:
            raise StrettoError(
                f"{where}: no features: no column is named C1, C2, ...",
                hint=f"name them: --features {','.join(list(columns)[1:3]) or 'NAME,NAME'}",
            )
        if len(set(every)) < len(every):
            raise StrettoError(f"{where}: a column is named twice", hint="label, numbers and features differ")
        return tuple(numbers), tuple(features)


def chunk_of(
    columns: Columns,
    labels: NDArray[np.float64] | None,
    numbers: NDArray[np.float64],
    cells: Sequence[Cells],
    wrong: Mapping[int, str],
) -> tuple[RawChunk, list[tuple[int, str]]]:
    """The valid samples, and (sample, reason) of the invalid ones.

    `wrong` are the samples known to be invalid; the others must have finite numbers and, where there are
    labels, one of 0 or 1.
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
    keys, missing, lengths = _interleaved(cells, samples)
    chunk = RawChunk(
        columns=columns,
        numbers=numbers,
        keys=keys,
        missing=missing,
        lengths=lengths,
        labels=None if labels is None else (labels == 1).astype(np.uint8),
    )
    if problems:
        good = np.ones(samples, bool)
        good[list(problems)] = False
        chunk = chunk.kept(good)
    return chunk, sorted(problems.items())


def _interleaved(
    cells: Sequence[Cells], samples: int
) -> tuple[NDArray[np.uint64], NDArray[np.bool_], NDArray[np.int64] | None]:
    """Keys, missing flags and lengths by sample, from those of each feature."""
    if all(lengths is None for _, _, lengths in cells):
        keys = np.stack([keys for keys, _, _ in cells], axis=1).reshape(-1)
        return keys, np.stack([missing for _, missing, _ in cells], axis=1).reshape(-1), None
    ones = np.ones(samples, np.int64)
    lengths = np.stack([ones if counts is None else counts for _, _, counts in cells])
    starts = (np.cumsum(lengths) - lengths.reshape(-1)).reshape(lengths.shape)
    at = runs(np.ascontiguousarray(starts.T), np.ascontiguousarray(lengths.T))
    flat = np.concatenate([keys for keys, _, _ in cells])
    gone = np.concatenate([missing for _, missing, _ in cells])
    return flat[at], gone[at], np.ascontiguousarray(lengths.T)


def _unread(
    columns: Sequence[str], named: Named, numbers: Sequence[str], features: Sequence[str]
) -> tuple[str, ...]:
    """The columns that are none of these."""
    return tuple(name for name in columns if name not in (*named.labels, *numbers, *features))


def _numbered(columns: Sequence[str], letter: str) -> tuple[str, ...]:
    """Columns with Criteo's names, in numerical order."""
    numbered = [name for name in columns if re.fullmatch(letter + "[0-9]{1,6}", name)]
    return tuple(sorted(numbered, key=lambda name: int(name[1:])))


_ROWS = 1 << 15


class ParquetReader:
    """Reads files that have the columns of the first, in any order."""

    def __init__(self, first: Path, named: Named) -> None:
        """Look at the schema of `first`.

        Raises:
            StrettoError: no pyarrow, unreadable, a column is not there or of another type.
        """
        self._label = named.label
        with opened_parquet(first) as file:
            schema = file.schema_arrow
            numbers, features = named.of(schema.names, str(first))
            kinds = [_kind(schema.field(name).type, name, first) for name in features]
        self.unread = _unread(schema.names, named, numbers, features)
        self.columns = Columns(numbers, features, *(tuple(each) for each in zip(*kinds, strict=True)))

    def read(self, path: Path, start: int = 0, line: int = 1) -> Iterator[Piece]:
        """See Reader; `start` counts rows, and `line` is start + 1."""
        names = [*Named(self._label).labels, *self.columns.numbers, *self.columns.features]
        with opened_parquet(path) as file:
            schema = file.schema_arrow
            Named(self._label, self.columns.numbers, self.columns.features).of(schema.names, str(path))
            for name, keys, many in zip(
                self.columns.features, self.columns.keys, self.columns.lists, strict=True
            ):
                if _kind(schema.field(name).type, name, path) != (keys, many):
                    raise StrettoError(
                        f"{path}: column {name!r} is {schema.field(name).type}, in the first file it is not",
                        hint="one log has one type a column",
                    )
            done = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if done + rows <= start:
                    done += rows
                    continue
                for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=names):
                    rest = batch.slice(max(0, start - done))
                    done += batch.num_rows
                    if rest.num_rows:
                        yield Piece(self._parse(rest, done - rest.num_rows + 1), done, done + 1)

    def _parse(self, batch: Any, line: int) -> Parsed:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        numbers = [_number_column(columns[name], name) for name in self.columns.numbers]
        dense = np.stack(numbers, axis=1) if numbers else np.zeros((batch.num_rows, 0))
        cells = [
            cells_of(columns[name], keys, many)
            for name, keys, many in zip(
                self.columns.features, self.columns.keys, self.columns.lists, strict=True
            )
        ]
        labels = None if self._label is None else _number_column(columns[self._label], self._label)
        chunk, faults = chunk_of(self.columns, labels, dense, cells, {})
        return Parsed(chunk, batch.num_rows, 0, [(line + i, why) for i, why in faults])


def _kind(type_: Any, name: str, path: Path) -> tuple[Keys, bool]:
    """The type of a feature's values, and whether a sample has a list of them."""
    import pyarrow.types as types  # pyright: ignore[reportMissingImports]

    many = types.is_list(type_) or types.is_large_list(type_)
    value = type_.value_type if many else type_
    if types.is_dictionary(value):
        value = value.value_type
    if types.is_integer(value):
        return "int", many
    if types.is_string(value) or types.is_large_string(value):
        return "text", many
    raise StrettoError(
        f"{path}: column {name!r} is {type_}, not integers, text, or lists of them",
        hint="write it as one of these, or name it under --numbers",
    )


def _number_column(column: Any, name: str) -> NDArray[np.float64]:
    """Numbers, NaN for nulls."""
    import pyarrow as arrow  # pyright: ignore[reportMissingImports]

    if arrow.types.is_boolean(column.type):
        column = column.cast(arrow.int8())
    if not (arrow.types.is_integer(column.type) or arrow.types.is_floating(column.type)):
        raise StrettoError(
            f"column {name!r} is {column.type}, not numbers", hint="name numbers with --numbers A,B,..."
        )
    return column.cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False).copy()


def cells_of(column: Any, keys: Keys, many: bool) -> Cells:
    """A feature's values from an arrow array."""
    lengths = None
    if many:
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        column = column.flatten()
    missing = column.is_null().to_numpy(zero_copy_only=False)
    if keys == "text":
        encoded = column if hasattr(column, "dictionary") else column.dictionary_encode()
        distinct = text_keys([value or "" for value in encoded.dictionary.to_pylist()])
        which = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
        values = distinct[which] if len(distinct) else np.zeros(len(which), np.uint64)
    else:
        column = column.dictionary_decode() if hasattr(column, "dictionary") else column
        values = column.fill_null(0).to_numpy(zero_copy_only=False)
        values = (values if values.dtype == np.uint64 else values.astype(np.int64).view(np.uint64)).copy()
    values[missing] = 0
    return values, missing, lengths


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
        header = _header(first)[0]
        numbers, features = named.of(header, str(first))
        self.unread = _unread(header, named, numbers, features)
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
        label = self._label
        labels = None if label is None else _number_cells(label, cells[label], wrong)
        numbers = [_number_cells(name, cells[name], wrong) for name in self.columns.numbers]
        dense = np.stack(numbers, axis=1) if numbers else np.zeros((len(rows), 0))
        chunk, more = chunk_of(
            self.columns, labels, dense, [_keys(cells[name]) for name in self.columns.features], wrong
        )
        return Parsed(chunk, len(lines), blank, sorted(faults + [(at[i], why) for i, why in more]))


def _quick(
    data: bytes, label: str | None, columns: Columns, header: Sequence[str], mark: str
) -> Parsed | None:
    """Parses a block with pyarrow; None if it is not installed, or the block needs the slow parser."""
    lines, returns = data.count(b"\n") + (not data.endswith(b"\n")), data.count(b"\r")
    if b'"' in data or returns not in (0, data.count(b"\r\n")):
        return None
    try:
        import pyarrow as arrow  # pyright: ignore[reportMissingImports]
        from pyarrow import csv as arrow_csv  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    marks = Named(label).labels
    wanted = [*marks, *columns.numbers, *columns.features]
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
        numbers = [arrays[name].cast(arrow.float64()) for name in (*marks, *columns.numbers)]
    except (arrow.ArrowException, KeyError):
        return None
    blank = lines - table.num_rows
    if blank != sum(not each.strip(b"\r") for each in data.removesuffix(b"\n").split(b"\n")):
        return None
    dense = [each.to_numpy(zero_copy_only=False) for each in numbers]
    labels = dense.pop(0) if marks else None
    stacked = np.stack(dense, axis=1) if dense else np.zeros((table.num_rows, 0))
    cells = [cells_of(arrays[name], "text", False) for name in columns.features]
    chunk, faults = chunk_of(columns, labels, stacked, cells, {})
    # the slow parser finds the line of a fault
    return None if faults else Parsed(chunk, lines, blank)


def _fields(line: str, mark: str) -> list[str]:
    """The fields of a line; none for a blank line, the whole line if it is not CSV."""
    try:
        return next(csv.reader([line], delimiter=mark), [])
    except csv.Error:
        return [line]


def _number_cells(name: str, cells: Sequence[str], wrong: dict[int, str]) -> NDArray[np.float64]:
    """Numbers, NaN for empty cells; adds samples with invalid ones to `wrong`."""
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


def columns_of(path: Path, form: str) -> list[str]:
    """Names of the columns of a Parquet or CSV file.

    Raises:
        StrettoError: unreadable, or no pyarrow.
    """
    if form == "csv":
        return _header(path)[0]
    with opened_parquet(path) as file:
        return list(file.schema_arrow.names)


def _header(path: Path) -> tuple[list[str], str, int]:
    """Column names, delimiter, and the length of the header in bytes."""
    for block in blocks(path, size=1 << 16):
        line, _, _ = block.data.partition(b"\n")
        try:
            text = line.decode("utf-8-sig").removesuffix("\r")
        except UnicodeDecodeError:
            raise StrettoError(f"{path}: its first line is not UTF-8", hint="is it a CSV file?") from None
        mark = "\t" if "\t" in text else ","
        return [name.strip() for name in _fields(text, mark)], mark, len(line) + 1
    raise StrettoError(f"{path}: empty file", hint="a CSV file begins with a line of column names")
