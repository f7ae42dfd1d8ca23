"""The cells of one row: values by the columns' names, and what was assumed where they say nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from stretto.errors import StrettoError
from stretto.planner.table.columns import COLUMNS, SECTIONS, USER_PREFIX, Value, column
from stretto.planner.table.values import is_blank, is_out_of_memory

T = TypeVar("T", bound=Value)
_TOKENS = re.compile(r"[~≈\d.,\s]+[km]?\s*tok", re.IGNORECASE)  # a batch in tokens
_MEASURED = {one.name for one in SECTIONS["measured"]}


class Cells:
    """The values of one row by the columns' names.

    Attributes:
        defaults: what was assumed for cells that say nothing, and what those mean that are no plain value:
            value, and why.

    Raises:
        StrettoError: an unknown column, a column under two names, or a value that is not allowed.
    """

    def __init__(self, cells: Mapping[str, str]) -> None:
        self._values = dict[str, Value]()
        self._texts = dict[str, str]()
        self.defaults = dict[str, str]()
        for name, cell in cells.items():
            if name.startswith(USER_PREFIX) or is_blank(cell):
                continue
            known = column(name)
            if known.name in self._texts:
                raise StrettoError(f"{known.name} is there under two names", hint=f"leave {name} out")
            if known.name == "global_batch" and _TOKENS.match(cell.strip()):
                known = COLUMNS["batch_tokens"]
            self._texts[known.name] = cell.strip()
        for name, cell in self._texts.items():
            if name in _MEASURED and is_out_of_memory(cell):
                self._values["oom"] = True
                self.report("oom", 1, f"{name} is {cell!r}")
                continue
            if name == "sp" and cell != "1" and cell == self._texts.get("tp"):
                value = True  # the degree, in place of whether
            else:
                value = COLUMNS[name].read(cell)
            if value is not None:
                self._values[name] = value
                self._report_reading(name, value, cell)

    def _report_reading(self, name: str, value: Value, cell: str) -> None:
        """Report what a cell was taken for that is not a plain value."""
        kind = COLUMNS[name].kind
        if kind == "text" or kind == "flag":
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

    def report(self, name: str, value: Value, why: str) -> None:
        """Record the value that a cell is taken for, and why."""
        shown = int(value) if isinstance(value, bool) else value
        text = f"{shown:g}" if isinstance(shown, float) else str(shown)
        self.defaults[name] = f"{text} ({why})" if why else text

    def text(self, name: str) -> str:
        """A cell as it stands in the table; "" where it says nothing."""
        return self._texts.get(name, "")

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

    def value_or(self, name: str, default: T, why: str = "") -> T:
        """The value of a cell, or the default, which is recorded."""
        value = self.get(name, type(default))
        if value is not None:
            return value
        self.report(name, default, why)
        return default

    @property
    def measured(self) -> bool:
        """Whether the row has a time or a rate of a run that did not fail."""
        rates = ("iter_time_s", "iter_time_ms", "tokens_per_s_per_gpu", "tokens_per_s", "samples_per_s")
        shares = ("tflops_per_gpu", "mfu_pct", "hfu_pct")
        return not self.flag("oom") and any(self.number(name) is not None for name in (*rates, *shares))
