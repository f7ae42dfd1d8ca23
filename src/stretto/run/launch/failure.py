"""Failures of ranks: how one is reported, and which of several is the cause."""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from stretto.errors import StrettoError
from stretto.run.launch.stop import StopRequest

FailureKind = Literal["input", "error", "died", "server", "silent", "gone", "hung"]

_PLACE = re.compile(r"\[[^\]]*gloo/[^\]]*\] ")
_GLOO = "gloo/"  # gloo's errors begin with the place in its source, and have no class of their own
_LATE = ("Timed out", "timed out", "wait timeout", "Watchdog caught collective operation timeout")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed.

    kind: `input`: a StrettoError; `error`: any other exception; `died`: the process ended without a report;
        `server`: the process that ranks are forked from has died, so their own state is unknown;
        `silent`: it timed out waiting for another rank; `gone`: another rank's connection closed;
        `hung`: its launcher found that it makes no progress.
    name: class of the exception; "" if the process died.
    """

    rank: int
    kind: FailureKind
    name: str
    message: str
    traceback: str = ""
    hint: str | None = None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Return the failure that `error`, the exception being handled, describes."""
        text = "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, StrettoError):
            return cls(
                rank=rank,
                kind="silent" if isinstance(error, RanksMissing) else "input",
                name=type(error).__name__,
                message=error.message,
                traceback=text,
                hint=error.hint,
            )
        notes: list[str] = getattr(error, "__notes__", [])
        message = ", ".join([_PLACE.sub("", str(error)) or type(error).__name__, *notes])
        return cls(
            rank=rank,
            kind=peer_failure(error) or "error",
            name=type(error).__name__,
            message=message,
            traceback=text,
        )

    @classmethod
    def died(cls, rank: int, exitcode: int | None) -> Failure:
        """Return the failure of a process that ended without a report."""
        if exitcode is None or exitcode >= 0:
            return cls(
                rank=rank, kind="died", name="", message=f"ended with exit code {exitcode} without a report"
            )
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:
            name = f"signal {-exitcode}"
        hint = "the system kills the largest process when memory runs out" if name == "SIGKILL" else None
        return cls(rank=rank, kind="died", name="", message=f"was killed by {name}", hint=hint)


def peer_failure(error: BaseException) -> Literal["silent", "gone"] | None:
    """Return "silent" or "gone" if the error only reports that another rank does not answer or is gone; None
    if it arose on this rank.
    """
    from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

    root, visited = error, set[int]()  # the root was raised first; the others come from cleaning up
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        root = cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    lost = isinstance(root, DistBackendError | DistNetworkError | DistStoreError)
    if not lost and _GLOO not in str(root):
        return None
    return "silent" if any(word in str(root) for word in _LATE) else "gone"


def first_cause(failures: Mapping[int, Failure], ranks: Collection[int]) -> Failure:
    """Return the failure that caused the others.

    Args:
        failures: failures by rank, in order of arrival. If all are from ranks that waited for others, the
            cause is a rank that has not reported.
        ranks: all ranks of the job.
    """
    reported = list(failures.values())
    hung = [failure for failure in reported if failure.kind == "hung"]
    original = hung or [failure for failure in reported if failure.kind not in ("silent", "gone")]
    if original:
        return original[0]
    waits = [failure for failure in reported if failure.kind == "silent"]
    missing = sorted(set(ranks) - set(failures))
    if not waits or not missing:
        return waits[0] if waits else reported[0]
    who = f"ranks {', '.join(map(str, missing))} do" if len(missing) > 1 else f"rank {missing[0]} does"
    messages = "; ".join(f"rank {f.rank}: {f.message}" for f in waits[:4])
    return Failure(
        rank=missing[0],
        kind="silent",
        name=waits[0].name,
        message=f"{who} not answer ({messages})",
        traceback=waits[0].traceback,
        hint=waits[0].hint or "it hangs or is slow; train.timeout_s is the limit",
    )


WAIT_FOR_CAUSE_S = 3.0


class RanksMissing(StrettoError):
    """Ranks have not registered in time for the start of the job."""


class TrainingFailed(RuntimeError):
    """The run cannot continue: a loss or gradient is not finite; names the step, rank and microbatch."""


@contextmanager
def error_context(activity: str) -> Generator[None]:
    """Add to an error what the rank was doing, such as "in step 3"."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, TrainingFailed):
            error.add_note(activity)
        raise


@contextmanager
def report_root_cause_first(stop: StopRequest) -> Generator[None]:
    """Under torchrun, let the rank that caused a failure report it first.

    When a rank dies, its peers fail within milliseconds. Each peer waits here before it raises, until
    torchrun has noticed the first failure and signals the others. The launcher of local ranks needs no such
    delay: it receives every failure and picks the cause (`first_cause`).
    """
    try:
        yield
    except BaseException as error:
        end = time.monotonic() + WAIT_FOR_CAUSE_S
        while peer_failure(error) and stop.signal is None and time.monotonic() < end:
            time.sleep(0.02)
        raise
