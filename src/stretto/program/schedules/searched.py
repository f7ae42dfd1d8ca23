"""The searched schedule; the search itself stands after `simulate`, whose replays it compares."""

from __future__ import annotations

from stretto.program.schedules.registry import register_late

register_late(
    "auto",
    "the best program found for given costs and a limit of memory",
    "stretto.program.search.auto:auto",
    {
        "costs": None,
        "memory": None,
        "chunks": None,
        "placement": None,
        "split": True,
        "objective": "barrier",
        "effort": 1.0,
    },
)
