"""Settings of a framework that no choice of a job is about, from `data/NAME.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

from stretto.planner.machines.reading import shipped


def others(name: str, kind: Literal["unpriced", "unread"]) -> dict[str, str]:
    """Why a framework's settings change no price (`unpriced`), or are refused when read (`unread`), by
    patterns of their names.
    """
    return {pattern: reason for reason, patterns in _all(name)[kind].items() for pattern in patterns}


@cache
def _all(name: str) -> Mapping[str, Mapping[str, Sequence[str]]]:
    return shipped("stretto_interop.frameworks", name)
