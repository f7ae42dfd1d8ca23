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
    """

    steps: int
    saved: int


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One restart of a job.

    Attributes:
        number, limit: the first is 1 of the limit.
        step: in which the job failed.
        saved: step of the checkpoint that it goes on from; 0: it starts from the beginning.
        delay_s: until then.
    """

    number: int
    limit: int
    failure: Failure
    step: int
    saved: int
    delay_s: float

    @property
    def text(self) -> str:
        """The restart in a line."""
        start = f"from the checkpoint of step {self.saved}" if self.saved else "from the start"
        return (
            f"restart {self.number} of {self.limit}: {_cause(self.failure)} in step {self.step}; "
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
    reports as bad input is never tried again, nor is a job that was asked to stop, nor one that has failed in
    the same way twice in one step: the same rank died, hung or was silent, or the same error was raised.

    Args:
        limit: of restarts.
        stop: ends the waiting.
        progress: after an attempt.
        prepare: called before each restart, before the wait.
        shrink: where a rank was lost twice in one step, let later attempts do without it;
            returns whether they can.

    Raises:
        Stopped: a signal came between two attempts.
        RankFailed: the last attempt failed.
    """
    seen = set[tuple[object, ...]]()
    delay, saved = FIRST_DELAY_S, progress().saved
    number = 0
    while True:
        try:
            return attempt(number)
        except RankFailed as error:
            if limit == 0 or error.signal is not None:
                raise
            failure = error.failure
        # outside of the handler, whose traceback would keep the attempt's store and its port
        reached = progress()
        step = reached.steps + 1
        same = (step, *_kind_of(failure))
        if same in seen and not (failure.kind in LOST and shrink()):
            why = f"the second time in step {step}, so that starting again would not help"
            raise RankFailed(_with(failure, why))
        if number == limit:
            raise RankFailed(_with(failure, f"in step {step}, after {number} restarts"))
        seen.add(same)
        number += 1
        if reached.saved > saved:
            delay, saved = FIRST_DELAY_S, reached.saved
        prepare(
            Restart(
                number=number,
                limit=limit,
                failure=failure,
                step=step,
                saved=reached.saved,
                delay_s=delay,
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


def _cause(failure: Failure) -> str:
    """The failure as part of a line."""
    first = (failure.message.splitlines() or [""])[0]
    if failure.kind == "silent" or failure.name == "TrainingFailed":
        return first
    what = first if failure.kind in ("died", "hung") else f"failed: {failure.name}: {first}"
    return f"rank {failure.rank} {what}"


def _with(failure: Failure, why: str) -> Failure:
    return replace(failure, message=f"{failure.message}, {why}")
