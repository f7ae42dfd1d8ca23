"""Ask a run to stop: Ctrl-C and SIGTERM finish the step, save, and end."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAVED_AND_STOPPED = 75  # exit code: the run was stopped and has saved; start it again to go on (EX_TEMPFAIL)


class StopRequest:
    """Remembers the first of the signals that ask to stop; ranks agree on it at the end of each step."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _heard(self, number: int, _: FrameType | None) -> None:
        self.signal = self.signal or number
