"""Requests to stop: on Ctrl-C, SIGTERM, the signals that batch systems send before the time limit (SIGUSR1,
SIGUSR2), and that of a closed terminal (SIGHUP, unless ignored as under nohup) a run finishes its step,
saves, and ends.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType

SAVED = 75  # exit code, EX_TEMPFAIL of sysexits.h: stopped after saving, start the job again
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Stopped(Exception):
    """The job was asked to stop before any rank was started."""


class StopRequest:
    """Remembers the first signal that asks to stop, and when it came; ranks agree on it at the end of each
    step. Further signals have no effect, so that they never end a save under way.

    A local rank starts with these signals blocked (`run.launch.local`), so that an early one is delivered as
    soon as this listens. They are blocked again when the `with` ends: a later signal has no effect.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.since: float | None = None  # by time.monotonic
        self._before: dict[int, object] = {}
        self._mask: Iterable[int] = ()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers on no other thread
            for number in SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._on_signal)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def check(self) -> None:
        """Raise Stopped once a signal has come."""
        if self.signal is not None:
            raise Stopped(f"stopped by signal {self.signal}")

    def ask(self, number: int = signal.SIGTERM) -> None:
        """Ask to stop, as if the signal had come."""
        if self.signal is None:
            self.signal, self.since = number, time.monotonic()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.ask(number)
