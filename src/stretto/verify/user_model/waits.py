"""Messages from rank to rank that never come: an error that names ranks and calls.

Collectives have the timeout of their group, which can be changed; gloo's sends and receives wait as long as
the group was made for, half an hour.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
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
        _store().delete_key(_key(this_rank()))  # of a proof before
    try:
        yield
    except RuntimeError as error:  # this rank was in a collective that another one cannot reach
        if "Timed out" in str(error) and (deadlock := _deadlock(seconds)) is not None:
            raise deadlock from error
        raise
    finally:
        for name, method in replaced.items():
            setattr(ProcessGroup, name, method)


def _bounded(method: Any, name: str, seconds: float) -> Any:
    def start(group: ProcessGroup, tensors: Any, *arguments: Any, **named: Any) -> Any:
        work = method(group, tensors, *arguments, **named)
        if work is None or tensors[0].device.type != "cpu":
            return work
        peer = (*arguments, *named.values())[0] if name != "recv_anysource" else None
        return _BoundedWork(work, _described(name, group, peer), seconds)

    return start


def _described(name: str, group: ProcessGroup, peer: int | None) -> str:
    """A call, for example: its recv from rank 1 (train.py:12)."""
    called = f"its {name}" if name == "send" else "its recv"
    if peer is not None:
        rank = dist.get_global_rank(group, peer)
        called += f" to rank {rank}" if name == "send" else f" from rank {rank}"
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "stretto"):
        frame = frame.f_back
    return called if frame is None else f"{called} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


class _BoundedWork:
    """A pending message: wraps torch's `Work`."""

    def __init__(self, work: Any, call: str, seconds: float) -> None:
        self._work, self._call = work, call
        self._seconds = seconds

    def wait(self, *arguments: Any, **named: Any) -> Any:
        """Like torch's `Work.wait`, with a default timeout."""
        if arguments or named:
            return self._work.wait(*arguments, **named)
        started = time.monotonic()
        try:
            return self._work.wait(timedelta(seconds=self._seconds))
        except RuntimeError as error:
            _store().set(_key(this_rank()), self._call)
            # earlier: the other rank has failed, or has given up its own wait, which ends this one
            early = time.monotonic() - started < self._seconds
            raise (_deadlock(self._seconds, minimum=2 if early else 1) or error) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _deadlock(seconds: float, minimum: int = 1) -> StrettoError | None:
    """The calls that ranks are waiting in; None if fewer than `minimum` ranks wait for a message."""
    if not dist.is_initialized():
        return None
    time.sleep(_GRACE)
    store = _store()
    calls = {r: store.get(_key(r)).decode() for r in range(world_size()) if store.check([_key(r)])}
    if len(calls) < minimum:
        return None
    waiting = [f"rank {waiter} waits for {its_call}" for waiter, its_call in calls.items()]
    if quiet := [str(r) for r in range(world_size()) if r not in calls]:
        waiting.append(f"rank{'s' * (len(quiet) > 1)} {', '.join(quiet)} for no message")
    return StrettoError(
        f"after {seconds:g} s {', '.join(waiting)}: a deadlock",
        hint="send and receive in one order on both ranks, or start them together with batch_isend_irecv; "
        "if a step takes longer than this, give prove(..., timeout=SECONDS)",
    )


def _key(rank: int) -> str:
    return f"stretto/prove/waits/{rank}"
