"""How long a rank may go without progress, from the durations of its own steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from math import ceil

from stretto.engine.progress import PROGRESS, label

MIN_LIMIT_S = 8.0  # including the time to collect the ranks' states, a hang is reported within 10 s
STEPS_S = 3.0  # times the 99th percentile of the steps
WARM_UP = 2  # steps that compile, allocate and connect
BEYOND_TIMEOUT_S = 10.0  # after train.timeout_s ranks that wait say so themselves
_WINDOW = 1000  # latest steps that the percentile is taken over
_STEP, _BETWEEN = label("the start of the step"), label("between two steps")


class StepLimit:
    """Sets the limits in this rank's row.

    Args:
        hang_s: limit within a step, or None to derive it from the durations of past steps.
        timeout_s: longest wait for another rank; bounds everything outside a step.
    """

    def __init__(self, hang_s: float | None, timeout_s: float) -> None:
        self._fixed_s, self._outside_s = hang_s, timeout_s + BEYOND_TIMEOUT_S
        self._seconds = deque[float](maxlen=_WINDOW)
        self._count = 0
        self._step_s = self._outside_s

    @contextmanager
    def step(self, index: int) -> Generator[None]:
        """Time a step, whose index counts from 1."""
        PROGRESS.limit(self._step_s, self._outside_s, index)
        PROGRESS.mark(_STEP)
        began = time.monotonic()
        yield
        PROGRESS.mark(_BETWEEN)
        self.add(time.monotonic() - began)

    def add(self, seconds: float) -> None:
        """Count a step of this duration."""
        self._count += 1
        if self._count <= WARM_UP:
            return
        self._seconds.append(seconds)
        if self._fixed_s is not None:
            self._step_s = self._fixed_s
        elif self._count % 10 == 0 or STEPS_S * seconds > self._step_s or len(self._seconds) == 1:
            self._step_s = max(MIN_LIMIT_S, STEPS_S * percentile_99(self._seconds))

    @property
    def seconds(self) -> float:
        """Seconds that a step may go without progress from now on."""
        return self._step_s


def percentile_99(values: deque[float]) -> float:
    """Return the smallest value that 99 of 100 values do not exceed."""
    return sorted(values)[ceil(0.99 * len(values)) - 1]
