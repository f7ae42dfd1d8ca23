"""The launcher's watch over its ranks: it reads their rows, and ends the job when one makes no progress."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.run.launch.failure import Failure
from stretto.run.launch.local import Look
from stretto.run.watch.board import STACKS, StatusBoard
from stretto.run.watch.hang import (
    HANG,
    RECORD,
    STACK,
    RankStatus,
    aborted,
    crash_stack,
    failure,
    judge,
    odd_call,
    opposed_calls,
    process_state,
    read_records,
    remove_records,
)
from stretto.run.watch.rank import watched

_LONGEST_LOOK_S = 1.0  # most that counts between two looks: in a longer one this process did not run either
_GATHER_S = 6.0  # for records that were not requested ahead of the limit
_LEFT_S = 2.0  # for records of the ranks that remain after another has failed
_STACK_S = 1.0  # for the stacks of a rank that cannot write a record
_AGAIN_S = 2.0  # after ranks were late because of one that may take longer
_STOPPED, _TRACED = "T", "t"
_ABORT = "SIGABRT"


@contextlib.contextmanager
def watching(
    ranks: int, run: Path | None, hang_s: float | None
) -> Generator[tuple[tuple[Any, ...], Look | None, Callable[[], bool]]]:
    """Watch the ranks of a job from its launcher.

    Args:
        run: folder of the run that they train, or None if they train none and are not watched.
        hang_s: limit within a step, as in the config; 0 disables the search for hangs.

    Yields:
        The function and arguments that ranks run around their own function, the callback of the launcher's
        supervision loop, and a function that returns True once any rank has begun a step.
    """
    if run is None:
        yield (), None, lambda: False
        return
    board = StatusBoard(ranks, run / HANG)
    try:
        yield (watched, board), None if hang_s == 0 else Watch(board).look, lambda: board.has_begun
    finally:
        board.close()


class Watch:
    """Judges the ranks on a board.

    Time is counted from look to look, so that suspending the machine, or stopping and continuing the entire
    job, is no hang. A rank under a debugger is not judged. Records are requested shortly before the limit, so
    that they exist when it is reached, however busy the machine is.
    """

    def __init__(self, board: StatusBoard) -> None:
        self.board = board
        self._looked = time.monotonic()
        self._wait_until = 0.0
        self._asked_at: list[int] | None = None  # the marks when records were asked for
        self._marks = [0] * board.ranks
        self._alive = [0] * board.ranks
        self._still = [0.0] * board.ranks
        self._silent_s = [0.0] * board.ranks

    def look(self, processes: Mapping[int, int], failures: Mapping[int, Failure]) -> Failure | None:
        """Judge the ranks that are still running.

        Args:
            processes: process id of each running rank.
            failures: failures of the other ranks.

        Returns:
            The failure of a rank that hangs or whose calls differ from the others', if any.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        statuses = {rank: self._observe(rank, process, passed) for rank, process in processes.items()}
        if failures:
            return self._explain(statuses, processes, failures)
        if now < self._wait_until or any(status.state == _TRACED for status in statuses.values()):
            return None
        folder = self.board.folder
        if not any(status.late for status in statuses.values()):
            soon = any(status.nearly_late for status in statuses.values())
            if soon and self._asked_at is None:  # records may be needed soon
                self._ask()
            elif not soon and self._asked_at is not None:  # they were not
                self._asked_at = None
                remove_records(folder)
            return None
        if self._asked_at != self._marks:  # the records date from an earlier moment
            self._ask()
        self._wait_for_records([rank for rank in processes if statuses[rank].answers], _GATHER_S)
        verdict = judge(statuses, read_records(folder, self.board.ranks))
        if not any(
            statuses[rank].late for rank in verdict.culprits
        ):  # others wait for what may take its time
            self._wait_until = time.monotonic() + _AGAIN_S
            self._asked_at = None
            return None
        unable = [rank for rank in statuses if not (folder / STACK.format(rank=rank)).is_file()]
        for rank in statuses.keys() - set(unable):  # ranks that are continued below must not move the job on
            with contextlib.suppress(OSError):
                os.kill(processes[rank], signal.SIGSTOP)
        for rank in unable:
            self._dump_stack(rank, processes[rank], statuses[rank].state)
        return failure(statuses, verdict, folder)

    def _explain(
        self,
        statuses: Mapping[int, RankStatus],
        processes: Mapping[int, int],
        failures: Mapping[int, Failure],
    ) -> Failure | None:
        """Return a failure that explains those reported: of a rank whose last calls differ from those of
        others, or of one that has crashed, with its stack.
        """
        crashed = next((dead for dead in failures.values() if dead.kind == "died"), None)
        if crashed is not None:
            crashed = replace(crashed, traceback=crash_stack(self.board.read_stacks(0)))
        if any(map(_in_a_call, failures.values())):
            self.board.ask()  # failed ranks have already written theirs
            dead = set() if crashed is None else {crashed.rank}
            self._wait_for_records(set(range(self.board.ranks)) - dead, _LEFT_S)
            diagnosis = read_records(self.board.folder, self.board.ranks)
            everyone = {rank: self._observe(rank, 0, 0.0) for rank in range(self.board.ranks)}
            verdict = odd_call(diagnosis) or opposed_calls(diagnosis)
            if verdict is not None:
                return failure(everyone, verdict, self.board.folder)
            if crashed is not None and _ABORT in crashed.message:
                for rank in processes:
                    if not (self.board.folder / STACK.format(rank=rank)).is_file():
                        self._dump_stack(rank, processes[rank], statuses[rank].state)
                return aborted(crashed, everyone, diagnosis, self.board.folder)
        return crashed if crashed is not None and crashed.traceback else None

    def _observe(self, rank: int, process: int, passed: float) -> RankStatus:
        row, state = self.board.row(rank), process_state(process)
        self._still[rank] = 0.0 if row.marks != self._marks[rank] else self._still[rank] + passed
        self._silent_s[rank] = 0.0 if row.alive_ns != self._alive[rank] else self._silent_s[rank] + passed
        self._marks[rank], self._alive[rank] = row.marks, row.alive_ns
        return RankStatus(
            rank=rank, row=row, seconds=self._still[rank], silent_s=self._silent_s[rank], state=state
        )

    def _ask(self) -> None:
        remove_records(self.board.folder)
        self._asked_at = self._marks.copy()
        self.board.ask()

    def _wait_for_records(self, ranks: Iterable[int], seconds: float) -> None:
        paths = [self.board.folder / RECORD.format(rank=rank) for rank in ranks]
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(path.is_file() for path in paths):
            time.sleep(0.05)

    def _dump_stack(self, rank: int, process: int, state: str) -> None:
        """Write the stacks of a rank that runs no Python, by a signal; a stopped rank must be continued to
        handle it. All ranks are killed right after.
        """
        if not STACKS:
            return
        before = len(self.board.read_stacks(0))
        with contextlib.suppress(OSError):
            try:  # to the main thread, which handles it before it continues
                ctypes.CDLL(None).tgkill(process, process, int(STACKS))
            except (AttributeError, OSError):  # another C library
                os.kill(process, STACKS)
            if state == _STOPPED:
                os.kill(process, signal.SIGCONT)
            end = time.monotonic() + _STACK_S
            while time.monotonic() < end and len(self.board.read_stacks(0)) == before:
                time.sleep(0.02)
            time.sleep(0.05)  # until it is complete
            self.board.folder.mkdir(exist_ok=True)  # not its parents: the run's folder is not created anew
            path = self.board.folder / STACK.format(rank=rank)
            path.write_text(self.board.read_stacks(before), encoding="utf-8")


def _in_a_call(dead: Failure) -> bool:
    """True if a rank failed in a call that others take part in: gloo aborts a process that is sent more than
    it expects.
    """
    return dead.kind in ("silent", "gone") or _ABORT in dead.message
