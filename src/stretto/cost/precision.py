"""Which parameters stay in float32 where weights have 16 bits."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


def kept(name: str, patterns: Iterable[str]) -> bool:
    """Whether a parameter of the plain model stays in float32: `*` in a pattern stands for any text."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
