"""The work of a function, without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def counted_calls(function: Callable[[], object]) -> int:
    """Return how many functions, of Python or of C, are called while `function` runs."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls
