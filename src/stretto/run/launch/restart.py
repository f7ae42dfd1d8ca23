"""Restart a job after a failure: how often, how soon, and when another attempt would be pointless."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from stretto.errors import counted
from stretto.run.launch.failure import Failure
from stretto.run.launch.local import RankFailed
from stretto.run.launch.stop import StopRequest

T = TypeVar("T")

RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # tells ranks how often their job was restarted
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 60.0
LOST = ("died", "silent", "hung")  # failures of one rank, without which others might continue
_POLL_S = 0.05
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e[+-]?\d+)?")


def restart_count() -> int:
    """Return how often torchrun or the local launcher has restarted this rank's job."""
    return int(os.environ.get(RESTARTS, 0))


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """The progress of a job, according to its folder.

    Attributes:
        steps: number of recorded steps.
        saved: step of the newest checkpoint, 0 if there is none.
        begun: True if the last attempt has begun a step; otherwise it ended while starting.
    """

    steps: int
    saved: int
    begun: bool = True

    @property
    def step(self) -> int | None:
        """Step in which the last attempt ended, or None if it was starting."""
        return self.steps + 1 if self.begun else None


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One restart of a job.

    Attributes:
        number, limit: index of this restart from 1, and the most there may be.
        failure: failure of the last attempt.
        step: step in which the job failed, or None if it was starting.
        saved: step of the checkpoint that the job continues from, 0 if it starts from the beginning.
        delay_s: wait before the restart, seconds.
        before: the failure before this one, if it was different and the job has made no progress since.
    """

    number: int
    limit: int
    failure: Failure
    step: int | None
    saved: int
    delay_s: float
    before: Failure | None = None

    @property
    def text(self) -> str:
        """The restart as one line."""
        start = f"from the checkpoint of step {self.saved}" if self.saved else "from the start"
        before = "" if self.before is None else f" (the time before: {_cause(self.before)})"
        return (
            f"restart {self.number} of {self.limit}: {_cause(self.failure)} {_phase(self.step)}{before}; "
            f"continuing {start} in {self.delay_s:g} s"
        )


def supervise(
    attempt: Callable[[int], T],
    *,
    limit: int,
    stop: StopRequest,
    progress: Callable[[], JobProgress],
    prepare: Callable[[Restart], None],
    shrink: Callable[[], bool] = lambda: False,
) -> T:
    """Call `attempt` with the number of restarts so far until it succeeds.

    Each restart follows a wait, which doubles while attempts end without a new checkpoint. A job is not
    restarted if a rank reported bad input, if it was asked to stop, or if it failed twice in a row in the
    same way without progress: in one step, from the same checkpoint, the same rank died, hung or was silent,
    or the same error was raised. While a job starts only an error counts: occasional deaths of ranks happen
    there too, and starting may take longer than many steps.

    Args:
        attempt: runs the job once.
        limit: most restarts.
        stop: a stop request ends the wait.
        progress: returns the job's progress after an attempt.
        prepare: called before each restart, before the wait.
        shrink: called if a rank was lost twice in a row without progress; lets later attempts continue
            without it and returns whether they can.

    Raises:
        Stopped: a signal came between two attempts.
        RankFailed: the last attempt failed.
    """
    delay, saved = FIRST_DELAY_S, progress().saved
    count, last = 0, None
    while True:
        try:
            return attempt(count)
        except RankFailed as error:
            if limit == 0 or error.signal is not None:
                raise
            failure = error.failure
        # outside of the handler, whose traceback would keep the attempt's store and its port
        reached = progress()
        position = reached.step, reached.saved
        before = last[1] if last is not None and last[0] == position else None
        again = None if before is None or _kind_of(before) != _kind_of(failure) else before
        smaller = again is not None and failure.kind in LOST and shrink()
        if again is not None and not smaller and (reached.begun or failure.kind == "error"):
            raise RankFailed(_with_note(failure, _twice(again, failure, reached)))
        if count == limit:
            raise RankFailed(
                _with_note(failure, f"{_phase(reached.step)}, after {counted(count, 'restart')}")
            )
        last = position, failure
        count += 1
        if reached.saved > saved:
            delay, saved = FIRST_DELAY_S, reached.saved
        prepare(
            Restart(
                number=count,
                limit=limit,
                failure=failure,
                step=reached.step,
                saved=reached.saved,
                delay_s=delay,
                before=before if again is None else None,
            )
        )
        _wait(delay, stop)
        delay = min(2 * delay, LONGEST_DELAY_S)


def _wait(seconds: float, stop: StopRequest) -> None:
    end = time.monotonic() + seconds
    stop.check()
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_S))
        stop.check()


def _kind_of(failure: Failure) -> tuple[object, ...]:
    """Return what two failures of one cause have in common. An error may be raised by any of several
    ranks.
    """
    if failure.kind == "hung":  # the message reports what each rank was doing at that moment
        return failure.rank, failure.kind
    rank = failure.rank if failure.kind in LOST else None
    return rank, failure.kind, failure.name, _NUMBERS.sub("#", failure.message)


def _phase(step: int | None) -> str:
    return "while the job started" if step is None else f"in step {step}"


def _twice(before: Failure, failure: Failure, reached: JobProgress) -> str:
    """Return why a failure is not tried again, with its difference from the time before."""
    differs = "" if _cause(before) == _cause(failure) else f" (the time before: {_cause(before)})"
    return f"the second time in a row {_phase(reached.step)}{differs}, so that starting again would not help"


def _cause(failure: Failure) -> str:
    """Return the failure as part of a line."""
    first = (failure.message.splitlines() or [""])[0]
    if failure.kind in ("silent", "server") or failure.name == "TrainingFailed":
        return first
    text = first if failure.kind in ("died", "hung") else f"failed: {failure.name}: {first}"
    return f"rank {failure.rank} {text}"


def _with_note(failure: Failure, ending: str) -> Failure:
    return replace(failure, message=f"{failure.message}, {ending}")
