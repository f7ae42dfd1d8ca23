"""One action in time."""

from __future__ import annotations

from typing import NamedTuple

from stretto.schedule.action import Action


class Event(NamedTuple):
    """One action in time. A send lasts until its message is there, a receive from its post until then."""

    rank: int
    action: Action
    start: float
    end: float
