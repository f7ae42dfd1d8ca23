"""Progress of a pass over data, on stderr: a bar in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

EVERY_S = 10.0


class PassBar:
    """Shows how much of a pass is done.

    Args:
        label: first word of the bar and of each line.
        total: of what `show` counts.
        quiet: show nothing.
    """

    def __init__(self, label: str, total: int, quiet: bool = False) -> None:
        self._label, self._total = label, total
        self._quiet = quiet
        self._last = time.perf_counter()
        self._bar = None
        if not quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn(label),
                BarColumn(bar_width=None),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[text]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task: TaskID = self._bar.add_task(label, total=total, text="")

    def show(self, done: int, text: str) -> None:
        """Show that `done` of the total is done, with a text beside it."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, text=text)
        elif not self._quiet and time.perf_counter() - self._last > EVERY_S:
            self._last = time.perf_counter()
            print(f"{self._label} {100 * done / self._total:.0f}% | {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
