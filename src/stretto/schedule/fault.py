"""What is raised for a program that is none."""

from __future__ import annotations

from stretto.errors import StrettoError


class ScheduleError(StrettoError):
    """The program cannot be run to its end, or does not do a step's work; names the rank and the action."""
