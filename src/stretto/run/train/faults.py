"""What went wrong in a run, said by the rank that knows."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from stretto.run.launch.failure import peer_failure
from stretto.run.train.stop import StopRequest

WAIT_FOR_CAUSE_S = 3.0


class TrainingFailed(RuntimeError):
    """The run cannot go on: a loss or a gradient that is not finite, with the step, rank and microbatch."""


@contextmanager
def doing(what: str) -> Generator[None]:
    """Let an error say when it came."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, TrainingFailed):
            error.add_note(what)
        raise


@contextmanager
def cause_first(stop: StopRequest) -> Generator[None]:
    """Under torchrun, let the rank that failed of itself be seen first.

    When a rank dies, all that talk to it fail within milliseconds. They wait a little before they say so,
    until torchrun has seen the first and tells them to end. (The launcher of local ranks sorts it out by
    itself.)
    """
    try:
        yield
    except BaseException as error:
        end = time.monotonic() + WAIT_FOR_CAUSE_S
        while peer_failure(error) and stop.signal is None and time.monotonic() < end:
            time.sleep(0.02)
        raise
