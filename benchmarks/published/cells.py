"""The cells of one row as papers fill them in, read as values of the columns of `stretto predict --table`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from published.values import is_blank, is_out_of_memory, read_choice, read_flag, read_number, squeezed
from stretto.errors import StrettoError, nearest
from stretto.planner.columns import COLUMNS, SECTIONS, USER_PREFIX, Cells, T, Value, allowed_values

DATA = Path(__file__).parent / "data"
_LARGEST = 2**24  # whole numbers above it are taken for mistakes
_TOKENS = re.compile(r"[~≈\d.,\s]+[km]?\s*tok", re.IGNORECASE)  # a batch in tokens


class Spelling(NamedTuple):
    """How papers fill in a column.

    Attributes:
        kind: a kind of `stretto.planner.columns.Column`, or "percent".
        meaning, allowed: for columns that only papers have.
        choices: a choice by its squeezed spellings.
        units: what a word behind a number stands for.
        absent: 0 means the same as an empty cell.
    """

    kind: str
    meaning: str
    allowed: str
    choices: Mapping[str, str]
    units: Mapping[str, float]
    absent: bool


def data(name: str) -> Any:
    """Return the values of a file in `data`."""
    return yaml.safe_load((DATA / f"{name}.yaml").read_text(encoding="utf-8"))


def _spellings() -> tuple[dict[str, Spelling], dict[str, str]]:
    """Return the spellings of each column, and the columns by all their names."""
    described, others = data("columns"), data("spellings")
    spellings, names = dict[str, Spelling](), dict[str, str]()
    for name in dict.fromkeys((*COLUMNS, *described["columns"])):
        column, fields = COLUMNS.get(name), described["columns"].get(name, {})
        choices = tuple(column.choices if column else fields.get("choices", ()))
        listed = {squeezed(other): choice for choice, more in others.get(name, {}).items() for other in more}
        kind = fields.get("kind", column.kind if column else "")
        texts = {"count": "a whole number above 0", "number": "a number above 0", "text": "any text"}
        spellings[name] = Spelling(
            kind=kind,
            meaning=column.meaning if column else fields["meaning"],
            allowed=allowed_values(name) if column else ", ".join(choices) or texts[kind],
            choices={**listed, **{squeezed(choice): choice for choice in choices}},
            units=described["units"][fields["units"]] if "units" in fields else {},
            absent=fields.get("absent", False),
        )
        aliases = [column.alias] if column and column.alias else []
        for spelling in (name, *aliases, *fields.get("aliases", "").split()):
            assert spelling not in names, spelling
            names[spelling] = name
    return spellings, names


SPELLINGS, NAMES = _spellings()
_MEASURED = {*SECTIONS["measured"], "iter_time_ms"}


def column_name(spelling: str) -> str:
    """Return the column of a name or alias, in any case, with spaces or dashes for underscores.

    Raises:
        StrettoError: no such column; the hint has the nearest.
    """
    name = NAMES.get("_".join(spelling.strip().lower().replace("-", " ").split()))
    if name is None:
        similar = nearest(spelling.lower(), NAMES)
        hint = f"start columns of your own with {USER_PREFIX}"
        raise StrettoError(
            f"there is no column {spelling!r}",
            hint=f"did you mean {similar!r}? {hint}" if similar else hint,
        )
    return name


def _number(cell: str, column: Spelling) -> Value | None:
    """Return the number of a cell, or None if there is none that the column allows."""
    read = read_number(cell, column.units or None)
    if read is None:
        return None
    number = read[0]
    if column.kind == "count":
        return int(number) if 1 <= number <= _LARGEST and number == int(number) else None
    if column.kind == "percent":
        return (100 * number if number < 1 and "%" not in cell else number) if number > 0 else None
    legal = 0 < number < float("inf") if column.kind == "number" else 0 <= number < 1
    return number if legal else None


def _read(name: str, cell: str) -> Value | None:
    """Return the value of a cell, or None if it means the same as an empty one.

    Raises:
        StrettoError: the value is not allowed.
    """
    column = SPELLINGS[name]
    if column.kind == "text":
        return cell
    if column.absent and cell.strip().lower() in ("0", "0.0", "none", "no", "no pipeline"):
        return None
    if column.kind == "flag":
        value = read_flag(cell)
    elif column.kind == "choice":
        value = read_choice(cell, column.choices)
    else:
        value = _number(cell, column)
    if value == "":  # a spelling that leaves the choice open
        return None
    if value is None:
        similar = nearest(cell.lower(), set(column.choices.values()))
        raise StrettoError(
            f"{name} is {cell!r}, allowed: {column.allowed}",
            hint=f"did you mean {similar!r}?" if similar else f"{name}: {column.meaning}",
        )
    return value


class SpelledCells(Cells):
    """The values of one row by column, and what cells were taken for that hold no plain value.

    Attributes:
        texts: the cells as they stand in the table.

    Raises:
        StrettoError: an unknown column, a column under two names, or a value that is not allowed.
    """

    def __init__(self, row: Mapping[str, str]) -> None:
        super().__init__({})
        self.texts = dict[str, str]()
        for spelling, cell in row.items():
            if spelling.startswith(USER_PREFIX) or is_blank(cell):
                continue
            name = column_name(spelling)
            if name in self.texts:
                raise StrettoError(f"{name} is there under two names", hint=f"leave {spelling} out")
            if name == "global_batch" and _TOKENS.match(cell.strip()):
                name = "batch_tokens"
            self.texts[name] = cell.strip()
        for name, cell in self.texts.items():
            if name in _MEASURED and is_out_of_memory(cell):
                self.fill("oom", True, f"{name} is {cell!r}")
                continue
            if name == "sp" and cell != "1" and cell == self.texts.get("tp"):
                value: Value | None = True  # the degree, in place of a flag
            else:
                value = _read(name, cell)
            if value is not None:
                self.values[name] = value
                self._report_reading(name, value, cell)

    def _report_reading(self, name: str, value: Value, cell: str) -> None:
        """Report what a cell was taken for that holds no plain value."""
        kind = SPELLINGS[name].kind
        if kind in ("text", "flag"):
            plain = kind == "text" or cell.lower() in ("0", "1", "true", "false")
        elif isinstance(value, str):
            plain = value.lower() == cell.lower()
        else:
            try:
                plain = float(cell) == float(value)
            except ValueError:
                plain = False
        if not plain:
            self.report(name, value, f"read from {cell!r}")

    def get(self, name: str, kind: type[T]) -> T | None:
        value = self.values.get(name)
        assert name in SPELLINGS
        assert value is None or isinstance(value, kind)
        return value

    def text(self, name: str) -> str:
        """Return a cell as it stands in the table; "" if it says nothing."""
        return self.texts.get(name, "")

    def fill(self, name: str, value: T, reason: str = "") -> T:
        """Give an empty cell a value, and report it."""
        self.values[name] = value
        self.report(name, value, reason)
        return value

    @property
    def ran(self) -> bool:
        """True if the row has a time or a rate of a run that did not fail."""
        rates = ("step_time_s", "iter_time_ms", "tokens_per_s_per_gpu", "tokens_per_s", "samples_per_s")
        shares = ("tflops_per_gpu", "mfu_pct", "hfu_pct")
        return not self.values.get("oom") and any(name in self.values for name in (*rates, *shares))
