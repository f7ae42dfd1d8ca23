"""Whether the loss has risen in a session."""

from __future__ import annotations

from collections import deque
from math import isfinite
from statistics import median

_WINDOW = 8  # steps of a median
_RATIO, _MARGIN = 1.25, 0.1  # a rise beyond the noise of steps: times the lowest median, and above that
_DIVERGED = 1.5  # times the loss of the first step, a single one


class LossTrend:
    """Compares the last steps with the best ones, by medians over a few steps, and with the first, since a
    run may diverge before there is a median.
    """

    def __init__(self) -> None:
        self._window = deque[float](maxlen=_WINDOW)
        self._first: float | None = None
        self._lowest: float | None = None

    def add(self, loss: float | None) -> None:
        """Count a step; one without a finite loss is left out."""
        if loss is None or not isfinite(loss):
            return
        if self._first is None:
            self._first = loss
        self._window.append(loss)
        if len(self._window) == _WINDOW:
            self._lowest = self._median if self._lowest is None else min(self._lowest, self._median)

    @property
    def _median(self) -> float:
        return median(self._window)

    @property
    def warning(self) -> str | None:
        """That the loss has risen, for people; None: it has not."""
        lowest = self._lowest
        if lowest is not None and self._first is not None and self._median > _DIVERGED * self._first:
            lowest = min(lowest, self._first)
        if lowest is None or self._median <= _RATIO * lowest + _MARGIN:
            return None
        return (
            f"the loss has risen: {self._median:.4g} over the last {_WINDOW} steps, and {lowest:.4g} at its "
            "lowest; a smaller optim.lr or longer warm-up may help, guard.on_spike stops at such steps"
        )
