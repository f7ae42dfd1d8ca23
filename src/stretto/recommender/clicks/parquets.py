"""Click logs as Parquet: numbers, labels of 0 and 1, features of integers or text, or lists of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.recommender.clicks.columns import Cells, Named, chunk_of
from stretto.recommender.clicks.raw import Columns, Keys, Parsed, Piece, text_keys
from stretto.run.data.readers import unreadable

_ROWS = 1 << 15


class ParquetReader:
    """Reads files that have the columns of the first, in any order."""

    def __init__(self, first: Path, named: Named) -> None:
        """Look at the schema of `first`.

        Raises:
            StrettoError: no pyarrow, unreadable, a column is not there or of another type.
        """
        self._label = named.label
        with _opened(first) as file:
            schema = file.schema_arrow
            numbers, features = named.of(schema.names, str(first))
            kinds = [_kind(schema.field(name).type, name, first) for name in features]
        self.columns = Columns(numbers, features, *(tuple(each) for each in zip(*kinds, strict=True)))

    def read(self, path: Path, start: int = 0, line: int = 1) -> Iterator[Piece]:
        """See Reader; `start` counts rows, and `line` is start + 1."""
        names = [self._label, *self.columns.numbers, *self.columns.features]
        with _opened(path) as file:
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
        numbers = [_numbers(columns[name], name) for name in self.columns.numbers]
        dense = np.stack(numbers, axis=1) if numbers else np.zeros((batch.num_rows, 0))
        cells = [
            cells_of(columns[name], keys, many)
            for name, keys, many in zip(
                self.columns.features, self.columns.keys, self.columns.lists, strict=True
            )
        ]
        chunk, faults = chunk_of(self.columns, _numbers(columns[self._label], self._label), dense, cells, {})
        return Parsed(chunk, batch.num_rows, 0, [(line + i, why) for i, why in faults])


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    try:
        import pyarrow as arrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise StrettoError(
            f"{path}: reading Parquet takes the package pyarrow", hint="pip install 'stretto[parquet]'"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from None
    except arrow.ArrowException as error:
        raise StrettoError(f"{path}: damaged Parquet file ({error})", hint="copy or write it again") from None


def _kind(type_: Any, name: str, path: Path) -> tuple[Keys, bool]:
    """What a feature's values are, and whether there is a list of them."""
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


def _numbers(column: Any, name: str) -> NDArray[np.float64]:
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
