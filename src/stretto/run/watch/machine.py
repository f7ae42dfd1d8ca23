"""How busy this machine is with processes that have nothing to do with a run or a measurement, as Linux
counts it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")
# share of all core time from which on other processes are worth a warning: they slow ranks that share cores
# by about as much, which is more than most settings differ by
BUSY = 0.1
_EVERY_S = 1.0  # from one look at the processes to the next
_LOOKS, _LOOK_EVERY_S = 7, 0.05  # at the number of runnable processes


def core_count() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_text(proc: Path = Path("/proc")) -> str | None:
    """Return how many processes compute on this machine besides the one that asks, if they are enough to
    disturb a measurement: the median of a few looks at /proc/loadavg. None where that does not exist.
    """
    others = list[int]()
    for _ in range(_LOOKS):
        try:
            runnable = (proc / "loadavg").read_text().split()[3].partition("/")[0]
        except OSError:
            return None
        others.append(int(runnable) - 1)
        time.sleep(_LOOK_EVERY_S)
    count, cores = median(others), core_count()
    if count < max(1.0, BUSY * cores):
        return None
    return f"this machine is busy: {count} runnable processes on {cores} cores"


class OtherProcesses:
    """Measures, inside the `with`, which share of the cores processes other than this one and its descendants
    use. Time that a hypervisor takes away counts as theirs.

    A thread looks once a second at what the descendants have used: up to a second of each that has ended is
    missed, and counts as of others.

    Attributes:
        share: of all core time inside the `with`, 0 to 1, once it has ended; None where there is no
            /proc/stat.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self.share: float | None = None
        self._proc, self._cores = proc, core_count()
        self._ticks = dict[int, int]()  # ticks that a process has used, by its id
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> OtherProcesses:
        self._look()
        self._began, self._ticks_before = time.monotonic(), self._sum()
        self._busy_before = self._busy()
        self._watcher.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        busy, seconds = self._busy(), time.monotonic() - self._began
        self._ended.set()
        self._watcher.join()
        self._look()
        if busy is not None and self._busy_before is not None and seconds > 0:
            ticks = busy - self._busy_before - (self._sum() - self._ticks_before)
            share = ticks / _TICKS / (seconds * self._cores)
            self.share = min(1.0, max(0.0, share))

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._look()

    def _sum(self) -> int:
        return sum(self._ticks.values())

    def _look(self) -> None:
        """Note what this process and its descendants have used so far; a descendant stays one if its parent
        ends.
        """
        processes = {pid: (parent, ticks) for pid, parent, ticks in self._processes()}
        for pid in processes:
            line, at = list[int](), pid
            while at in processes and at not in self._ticks and at != os.getpid():
                line.append(at)
                at = processes[at][0]
            if at == os.getpid() or at in self._ticks:
                self._ticks.update((each, processes[each][1]) for each in (*line, at) if each in processes)

    def _processes(self) -> Iterator[tuple[int, int, int]]:
        """Yield the id of each process, its parent's, and the ticks that it has used."""
        for path in self._proc.glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended
                fields = path.read_text().rpartition(")")[2].split()
                yield int(path.parent.name), int(fields[1]), int(fields[11]) + int(fields[12])

    def _busy(self) -> int | None:
        """Ticks in which any process ran on the cores that this one may use, since the machine started."""
        try:
            lines = (self._proc / "stat").read_text().splitlines()
        except OSError:
            return None
        cores: Any = os.sched_getaffinity(0)
        ticks = {name: [*map(int, values)] for name, *values in map(str.split, lines) if name[:3] == "cpu"}
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user
        return sum(sum(ticks[f"cpu{core}"][:8]) - sum(ticks[f"cpu{core}"][3:5]) for core in cores)
