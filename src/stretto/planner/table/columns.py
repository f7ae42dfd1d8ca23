"""The columns of a table of runs: one description for the reader, its errors and the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

from stretto.errors import StrettoError, nearest
from stretto.planner.machines.reading import shipped
from stretto.planner.table.values import read_choice, read_flag, read_number, squeezed
from stretto.program import names as schedules
from stretto.spec.families import FAMILIES

Kind = Literal["whole", "number", "share", "percent", "flag", "choice", "text"]
Value = int | float | bool | str
USER_PREFIX = "x_"  # of the names of columns that a user adds; they are kept and not read
_LARGEST = 2**24  # whole numbers above it are taken for mistakes
_ALLOWED: Mapping[Kind, str] = {
    "whole": "a whole number above 0",
    "number": "a number above 0",
    "share": "a number from 0 to below 1",
    "percent": "a number above 0 and up to 100",
    "flag": "0 or 1",
    "text": "any text",
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table, and one word of `stretto predict`.

    Attributes:
        default: what an empty cell means, in words.
        meaning: with the unit.
        aliases: other names of the column.
        choices: the values of a `choice`.
        units: what a word behind a number stands for, as "ms" or "k".
        absent: 0 means the same as an empty cell.
        words: for a text that is read, what it may say.
    """

    name: str
    kind: Kind
    default: str
    meaning: str
    aliases: Sequence[str] = ()
    choices: Sequence[str] = ()
    units: Mapping[str, float] = field(default_factory=dict[str, float])
    absent: bool = False
    words: str = ""

    @property
    def allowed(self) -> str:
        """The values of a cell, in words."""
        return ", ".join(self.choices) if self.kind == "choice" else self.words or _ALLOWED[self.kind]

    @cached_property
    def spellings(self) -> Mapping[str, str]:
        """The choices by their squeezed spellings."""
        more = _spellings().get(self.name, {})
        listed = {squeezed(other): choice for choice, others in more.items() for other in others}
        return {**listed, **{squeezed(choice): choice for choice in self.choices}}

    def read(self, cell: str) -> Value | None:
        """The value of a cell that says something; None: the value means the same as an empty cell.

        Raises:
            StrettoError: the value is not allowed.
        """
        if self.kind == "text":
            return cell
        if self.absent and cell.strip().lower() in ("0", "0.0", "none", "no", "no pipeline"):
            return None
        value = self._value(cell)
        if value == "":  # a spelling that leaves the choice open
            return None
        if value is None:
            near = nearest(cell.lower(), self.choices)
            raise StrettoError(
                f"{self.name} is {cell!r}, allowed: {self.allowed}",
                hint=f"did you mean {near!r}?" if near else f"{self.name}: {self.meaning}",
            )
        return value

    def _value(self, cell: str) -> Value | None:
        if self.kind == "flag":
            return read_flag(cell)
        if self.kind == "choice":
            return read_choice(cell, self.spellings)
        read = read_number(cell, self.units or None)
        if read is None:
            return None
        number = read[0]
        if self.kind == "whole":
            return int(number) if 1 <= number <= _LARGEST and number == int(number) else None
        if self.kind == "percent":
            return (100 * number if number < 1 and "%" not in cell else number) if number > 0 else None
        legal = 0 < number < float("inf") if self.kind == "number" else 0 <= number < 1
        return number if legal else None


def _data(name: str) -> Any:
    return shipped("stretto.planner.table", name)


@cache
def _spellings() -> Mapping[str, Mapping[str, Sequence[str]]]:
    """By column and choice, its other spellings."""
    return _data("spellings")


def _sections() -> dict[str, tuple[Column, ...]]:
    """The columns of `data/columns.yaml`, by section."""
    described = _data("columns")
    choices = {"schedules": tuple(schedules()), "families": FAMILIES}

    def one(name: str, fields: Mapping[str, Any]) -> Column:
        listed: str | Sequence[str] = fields.get("choices", ())
        return Column(
            name=name,
            kind=fields["kind"],
            default=fields.get("default", ""),
            meaning=fields["meaning"],
            aliases=fields.get("aliases", "").split(),
            choices=choices[listed] if isinstance(listed, str) else listed,
            units=described["units"][fields["units"]] if "units" in fields else {},
            absent=fields.get("absent", False),
            words=fields.get("words", ""),
        )

    return {
        title: tuple(one(name, fields) for name, fields in section.items())
        for title, section in described["sections"].items()
    }


SECTIONS = _sections()
COLUMNS = {column.name: column for section in SECTIONS.values() for column in section}
_NAMES = {name: column for column in COLUMNS.values() for name in (column.name, *column.aliases)}


def column(name: str) -> Column:
    """The column of a name or alias, in any case, with spaces or dashes for underscores.

    Raises:
        StrettoError: there is none; names the nearest.
    """
    known = _NAMES.get("_".join(name.strip().lower().replace("-", " ").split()))
    if known is None:
        near = nearest(name.lower(), _NAMES)
        where = f"`stretto predict --table-columns` lists all, your own start with {USER_PREFIX}"
        raise StrettoError(
            f"there is no column {name!r}", hint=f"did you mean {near!r}? {where}" if near else where
        )
    return known


def reference() -> str:
    """All columns in Markdown, as `stretto predict --table-columns` prints them."""
    lines = ["| column | also | meaning | allowed | where empty |", "|---|---|---|---|---|"]
    for title, section in SECTIONS.items():
        lines.append(f"| *{title}* | | | | |")
        for one in section:
            cells = (f"`{one.name}`", ", ".join(one.aliases), one.meaning, one.allowed, one.default)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
