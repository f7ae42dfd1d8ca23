"""How long a rank may go without progress: as long as its own steps let one expect."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from math import ceil

from stretto.engine.progress import PROGRESS, label

LEAST_S = 8.0  # with the time to gather what ranks know, a hang is told within 10 s
STEPS_S = 3.0  # times the 99th percentile of the steps
FIRST = 2  # steps that compile, allocate and connect
BEYOND_TIMEOUT_S = 10.0  # after train.timeout_s ranks that wait say so themselves
_KEPT = 1000  # steps
_STEP, _BETWEEN = label("the start of the step"), label("between two steps")


class StepLimit:
    """Sets the limits of this rank's row, by the durations of its steps.

    Args:
        hang_s: the limit within a step; None: by the steps.
        timeout_s: the longest wait for another rank, for what takes longer than a step.
    """

    def __init__(self, hang_s: float | None, timeout_s: float) -> None:
        self._fixed, self._other = hang_s, timeout_s + BEYOND_TIMEOUT_S
        self._seconds = deque[float](maxlen=_KEPT)
        self._made = 0
        self._step_s = self._other

    @contextmanager
    def step(self, number: int) -> Generator[None]:
        """A step, by its number from 1."""
        PROGRESS.limit(self._step_s, self._other, number)
        PROGRESS.mark(_STEP)
        began = time.monotonic()
        yield
        PROGRESS.mark(_BETWEEN)
        self.made(time.monotonic() - began)

    def made(self, seconds: float) -> None:
        """Count a step."""
        self._made += 1
        if self._made <= FIRST:
            return
        self._seconds.append(seconds)
        if self._fixed is not None:
            self._step_s = self._fixed
        elif self._made % 10 == 0 or STEPS_S * seconds > self._step_s or len(self._seconds) == 1:
            self._step_s = max(LEAST_S, STEPS_S * percentile_99(self._seconds))

    @property
    def seconds(self) -> float:
        """That a step may go without progress from now on."""
        return self._step_s


def percentile_99(values: deque[float]) -> float:
    """The least value that is not exceeded by 99 of 100."""
    return sorted(values)[ceil(0.99 * len(values)) - 1]
