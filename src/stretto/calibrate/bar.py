"""What is being measured now: a line that moves in a terminal, one line a part elsewhere; on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

_WIDTH = 78


class Bar:
    """Use it in a `with`; one rank speaks."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._terminal = quiet, sys.stderr.isatty()
        self._part, self._begun = "", time.monotonic()

    def say(self, part: str, what: str) -> None:
        """Part and thing that begin now."""
        if self._quiet:
            return
        if self._terminal:
            text = f"{time.monotonic() - self._begun:4.0f} s  {part}: {what}"
            print(f"\r{text[:_WIDTH]:{_WIDTH}}", end="", file=sys.stderr, flush=True)
        elif part != self._part:
            print(f"measuring {part}", file=sys.stderr, flush=True)
        self._part = part

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and not self._quiet:
            print(f"\r{'':{_WIDTH}}\r", end="", file=sys.stderr, flush=True)
