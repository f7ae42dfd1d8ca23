"""The columns of a table of runs: names, values and their spellings by other programs, and a row's cells.

Every default that makes a choice is reported; one that says that something is absent is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from stretto.errors import StrettoError, nearest
from stretto.job.families import FAMILIES
from stretto.job.framework import OPERATORS
from stretto.job.optimiser import OPTIMISERS
from stretto.planner.assumptions import software_profiles
from stretto.planner.machines.names import normalised
from stretto.planner.machines.reading import shipped
from stretto.program import entry
from stretto.program import names as schedules
from stretto.program.schedules.user_schedule import is_file

Value = int | float | bool | str
T = TypeVar("T", bound=Value)
Kind = Literal["count", "number", "share", "flag", "choice", "text"]
USER_PREFIX = "x_"  # of the names of columns that a user adds; they are copied and not read


class Column(NamedTuple):
    """A column of a table, and a word of `stretto predict`.

    Attributes:
        meaning: description with the unit.
        default: meaning of an empty cell.
        choices: the values of a `choice`.
        alias: another name of the column.
        allowed: the values of a cell, in words; for a text that is read.
        flags: options of other programs, whose names may precede the value of a choice.
        spellings: of each value of a choice, by other programs.
    """

    kind: Kind
    meaning: str
    default: str = ""
    choices: Sequence[str] = ()
    alias: str = ""
    allowed: str = ""
    flags: Sequence[str] = ()
    spellings: Mapping[str, Sequence[str]] = MappingProxyType({})

    def readings(self) -> dict[str, str]:
        """Return the values of a choice by all their spellings, letters and digits only."""
        spellings = [
            (value, each) for value in self.choices for each in (value, *self.spellings.get(value, ()))
        ]
        return {
            normalised(flag) + normalised(each): value
            for flag in ("", *self.flags)
            for value, each in spellings
        }


def _sections() -> dict[str, dict[str, Column]]:
    """Return the columns of `data/columns.yaml` by section."""
    listed = {
        "schedules": tuple(schedules()),
        "families": FAMILIES,
        "optimisers": OPTIMISERS,
        "profiles": tuple(software_profiles()),
    }
    operators = f"{', '.join(OPERATORS)}; several with +"

    def column(fields: dict[str, Any]) -> Column:
        named: str | list[str] = fields.pop("choices", [])
        choices = listed[named] if isinstance(named, str) else named
        allowed: str = fields.pop("allowed", "")
        return Column(**fields, choices=choices, allowed=operators if allowed == "operators" else allowed)

    sections: dict[str, dict[str, dict[str, Any]]] = shipped("stretto.planner", "columns")
    return {
        title: {name: column(fields) for name, fields in section.items()}
        for title, section in sections.items()
    }


SECTIONS = _sections()
COLUMNS = {name: column for section in SECTIONS.values() for name, column in section.items()}
_NAMES = {spelling: name for name, column in COLUMNS.items() for spelling in (name, column.alias) if spelling}
_LARGEST = 2**24  # counts above it are taken for mistakes
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def column_name(spelling: str) -> str:
    """Return the name of the column with that name or alias.

    Raises:
        StrettoError: no such column; the hint has the nearest.
    """
    name = _NAMES.get(spelling.strip().lower())
    if name is None:
        similar = nearest(spelling.lower(), _NAMES)
        hint = f"`stretto predict --table-columns` lists all; start columns of your own with {USER_PREFIX}"
        raise StrettoError(
            f"there is no column {spelling!r}",
            hint=f"did you mean {similar!r}? {hint}" if similar else hint,
        )
    return name


def allowed_values(name: str) -> str:
    """Describe the values of a column."""
    column = COLUMNS[name]
    texts = {
        "count": "a whole number above 0",
        "number": "a number above 0",
        "share": "a number from 0 to below 1",
        "flag": "0 or 1",
        "text": "any text",
    }
    return column.allowed or ", ".join(column.choices) or texts[column.kind]


def read_value(name: str, cell: str) -> Value:
    """Return the value of a cell that is not empty.

    Raises:
        StrettoError: a value that the column does not allow.
    """
    column, value = COLUMNS[name], None
    if name == "schedule" and is_file(cell):
        return entry(cell).name
    if column.kind == "text":
        value = cell
    elif column.kind == "choice":
        value = cell.lower() if cell.lower() in column.choices else None
        if value is None and not re.fullmatch(r"[-+]\d+|[-+]?\d*\.\d*", cell):  # neither -1 nor 1.0 is 1
            value = column.readings().get(normalised(cell))
    elif column.kind == "flag":
        value = _FLAGS.get(cell.lower())
    else:
        try:
            number = float(cell)
        except ValueError:
            number = -1.0
        if column.kind == "count":
            value = int(number) if 1 <= number <= _LARGEST and number == int(number) else None
        elif (column.kind == "share" and 0 <= number < 1) or 0 < number < float("inf"):
            value = number if column.kind == "number" or number < 1 else None
    if value is None:
        readings = {**column.readings(), **{choice: choice for choice in column.choices}}
        similar = nearest(cell.lower(), readings)
        similar = similar and readings[similar]
        raise StrettoError(
            f"{name} is {cell!r}, allowed: {allowed_values(name)}",
            hint=f"did you mean {similar!r}?" if similar else f"{name}: {column.meaning}",
        )
    return value


def column_reference() -> str:
    """Return the reference of all columns in Markdown, as `stretto predict --table-columns` prints it."""
    lines = ["| column | also | meaning | allowed | where empty |", "|---|---|---|---|---|"]
    for title, section in SECTIONS.items():
        lines.append(f"| *{title}* | | | | |")
        lines += [
            f"| `{name}` | {column.alias} | {column.meaning} | {allowed_values(name)} | {column.default} |"
            for name, column in section.items()
        ]
    return "\n".join(lines) + "\n"


class Cells:
    """The values of a row by column.

    Attributes:
        defaults: the values that empty cells were given, each with the reason.
    """

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = dict(values)
        self.defaults = dict[str, str]()

    def get(self, name: str, kind: type[T]) -> T | None:
        """Return the value of a cell, or None if it is empty."""
        value = self.values.get(name)
        assert name in COLUMNS
        assert value is None or isinstance(value, kind)
        return value

    def get_or(self, name: str, default: T, reason: str = "") -> T:
        """Return the value of a cell, or the default, which is reported."""
        value = self.get(name, type(default))
        if value is not None:
            return value
        self.report(name, default, reason)
        return default

    def report(self, name: str, value: Value, reason: str = "") -> None:
        """Record the value of a column that no cell states, and the reason for it."""
        shown = int(value) if isinstance(value, bool) else value
        text = f"{shown:g}" if isinstance(shown, float) else str(shown)
        self.defaults[name] = f"{text} ({reason})" if reason else text


def read_cells(row: Mapping[str, str]) -> Cells:
    """Return the values of a row, by the columns' names or aliases; columns of the user's are skipped.

    Raises:
        StrettoError: an unknown column, one under two names, or a value that its column does not allow.
    """
    values = dict[str, Value]()
    for spelling, cell in row.items():
        if spelling.startswith(USER_PREFIX) or not cell.strip():
            continue
        name = column_name(spelling)
        if name in values:
            raise StrettoError(f"{name} is given under two names", hint=f"leave {spelling} out")
        values[name] = read_value(name, cell.strip())
    return Cells(values)
