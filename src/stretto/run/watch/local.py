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
from stretto.run.watch.board import STACKS, Board
from stretto.run.watch.hang import (
    HANG,
    RECORD,
    STACK,
    Seen,
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

_LONGEST_LOOK_S = 1.0  # time between two looks that counts: in a longer one this process did not run either
_GATHER_S = 6.0  # for records that were not asked for ahead
_LEFT_S = 2.0  # for records of ranks that are left after another has failed
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
        run: the folder of the run that they train; None: they train none, and are not watched.
        hang_s: as in the config; 0: hangs are not looked for.

    Yields:
        What ranks run before their own function, what the launcher does now and then, and whether any rank
        has begun a step.
    """
    if run is None:
        yield (), None, lambda: False
        return
    board = Board(ranks, run / HANG)
    try:
        yield (watched, board), None if hang_s == 0 else Watch(board).look, lambda: board.has_begun
    finally:
        board.close()


class Watch:
    """Judges the ranks on a board.

    Time counts from look to look, so that a machine that was suspended, or a job that was stopped as a whole
    and continued, is no hang. A rank under a debugger is not judged. Ranks are asked for records shortly
    before the limit, so that these are there when it is reached, however busy the machine is.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self._looked = time.monotonic()
        self._wait_until = 0.0
        self._asked_at: list[int] | None = None  # the marks when records were asked for
        self._marks = [0] * board.ranks
        self._alive = [0] * board.ranks
        self._still = [0.0] * board.ranks
        self._mute = [0.0] * board.ranks

    def look(self, processes: Mapping[int, int], failures: Mapping[int, Failure]) -> Failure | None:
        """Look at the ranks that are still running.

        Args:
            processes: of these ranks.
            failures: of others.

        Returns:
            The failure of a rank that hangs, once there is one, or of one whose calls differ from others'.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        seen = {rank: self._see(rank, process, passed) for rank, process in processes.items()}
        if failures:
            return self._after(seen, processes, failures)
        if now < self._wait_until or any(one.state == _TRACED for one in seen.values()):
            return None
        if not any(one.late for one in seen.values()):
            self._ask_ahead(any(one.nearly_late for one in seen.values()))
            return None
        folder = self.board.folder
        self._gather(seen, processes)
        verdict = judge(seen, read_records(folder, self.board.ranks))
        if not any(seen[rank].late for rank in verdict.culprits):  # others wait for what may take its time
            self._wait_until = time.monotonic() + _AGAIN_S
            self._asked_at = None
            return None
        unable = [rank for rank in seen if not (folder / STACK.format(rank=rank)).is_file()]
        for rank in seen.keys() - set(unable):  # those that are continued must not move the job on
            with contextlib.suppress(OSError):
                os.kill(processes[rank], signal.SIGSTOP)
        for rank in unable:
            self._dump_stack(rank, processes[rank], seen[rank].state)
        return failure(seen, verdict, folder)

    def _after(
        self, seen: Mapping[int, Seen], processes: Mapping[int, int], failures: Mapping[int, Failure]
    ) -> Failure | None:
        """What is to be said in place of the failures of ranks: of one whose last calls differ from those of
        others, or of one that has crashed, with its stack.
        """
        crashed = next((one for one in failures.values() if one.kind == "died"), None)
        if crashed is not None:
            crashed = replace(crashed, traceback=crash_stack(self.board.read_stacks(0)))
        if any(map(_in_a_call, failures.values())):
            self.board.ask()  # those that have failed have written theirs
            dead = set() if crashed is None else {crashed.rank}
            self._wait_for_records(set(range(self.board.ranks)) - dead, _LEFT_S)
            diagnosis = read_records(self.board.folder, self.board.ranks)
            every = {rank: self._see(rank, 0, 0.0) for rank in range(self.board.ranks)}
            verdict = odd_call(diagnosis) or opposed_calls(diagnosis)
            if verdict is not None:
                return failure(every, verdict, self.board.folder)
            if crashed is not None and _ABORT in crashed.message:
                for rank in processes:
                    if not (self.board.folder / STACK.format(rank=rank)).is_file():
                        self._dump_stack(rank, processes[rank], seen[rank].state)
                return aborted(crashed, every, diagnosis, self.board.folder)
        return crashed if crashed is not None and crashed.traceback else None

    def _see(self, rank: int, process: int, passed: float) -> Seen:
        row, state = self.board.row(rank), process_state(process)
        self._still[rank] = 0.0 if row.marks != self._marks[rank] else self._still[rank] + passed
        self._mute[rank] = 0.0 if row.alive_ns != self._alive[rank] else self._mute[rank] + passed
        self._marks[rank], self._alive[rank] = row.marks, row.alive_ns
        return Seen(rank=rank, row=row, seconds=self._still[rank], mute=self._mute[rank], state=state)

    def _ask_ahead(self, soon: bool) -> None:
        """Ask for records, as they may be needed soon; remove them where they were not."""
        if soon and self._asked_at is None:
            self._ask()
        elif not soon and self._asked_at is not None:
            self._asked_at = None
            remove_records(self.board.folder)

    def _ask(self) -> None:
        remove_records(self.board.folder)
        self._asked_at = self._marks.copy()
        self.board.ask()

    def _gather(self, seen: Mapping[int, Seen], processes: Mapping[int, int]) -> None:
        """Have all ranks that can write their records."""
        if self._asked_at != self._marks:  # what was written ahead is of another moment
            self._ask()
        self._wait_for_records([rank for rank in processes if seen[rank].answers], _GATHER_S)

    def _wait_for_records(self, ranks: Iterable[int], seconds: float) -> None:
        paths = [self.board.folder / RECORD.format(rank=rank) for rank in ranks]
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(path.is_file() for path in paths):
            time.sleep(0.05)

    def _dump_stack(self, rank: int, process: int, state: str) -> None:
        """Have the stacks of a rank written that runs no Python: by a signal, for which a stopped one must
        be continued. All ranks are killed right after.
        """
        if not STACKS:
            return
        before = len(self.board.read_stacks(0))
        with contextlib.suppress(OSError):
            _signal_main_thread(process)
            if state == _STOPPED:
                os.kill(process, signal.SIGCONT)
            end = time.monotonic() + _STACK_S
            while time.monotonic() < end and len(self.board.read_stacks(0)) == before:
                time.sleep(0.02)
            time.sleep(0.05)  # the rest of it
            self.board.folder.mkdir(exist_ok=True)  # in the run's, which is not made anew
            path = self.board.folder / STACK.format(rank=rank)
            path.write_text(self.board.read_stacks(before), encoding="utf-8")


def _in_a_call(one: Failure) -> bool:
    """Whether a rank failed in a call that others take part in: gloo ends a process that is sent more than it
    expects.
    """
    return one.kind in ("silent", "gone") or _ABORT in one.message


def _signal_main_thread(process: int) -> None:
    """Send the signal for stacks; to the main thread, which handles it before it goes on."""
    try:
        ctypes.CDLL(None).tgkill(process, process, int(STACKS))
    except (AttributeError, OSError):  # another C library
        os.kill(process, STACKS)
