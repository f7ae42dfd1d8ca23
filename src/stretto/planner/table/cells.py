"""The cells of one row: read strictly by the columns, with the defaults that were taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from stretto.errors import StrettoError
from stretto.planner.table.columns import COLUMNS, OWN, Value, column

T = TypeVar("T", bound=Value)


class Cells:
    """The values of one row by the columns' names.

    Attributes:
        taken: the defaults that stand for empty cells: name to what was taken, and why.

    Raises:
        StrettoError: a column that there is not, a column under two names, or a value that is not allowed.
    """

    def __init__(self, cells: Mapping[str, str]) -> None:
        self._values = dict[str, Value]()
        self.taken = dict[str, str]()
        for name, cell in cells.items():
            if name.startswith(OWN) or not cell.strip():
                continue
            known = column(name)
            if known.name in self._values:
                raise StrettoError(f"{known.name} is there under two names", hint=f"leave {name} out")
            self._values[known.name] = known.read(cell.strip())

    def get(self, name: str, kind: type[T]) -> T | None:
        """The value of a cell; None: it is empty."""
        value = self._values.get(COLUMNS[name].name)
        assert value is None or isinstance(value, kind)
        return value

    def whole(self, name: str) -> int | None:
        """A whole number."""
        return self.get(name, int)

    def number(self, name: str) -> float | None:
        """A number."""
        return self.get(name, float)

    def word(self, name: str) -> str | None:
        """A choice or a text."""
        return self.get(name, str)

    def flag(self, name: str) -> bool:
        """Whether it is switched on; an empty cell is off."""
        return bool(self.get(name, bool))

    def either(self, name: str, default: T, why: str = "") -> T:
        """The value of a cell, or the default, which is told."""
        value = self.get(name, type(default))
        if value is not None:
            return value
        shown = int(default) if isinstance(default, bool) else default
        self.taken[name] = f"{shown} ({why})" if why else str(shown)
        return default
