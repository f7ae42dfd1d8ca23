"""The report of a command: one JSON object, and text for people.

A command reads from top to bottom: check the options, compute, report. The report collects text in the order
in which it is read, and prints either that or the JSON:

    report = CommandReport({"step_s": 3.2, "layers": [...]})  # what --json prints, and nothing else
    report.line("3.2 s a step")
    report.table([text("layer"), number("ms", ".3f")], [["attention", 1.52], ["mlp", 3.08]])
    report.write(svg, picture)
    report.print(as_json)

The JSON object may be a function that makes it, if that takes long. What depends on the terminal, such as a
picture, is added by `draw`. Exit codes follow after `print`.

A command with more than about ten options takes them as one object (`options.grouped`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from typer import BadParameter

from stretto.cli.output import console, labelled, memory_size, write_file

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

LABEL = 10  # columns of a label of `CommandReport.value`

Cell = str | float | None
Record = Mapping[str, Any]


# of the objects that commands print with `--json`, if above 1: it rises if a key is removed or renamed
JSON_VERSIONS: dict[str, int] = {}


def json_schema() -> str:
    """Return the name and version of what the running command prints, such as "stretto data build/1"."""
    # typer has a copy of click of its own in recent versions
    click = import_module(BadParameter.__module__.replace("exceptions", "globals"))
    command = " ".join(click.get_current_context().command_path.split()[1:])
    return f"stretto {command}/{JSON_VERSIONS.get(command, 1)}"


class ColumnStyle(NamedTuple):
    """The title of a column, and how its cells are shown: text as it is, None as nothing, numbers by `show`.

    show: a format such as ",.3f", or a function of the number.
    """

    title: str
    show: str | Callable[[Any], str] = ""
    left: bool = False

    def cell(self, value: Cell) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        return format(value, self.show) if isinstance(self.show, str) else self.show(value)


def text(title: str) -> ColumnStyle:
    """A column of names or words, aligned left."""
    return ColumnStyle(title, left=True)


def number(title: str, show: str | Callable[[Any], str] = "") -> ColumnStyle:
    """A column of numbers, aligned right; `show` is a format such as ",.3f", or a function."""
    return ColumnStyle(title, show)


def size(title: str) -> ColumnStyle:
    """A column of bytes, shown as in 1.25 GiB."""
    return ColumnStyle(title, memory_size)


class CommandReport:
    """What a command reports.

    Args:
        record: the object that `--json` prints, or a function that returns it.
    """

    def __init__(self, record: Record | Callable[[], Record]) -> None:
        self.record = record
        self._blocks: list[Callable[[Console], None]] = []

    def line(self, text: str = "", style: str | None = None) -> None:
        """Add one or more lines, which are neither wrapped nor cut."""
        self.draw(
            lambda to: to.print(text, style=style, soft_wrap=True, markup=False, highlight=False, emoji=False)
        )

    def lines(self, texts: Iterable[str]) -> None:
        """Add a line for each text."""
        for each in texts:
            self.line(each)

    def verbatim(self, text: str) -> None:
        """Add a text exactly as it is, such as a script; it ends with its own line break."""
        self._blocks.append(lambda to: print(text, end="", file=to.file))

    def value(self, label: str, text: str, indent: int = LABEL) -> None:
        """Add a named value; its text wraps at spaces, right of the label."""
        self.draw(lambda to: labelled(to, label, text, indent))

    def table(
        self,
        columns: Sequence[ColumnStyle],
        rows: Iterable[Sequence[Cell]] | Callable[[int], Iterable[Sequence[Cell]]],
        *,
        optional: Sequence[str] = (),
        drop_empty: bool = False,
        min_width: int | None = None,
    ) -> None:
        """Add a table; no cell is ever cut.

        Args:
            rows: cells by column; an empty row begins a new section. Or a function that returns them for
                the width of the terminal, in characters.
            optional: titles of columns that a narrow terminal leaves out, in this order.
            drop_empty: leave out columns that no row fills.
            min_width: least width of all columns but the first, in characters.
        """

        def cells(rows: Iterable[Sequence[Cell]]) -> list[list[str]]:
            return [[c.cell(cell) for c, cell in zip(columns, row, strict=bool(row))] for row in rows]

        of_rows = None if callable(rows) else cells(rows)

        def draw(to: Console) -> Table:
            shown_rows = cells(rows(to.width)) if callable(rows) else of_rows or []
            shown = [
                i for i in range(len(columns)) if not drop_empty or any(row and row[i] for row in shown_rows)
            ]
            return _table(to, columns, shown_rows, shown, optional=list(optional), min_width=min_width)

        self.draw(draw)

    def draw(self, draw: Callable[[Console], RenderableType | None]) -> None:
        """Add what is drawn for the terminal: `draw` returns it, or prints it itself."""

        def block(to: Console) -> None:
            if (drawn := draw(to)) is not None:
                to.print(drawn, soft_wrap=True)

        self._blocks.append(block)

    def write(self, path: Path, content: str | bytes, *, note: str = "", quiet: bool = False) -> None:
        """Write a file that the user named, at once, and report it in a line that ends with `note`.

        Args:
            quiet: add no line.

        Raises:
            StrettoError: the file cannot be written.
        """
        write_file(path, content)
        if not quiet:
            self.line(f"wrote {path}{note}")

    def print(self, as_json: bool, text_to: TextIO | None = None) -> None:
        """Print the JSON object, or the text.

        Args:
            text_to: print the text to this stream instead of stdout, and also with `as_json`.
        """
        if text_to is not None or not as_json:
            self.render(console() if text_to is None else console(text_to))
        if as_json:
            record = self.record() if callable(self.record) else self.record
            print(json.dumps({"schema": json_schema(), **record}))

    def render(self, to: Console) -> None:
        """Print the text."""
        for block in self._blocks:
            block(to)


def _table(
    to: Console,
    columns: Sequence[ColumnStyle],
    rows: Sequence[Sequence[str]],
    shown: Sequence[int],
    *,
    optional: list[str],
    min_width: int | None,
) -> Table:
    """The table with as many columns as fit, at its full width: printed with `soft_wrap`, lines run over."""
    from rich.box import SIMPLE_HEAD
    from rich.measure import Measurement
    from rich.table import Table

    while True:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for column in (columns[i] for i in shown):
            table.add_column(
                column.title,
                justify="left" if column.left else "right",
                no_wrap=True,
                min_width=None if column is columns[0] else min_width,
            )
        for row in rows:
            if row:
                table.add_row(*(row[i] for i in shown))
            else:
                table.add_section()
        table.width = Measurement.get(to, to.options.update(max_width=1000), table).maximum
        if table.width <= to.width or not optional:
            return table
        omitted = optional.pop(0)
        shown = [i for i in shown if columns[i].title != omitted]
