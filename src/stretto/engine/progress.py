"""Progress marks of a rank, in memory that another process can read when the rank cannot answer.

The step loop marks each action that it begins with a time and a text. A mark costs less than a microsecond,
so every action of a pipeline has one. Without an observer the marks go to private memory.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import inf

SIZE = 512  # bytes of one rank's row
_MARK = struct.Struct("<qq")  # marks so far, time of the last one (monotonic, ns)
_ALIVE = struct.Struct("<qq")  # time of the last sign of life (monotonic, ns), process
_LIMITS = struct.Struct("<ddq")  # seconds without a mark: in a step, otherwise; the step
_AT_ALIVE, _AT_LIMITS = 16, 32
_AT_WAITS, _AT_LONG = 56, 57
_AT_TEXT, _AT_HOST = 64, 384
_TEXT, _HOST = _AT_HOST - _AT_TEXT, SIZE - _AT_HOST

Label = bytes  # a text in the format of a row


def label(text: str) -> Label:
    """Return the text of a mark, to be created once and used often."""
    return text.encode(errors="replace")[:_TEXT].ljust(_TEXT, b"\0")


@dataclass(frozen=True, kw_only=True)
class RankMarks:
    """The marks read from one rank.

    Attributes:
        marks: number of marks; 0 if the rank has not begun.
        marked_ns: time of the last mark, on the rank's monotonic clock.
        alive_ns: last time that a thread other than the main one could run, on the same clock.
        process: process id on the host.
        step: current step, from 1; 0 outside of steps.
        limit: seconds that may pass without a mark at this point.
        waits: the rank is in a call that ends when other ranks have done their part.
        text: the action that it has begun last.
    """

    marks: int
    marked_ns: int
    alive_ns: int
    process: int
    step: int
    limit: float
    waits: bool
    text: str
    host: str


def read_row(data: bytes | memoryview) -> RankMarks:
    """Parse a row of SIZE bytes."""
    marks, marked = _MARK.unpack_from(data, 0)
    alive, process = _ALIVE.unpack_from(data, _AT_ALIVE)
    limit, long_limit, step = _LIMITS.unpack_from(data, _AT_LIMITS)
    return RankMarks(
        marks=marks,
        marked_ns=marked,
        alive_ns=alive,
        process=process,
        step=step,
        limit=long_limit if data[_AT_LONG] else limit,
        waits=bool(data[_AT_WAITS]),
        text=_read(data[_AT_TEXT:_AT_HOST]),
        host=_read(data[_AT_HOST:SIZE]),
    )


def _read(data: bytes | memoryview) -> str:
    return bytes(data).rstrip(b"\0").decode(errors="replace")


class ProgressMarks:
    """The marks of this rank.

    Attributes:
        attached: this rank is watched for hangs.
        waited_s: time that its main thread has spent waiting for other ranks.
        messages: for marks of waits for pipeline messages: the other pipeline rank, and whether the message
            goes to it.
        observer: returns a context around a longer operation, by its text.
    """

    def __init__(self) -> None:
        self._row = memoryview(bytearray(SIZE))
        self._marks = self._long = 0
        self.waited_s = 0.0
        self.attached = False
        self.messages = dict[Label, tuple[int, bool]]()
        self.observer: Callable[[str], AbstractContextManager[object]] = nullcontext

    def attach(self, row: memoryview, process: int, host: str) -> None:
        """Write the marks to `row` [SIZE bytes] from now on."""
        self._row, self.attached = row, True
        self._row[_AT_HOST:SIZE] = host.encode(errors="replace")[:_HOST].ljust(_HOST, b"\0")
        self.limit(inf, inf, 0)
        self.alive(process)

    def mark(self, text: Label) -> None:
        """Mark the beginning of an action."""
        self._marks = marks = self._marks + 1
        row = self._row
        row[_AT_TEXT:_AT_HOST] = text
        _MARK.pack_into(row, 0, marks, time.monotonic_ns())

    def limit(self, step_s: float, other_s: float, step: int) -> None:
        """Set the step, and the seconds that may pass without a mark in it and in longer operations."""
        _LIMITS.pack_into(self._row, _AT_LIMITS, step_s, other_s, step)

    def alive(self, process: int) -> None:
        """Record a sign of life, from any thread."""
        _ALIVE.pack_into(self._row, _AT_ALIVE, time.monotonic_ns(), process)

    def begin_long(self) -> None:
        """Begin an operation that may take longer than a step, until the matching `end_long`."""
        self._long += 1
        self._row[_AT_LONG] = 1

    def end_long(self) -> None:
        """End it, with a mark of its own, so that its time does not count."""
        self._long -= 1
        self._marks += 1
        _MARK.pack_into(self._row, 0, self._marks, time.monotonic_ns())
        self._row[_AT_LONG] = self._long > 0

    @contextmanager
    def long(self, text: str) -> Generator[None]:
        """An operation that may take longer than a step."""
        self.mark(label(text))
        self.begin_long()
        try:
            with self.observer(text):
                yield
        finally:
            self.end_long()

    def begin_wait(self) -> float:
        """Begin to wait for other ranks; return the time."""
        self._row[_AT_WAITS] = 1
        return time.perf_counter()

    def end_wait(self, began: float) -> None:
        """End the wait."""
        self.waited_s += time.perf_counter() - began
        self._row[_AT_WAITS] = 0

    def snapshot(self) -> bytes:
        """Return a copy of the row."""
        return bytes(self._row)


PROGRESS = ProgressMarks()  # of this process
