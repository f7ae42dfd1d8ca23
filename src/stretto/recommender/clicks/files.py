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
from stretto.recommender.clicks.raw import Columns, Reader
from stretto.recommender.clicks.tabular import CsvReader, Named, ParquetReader, columns_of
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
    """The files of sources, in order; within a directory, of which all below count that are not hidden, or a
    glob by name, with day_2 before day_10. A file that several sources name counts once.

    Raises:
        StrettoError: a source that does not exist, an empty file, no file.
    """
    names = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    files = dict[Path, LogFile]()
    for source in names:
        for path in _expanded(os.fspath(source)):
            facts = path.stat()
            if not facts.st_size:
                raise StrettoError(f"{path}: empty file", hint="name files with samples")
            files.setdefault(path.resolve(), LogFile(path, facts.st_size, facts.st_mtime_ns))
    if not files:
        raise StrettoError(
            "no files to read", hint="name Criteo, Parquet or CSV files, or a directory of them"
        )
    return list(files.values())


def held_out_last(files: Sequence[LogFile]) -> tuple[list[LogFile], int]:
    """The files in their order, but those that are held out by their names (valid, test, ...) at the end; and
    how many those are: 0 if all are, or none.
    """
    held = [part == "valid" for part in parts_of([file.path for file in files])]
    count = sum(held) % len(files)
    return [files[i] for i in sorted(range(len(files)), key=held.__getitem__)], count


def reader_of(files: Sequence[LogFile], form: str | None, named: Named) -> Reader:
    """The reader of a format; None: by file name, .parquet or .csv, otherwise Criteo's.

    Raises:
        StrettoError: an unknown format, files of several formats, or missing columns.
    """
    form = form or form_of(files)
    if form == "criteo":
        if named != Named():
            raise StrettoError(
                "names of columns with Criteo's format, which has none",
                hint="leave --label, --numbers and --features out",
            )
        return CriteoReader()
    if form == "csv":
        return CsvReader(files[0].path, named)
    if form == "parquet":
        return ParquetReader(files[0].path, named)
    near = nearest(form, FORMATS)
    raise StrettoError(
        f"format {form!r}: allowed are {', '.join(FORMATS)}", hint=f"did you mean {near}?" if near else None
    )


def form_of(files: Sequence[LogFile]) -> str:
    """The format that the files' names tell: .parquet, .csv, otherwise Criteo's.

    Raises:
        StrettoError: files of several formats.
    """
    forms = sorted({_form(file.path) for file in files})
    if len(forms) > 1:
        raise StrettoError(
            f"files of several formats: {', '.join(forms)}", hint="one log has one format: --format NAME"
        )
    return forms[0]


def reader_like(files: Sequence[LogFile], columns: Columns, form: str | None, label: str) -> Reader:
    """The reader of new files with the columns of another log; without labels where they have none.

    Raises:
        StrettoError: as `reader_of`.
    """
    form = form or form_of(files)
    first = files[0].path
    if form == "criteo":
        return CriteoReader(is_labelled(first))
    named = Named(label if label in columns_of(first, form) else None, columns.numbers, columns.features)
    return reader_of(files, form, named)


def _form(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return "parquet" if name.endswith(".parquet") else "csv" if name.endswith(".csv") else "criteo"


def _expanded(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir() and is_token_folder(path):
        raise StrettoError(
            f"{source}: a token folder, which is the data of a language model",
            hint="name a click folder (stretto data clicks), or the files of a click log",
        )
    if path.is_dir():
        below = [each for each in path.rglob("*") if each.is_file()]
        plain = [each for each in below if not any(n.startswith(".") for n in each.relative_to(path).parts)]
        return sorted(plain, key=_natural)
    if glob.has_magic(source):
        return sorted(
            (p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()), key=_natural
        )
    raise StrettoError(f"{source}: no such file or directory", hint="check the name")


def _natural(path: Path) -> list[tuple[int, str]]:
    """A sort key that compares numbers in names as numbers."""
    parts = re.split("([0-9]+)", str(path))
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
