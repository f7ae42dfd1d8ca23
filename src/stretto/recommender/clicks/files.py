"""The files of a click log in order of time, and the reader of each format."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import StrettoError, nearest
from stretto.recommender.clicks.criteo import CriteoReader, is_labelled
from stretto.recommender.clicks.raw import Columns, LogReader
from stretto.recommender.clicks.tabular import ColumnNames, CsvReader, ParquetReader, read_column_names
from stretto.run.config.sources import is_token_folder
from stretto.run.data.part_names import parts_of

Source = str | os.PathLike[str]
FORMATS = ("criteo", "parquet", "csv")


@dataclass(frozen=True)
class LogFile:
    """One file of a log."""

    path: Path
    size: int
    mtime_ns: int


def find_files(sources: Source | Sequence[Source]) -> list[LogFile]:
    """Return the files of sources, in order.

    Directories are searched recursively, without hidden files. Files of a directory or glob are sorted by
    name, with day_2 before day_10. A file that several sources name counts once.

    Raises:
        StrettoError: a source that does not exist, an empty file, no file.
    """
    names = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    files = dict[Path, LogFile]()
    for source in names:
        for path in _expand_source(os.fspath(source)):
            stat = path.stat()
            if not stat.st_size:
                raise StrettoError(f"{path}: empty file", hint="name files with samples")
            files.setdefault(path.resolve(), LogFile(path, stat.st_size, stat.st_mtime_ns))
    if not files:
        raise StrettoError(
            "no files to read", hint="name Criteo, Parquet or CSV files, or a directory of them"
        )
    return list(files.values())


def held_out_last(files: Sequence[LogFile]) -> tuple[list[LogFile], int]:
    """Move the files that are held out by their names (valid, test, ...) to the end.

    Returns the files and the number of those held out; 0 if all of them would be.
    """
    is_held_out = [part in ("valid", "test") for part in parts_of([file.path for file in files])]
    count = sum(is_held_out) % len(files)
    return [files[i] for i in sorted(range(len(files)), key=is_held_out.__getitem__)], count


def open_reader(files: Sequence[LogFile], form: str | None, columns: ColumnNames) -> LogReader:
    """Return the reader of a format; by default chosen by file name: .parquet, .csv, otherwise Criteo's.

    Raises:
        StrettoError: an unknown format, files of several formats, or missing columns.
    """
    form = form or format_of(files)
    if form == "criteo":
        if columns != ColumnNames():
            raise StrettoError(
                "names of columns with Criteo's format, which has none",
                hint="leave --label, --numbers and --features out",
            )
        return CriteoReader()
    if form == "csv":
        return CsvReader(files[0].path, columns)
    if form == "parquet":
        return ParquetReader(files[0].path, columns)
    close = nearest(form, FORMATS)
    raise StrettoError(
        f"format {form!r}: allowed are {', '.join(FORMATS)}", hint=f"did you mean {close}?" if close else None
    )


def format_of(files: Sequence[LogFile]) -> str:
    """Return the format of files by their names: .parquet, .csv, otherwise Criteo's.

    Raises:
        StrettoError: files of several formats.
    """
    names = [file.path.name.lower().removesuffix(".gz") for file in files]
    forms = sorted(
        {
            "parquet" if name.endswith(".parquet") else "csv" if name.endswith(".csv") else "criteo"
            for name in names
        }
    )
    if len(forms) > 1:
        raise StrettoError(
            f"files of several formats: {', '.join(forms)}", hint="one log has one format: --format NAME"
        )
    return forms[0]


def open_reader_like(files: Sequence[LogFile], columns: Columns, form: str | None, label: str) -> LogReader:
    """Return the reader of new files with the columns of another log; they need not have labels.

    Raises:
        StrettoError: as `open_reader`.
    """
    form = form or format_of(files)
    first = files[0].path
    if form == "criteo":
        return CriteoReader(is_labelled(first))
    has_label = label in read_column_names(first, form)
    names = ColumnNames(label if has_label else None, columns.numbers, columns.features)
    return open_reader(files, form, names)


def _expand_source(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir() and is_token_folder(path):
        raise StrettoError(
            f"{source}: a token folder, which is the data of a language model",
            hint="name a click folder (stretto data clicks), or the files of a click log",
        )
    if path.is_dir():
        inner = [entry for entry in path.rglob("*") if entry.is_file()]
        shown = [p for p in inner if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        return sorted(shown, key=_natural_key)
    if glob.has_magic(source):
        return sorted(
            (p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()), key=_natural_key
        )
    raise StrettoError(f"{source}: no such file or directory", hint="check the name")


def _natural_key(path: Path) -> list[tuple[int, str]]:
    """A sort key that compares numbers in names as numbers."""
    parts = re.split("([0-9]+)", str(path))
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
