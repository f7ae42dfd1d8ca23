"""Files of probabilities, written as they come: text, NumPy or Parquet, by the file's suffix."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError

STDOUT = "-"
SUFFIXES = (".csv", ".txt", ".npy", ".parquet")
_DIGITS = {"float32": ".9g", "float64": ".17g"}  # enough that the same number is read back
_HEADER = 128  # bytes before an array's values in a .npy file


def check_output(name: str) -> None:
    """Raise StrettoError for a file of another kind, in a folder that does not exist, or without pyarrow."""
    if name == STDOUT:
        return
    path = Path(name)
    if path.suffix not in SUFFIXES:
        raise StrettoError(
            f"--out {name}: the suffix says what to write", hint=f"it is one of {', '.join(SUFFIXES)}, or -"
        )
    if not path.absolute().parent.is_dir():
        raise StrettoError(f"--out {name}: there is no folder {path.parent}", hint="make it first")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise StrettoError(
            f"--out {name}: Parquet needs pyarrow", hint="pip install pyarrow, or write .csv or .npy"
        )


class Output(ABC):
    """Probabilities in the order of the log. A file appears under its name once all are written."""

    @abstractmethod
    def add(self, values: NDArray[np.floating]) -> None:
        """Write the next ones, [n]."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the file: all are written."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what was written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()


class Text(Output):
    """One number a line, to a file or to stdout."""

    def __init__(self, path: Path | None, dtype: str, partial: Path) -> None:
        self._path, self._partial = path, partial
        self._form = _DIGITS[dtype]
        self._file: TextIO = sys.stdout if path is None else partial.open("w", encoding="ascii")

    def add(self, values: NDArray[np.floating]) -> None:
        self._file.write("".join(f"{value:{self._form}}\n" for value in values.tolist()))

    def finish(self) -> None:
        if self._path is None:
            self._file.flush()
            return
        self._file.close()
        self._partial.replace(self._path)

    def discard(self) -> None:
        if self._path is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)


class Array(Output):
    """A .npy file; its header, which has the length, is written at the end."""

    def __init__(self, path: Path, dtype: str, partial: Path) -> None:
        self._path, self._type = path, np.dtype(dtype).newbyteorder("<")
        self._partial = partial
        self._file = partial.open("wb")
        self._file.write(bytes(_HEADER))
        self._count = 0

    def add(self, values: NDArray[np.floating]) -> None:
        self._file.write(values.astype(self._type).tobytes())
        self._count += len(values)

    def finish(self) -> None:
        head = f"{{'descr': '{self._type.str}', 'fortran_order': False, 'shape': ({self._count},), }}"
        magic = b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little")
        self._file.seek(0)
        self._file.write(magic + head.ljust(_HEADER - 11).encode("ascii") + b"\n")
        self._file.close()
        self._partial.replace(self._path)

    def discard(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


_ROWS = 1 << 20  # of a group of a Parquet file


class Parquet(Output):
    """A Parquet file with the column `probability`."""

    def __init__(self, path: Path, dtype: str, partial: Path) -> None:
        import pyarrow as arrow  # pyright: ignore[reportMissingImports]
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]

        self._path, self._arrow = path, arrow
        self._partial = partial
        schema = arrow.schema([("probability", arrow.float64() if dtype == "float64" else arrow.float32())])
        self._writer: Any = parquet.ParquetWriter(str(partial), schema)
        self._values = list[NDArray[np.floating]]()
        self._count = 0

    def add(self, values: NDArray[np.floating]) -> None:
        self._values.append(values)
        self._count += len(values)
        if self._count >= _ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._values:
            column = np.concatenate(self._values)
            self._writer.write_table(self._arrow.table({"probability": column}, schema=self._writer.schema))
        self._values, self._count = [], 0

    def finish(self) -> None:
        self._flush()
        self._writer.close()
        self._partial.replace(self._path)

    def discard(self) -> None:
        self._writer.close()
        self._partial.unlink(missing_ok=True)


class NullOutput(Output):
    """Discards probabilities: only the summary is wanted."""

    def add(self, values: NDArray[np.floating]) -> None:
        pass

    def finish(self) -> None:
        pass

    def discard(self) -> None:
        pass


def open_output(name: str | None, dtype: str, job: int) -> Output:
    """Return the output for probabilities of a type, float32 or float64; without a name they are discarded.

    Args:
        job: a number that identifies the job, for `discard_partial`.

    Raises:
        StrettoError: the file cannot be written.
    """
    if name is None:
        return NullOutput()
    path, partial = Path(name), _partial(name, job)
    try:
        if name == STDOUT:
            return Text(None, dtype, partial)
        if path.suffix == ".npy":
            return Array(path, dtype, partial)
        of_suffix = Parquet if path.suffix == ".parquet" else Text
        return of_suffix(path, dtype, partial)
    except OSError as error:
        raise StrettoError(f"--out {name} cannot be written: {error.strerror}") from None


def discard_partial(name: str | None, job: int) -> None:
    """Remove the file that a rank of a failed job was writing: it may have been killed before it could."""
    if name is not None:
        _partial(name, job).unlink(missing_ok=True)


def _partial(name: str, job: int) -> Path:
    """Return the name of the file while it is written."""
    return Path(f"{name}.{job}.partial")
