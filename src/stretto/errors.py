"""What a user got wrong, said so that they can mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StrettoError(ValueError):
    """Bad input: the field, the value, the rule it breaks and the nearest fix, on one line each.

    Commands print it as `error: ...` with the hint below and leave with exit code 2.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.message, self.hint)


def _rebuild(message: str, hint: str | None) -> StrettoError:
    return StrettoError(message, hint=hint)


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that looks most like `name`, if any comes close."""
    found = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return found[0] if found else None
