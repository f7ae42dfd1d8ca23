"""Start a job again after a failure: how often, how soon, and when another attempt would be in vain."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from stretto.run.launch.failure import Failure
from stretto.run.launch.local import RankFailed
from stretto.run.launch.stop import StopRequest

T = TypeVar("T")

RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # tells ranks how often their job was started again
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 60.0
LOST = ("died", "silent", "hung")  # failures of one rank, without which others might go on
_POLL_S = 0.05
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e[+-]?\d+)?")


def restart_count() -> int:
    """How often torchrun or the local launcher has started this rank's job again."""
    return int(os.environ.get(RESTARTS, 0))


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a job is, as its folder tells.

    Attributes:
        steps: that are recorded.
        saved: of its newest checkpoint, 0 where it has none.
        begun: the last attempt has begun a step; else it ended while it started.
    """

    steps: int
    saved: int
    begun: bool = True

    @property
    def step(self) -> int | None:
        """The step in which the last attempt ended; None: it was starting."""
        return self.steps + 1 if self.begun else None


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One restart of a job.

    Attributes:
        number, limit: the first is 1 of the limit.
        step: in which the job failed; None: while it started.
        saved: step of the checkpoint that it goes on from; 0: it starts from the beginning.
        delay_s: until then.
        before: the failure before this one, if it was another and the job has made no progress since.
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
        """The restart in a line."""
        start = f"from the checkpoint of step {self.saved}" if self.saved else "from the start"
        before = "" if self.before is None else f" (the time before: {_cause(self.before)})"
        return (
            f"restart {self.number} of {self.limit}: {_cause(self.failure)} {_when(self.step)}{before}; "
            f"going on {start} in {self.delay_s:g} s"
        )


def supervise(
    attempt: Callable[[int], T],
    *,
    limit: int,
    stop: StopRequest,
    progress: Callable[[], Progress],
    prepare: Callable[[Restart], None],
    shrink: Callable[[], bool] = lambda: False,
) -> T:
    """Call `attempt` with the number of restarts so far until it succeeds.

    A wait comes before each restart; it doubles while attempts end without a new checkpoint. What a rank
    reports as bad input is never tried again, nor is a job that was asked to stop, nor one that has failed
    twice in a row in the same way without progress: in one step, from the same checkpoint, the same rank
    died, hung or was silent, or the same error was raised. While a job starts only an error counts: whatever
    kills ranks now and then does so there too, and starting may take longer than many steps.

    Args:
        limit: of restarts.
        stop: ends the waiting.
        progress: after an attempt.
        prepare: called before each restart, before the wait.
        shrink: where a rank was lost twice in a row without progress, let later attempts do without it;
            returns whether they can.

    Raises:
        Stopped: a signal came between two attempts.
        RankFailed: the last attempt failed.
    """
    delay, saved = FIRST_DELAY_S, progress().saved
    number, last = 0, None
    while True:
        try:
            return attempt(number)
        except RankFailed as error:
            if limit == 0 or error.signal is not None:
                raise
            failure = error.failure
        # outside of the handler, whose traceback would keep the attempt's store and its port
        reached = progress()
        place = reached.step, reached.saved
        before = last[1] if last is not None and last[0] == place else None
        again = None if before is None or _kind_of(before) != _kind_of(failure) else before
        smaller = again is not None and failure.kind in LOST and shrink()
        if again is not None and not smaller and (reached.begun or failure.kind == "error"):
            raise RankFailed(_with(failure, _twice(again, failure, reached)))
        if number == limit:
            raise RankFailed(_with(failure, f"{_when(reached.step)}, after {number} restarts"))
        last = place, failure
        number += 1
        if reached.saved > saved:
            delay, saved = FIRST_DELAY_S, reached.saved
        prepare(
            Restart(
                number=number,
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
    """What two failures of one cause have in common. An error may be raised by any of several ranks."""
    if failure.kind == "hung":  # the message says what each rank was doing just then
        return failure.rank, failure.kind
    rank = failure.rank if failure.kind in LOST else None
    return rank, failure.kind, failure.name, _NUMBERS.sub("#", failure.message)


def _when(step: int | None) -> str:
    return "while the job started" if step is None else f"in step {step}"


def _twice(before: Failure, failure: Failure, reached: Progress) -> str:
    """Why a failure is not tried again, with what differs from the time before."""
    differs = "" if _cause(before) == _cause(failure) else f" (the time before: {_cause(before)})"
    return f"the second time in a row {_when(reached.step)}{differs}, so that starting again would not help"


def _cause(failure: Failure) -> str:
    """The failure as part of a line."""
    first = (failure.message.splitlines() or [""])[0]
    if failure.kind == "silent" or failure.name == "TrainingFailed":
        return first
    what = first if failure.kind in ("died", "hung") else f"failed: {failure.name}: {first}"
    return f"rank {failure.rank} {what}"


def _with(failure: Failure, why: str) -> Failure:
    return replace(failure, message=f"{failure.message}, {why}")
