"""Messages and collectives that never come: an error that names ranks and calls.

Collectives have the timeout of their group, which can be changed; gloo's sends and receives wait as long as
the group was made for, half an hour.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from stretto.engine.parallel.control import this_rank, world_size
from stretto.errors import StrettoError

_METHODS = ("send", "recv", "recv_anysource")
_GRACE = 2.0  # seconds for the other ranks to reach their limit too


@contextmanager
def bounded_waits(seconds: float) -> Generator[None]:
    """Raise StrettoError for any wait within the context, on a message in host memory, that takes longer."""
    replaced = {name: vars(ProcessGroup)[name] for name in _METHODS if name in vars(ProcessGroup)}
    for name in replaced:
        setattr(ProcessGroup, name, _bounded(getattr(ProcessGroup, name), name, seconds))
    if dist.is_initialized():
        _calls().delete_key(str(this_rank()))  # of a proof before
    try:
        yield
    except RuntimeError as error:
        place = _place(frame for frame, _ in reversed([*walk_tb(error.__traceback__)]))
        _record(error, f"its collective{place}" if place else "the other ranks, to compare")
        if (deadlock := _deadlock(seconds)) is None:
            raise
        raise deadlock from error
    finally:
        for name, method in replaced.items():
            setattr(ProcessGroup, name, method)


def _bounded(method: Any, name: str, seconds: float) -> Any:
    def start(group: ProcessGroup, tensors: Any, *arguments: Any, **named: Any) -> Any:
        work = method(group, tensors, *arguments, **named)
        if work is None or tensors[0].device.type != "cpu":
            return work
        peer = None if name == "recv_anysource" else (*arguments, *named.values())[0]
        end = "any rank" if peer is None else f"rank {dist.get_global_rank(group, peer)}"
        call = f"its {'send to' if name == 'send' else 'recv from'} {end}"
        return _BoundedWork(work, call + _place(f for f, _ in walk_stack(sys._getframe(1))), seconds)

    return start


def _place(frames: Iterable[FrameType]) -> str:
    """The first of these frames that is the user's, such as " (train.py:12)"; empty without any."""
    for frame in frames:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("contextlib", "torch", "stretto"):
            return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
    return ""


class _BoundedWork:
    """A pending message: wraps torch's `Work`."""

    def __init__(self, work: Any, call: str, seconds: float) -> None:
        self._work, self._call = work, call
        self._seconds = seconds

    def wait(self, *arguments: Any, **named: Any) -> Any:
        """Like torch's `Work.wait`, with a default timeout."""
        if arguments or named:
            return self._work.wait(*arguments, **named)
        try:
            return self._work.wait(timedelta(seconds=self._seconds))
        except RuntimeError as error:
            _record(error, self._call)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _calls() -> Any:
    return dist.PrefixStore("stretto/prove/waits", dist.distributed_c10d._get_default_store())


def _record(error: RuntimeError, call: str) -> None:
    """Publish what this rank waited for, if it waited too long or another rank ended its wait."""
    for ending in ("Timed out", "Connection"):
        if ending in str(error) and dist.is_initialized() and not _calls().check([str(this_rank())]):
            _calls().set(str(this_rank()), f"{ending}: {call}")


def _deadlock(seconds: float) -> StrettoError | None:
    """The calls that ranks are waiting in; None if none has waited too long."""
    if not dist.is_initialized() or not _calls().check([str(this_rank())]):
        return None
    time.sleep(_GRACE)
    calls, ranks = _calls(), range(world_size())
    records = {r: calls.get(str(r)).decode().partition(": ") for r in ranks if calls.check([str(r)])}
    if "Timed out" not in {ending for ending, _, _ in records.values()}:
        return None
    waiting = [f"rank {r} waits for {records[r][2] if r in records else 'no rank'}" for r in ranks]
    return StrettoError(
        f"after {seconds:g} s {', '.join(waiting)}: a deadlock",
        hint="make the same collectives on all ranks of a group, send and receive in one order on both, "
        "or together with batch_isend_irecv; if a step takes longer, give prove(..., timeout=SECONDS)",
    )
