"""A table's file, and the reference of its columns."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from stretto.errors import StrettoError
from stretto.planner.table.columns import OWN, SECTIONS, column
from stretto.planner.table.predicting import ADDED


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a line of column names; without what an earlier prediction added.

    Raises:
        StrettoError: the file cannot be read, is empty, has a column that there is not or has it twice, or a
            row that is longer than the line of names.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(_rows(path, csv.reader(file)))
    except OSError as error:
        raise StrettoError(f"cannot read {path}: {error.strerror}", hint="check the file's name") from None
    except (UnicodeDecodeError, csv.Error):
        raise StrettoError(f"cannot read {path}: it is no CSV in UTF-8", hint="save it as CSV") from None
    if not rows:
        raise StrettoError(f"{path} has no rows", hint="a line of column names, then one line a run")
    return rows


def _rows(path: Path, lines: Iterator[list[str]]) -> Iterator[dict[str, str]]:
    header = next(lines, [])
    names = dict[str, str]()
    for name in header:
        try:
            known = name if name.startswith(OWN) or name in ADDED else column(name).name
        except StrettoError as error:
            raise StrettoError(f"{path}: {error.message}", hint=error.hint) from None
        if known in names:
            raise StrettoError(f"{path}: {names[known]!r} and {name!r} are one column", hint="keep one")
        names[known] = name
    for number, cells in enumerate((cells for cells in lines if cells), 1):
        if len(cells) > len(header):
            raise StrettoError(
                f"{path}, row {number}: {len(cells)} cells for {len(header)} columns",
                hint="put cells with commas in quotes",
            )
        cells += [""] * (len(header) - len(cells))
        yield {name: cell for name, cell in zip(header, cells, strict=True) if name not in ADDED}


def reference() -> str:
    """All columns in Markdown, as `stretto predict --table-columns` prints them."""
    lines = ["| column | also | meaning | allowed | where empty |", "|---|---|---|---|---|"]
    for title, section in SECTIONS.items():
        lines.append(f"| *{title}* | | | | |")
        for one in section:
            cells = (f"`{one.name}`", ", ".join(one.aliases), one.meaning, one.allowed, one.default)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
