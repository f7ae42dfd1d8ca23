"""What went wrong in a run, said by the rank that knows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from stretto.train.stop import StopRequest


WAIT_FOR_CAUSE_S = 3.0


class TrainingFailed(RuntimeError):
    """The run cannot go on: a loss or a gradient that is not finite, with the step, rank and microbatch."""


def is_peer_failure(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone or does not answer."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, dist.DistBackendError | dist.DistNetworkError | ConnectionError):
            return True
        if isinstance(seen, RuntimeError) and ("gloo/" in text or "Connection closed by peer" in text):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


@contextmanager
def cause_first(stop: StopRequest) -> Iterator[None]:
    """Let the rank that failed of itself be seen first.

    When a rank dies, all that talk to it fail within milliseconds. They wait a little before they say so, until the
    launcher has seen the first and tells them to end.
    """
    try:
        yield
    except BaseException as error:
        end = time.monotonic() + WAIT_FOR_CAUSE_S
        while is_peer_failure(error) and stop.signal is None and time.monotonic() < end:
            time.sleep(0.02)
        raise
