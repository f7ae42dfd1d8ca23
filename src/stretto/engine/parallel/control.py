"""The control plane: JSON messages between ranks, and work that succeeds on all ranks or raises on all.

Messages use the default process group; without one this process is the only rank. Nothing is pickled, so no
message of another rank can execute code. Messages are signed with the job's key (`signed`) and numbered, and
their length is bounded before memory is allocated for them.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stretto.engine.device import carrier
from stretto.engine.parallel.signed import SIZE, is_genuine, job_key, signature
from stretto.errors import StrettoError

T = TypeVar("T")
LONGEST_ERROR = 4000  # characters of an error message that are sent to the other ranks
LONGEST_MESSAGE = 256 << 20  # bytes that a rank may send at once
_numbers: dict[str, Any] = {"group": None, "last": 0}


class CollectiveError(RuntimeError):
    """Collective work failed on some rank. Raised on every rank; the message names the first that failed."""


def has_group() -> bool:
    """True if a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def this_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if has_group() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if has_group() else 1


def gather_json(value: Any) -> list[Any]:
    """Return every rank's JSON-serialisable value, in rank order, on all ranks. Collective.

    Raises:
        CollectiveError: a message is too long, or is not signed with this job's key.
    """
    if not has_group():
        return [value]
    device = carrier()
    if _numbers["group"] is not dist.group.WORLD:  # messages are counted from 1 in each default group
        _numbers.update(group=dist.group.WORLD, last=0)
    _numbers["last"] += 1
    key, number = job_key(), int(_numbers["last"])
    body = json.dumps(value).encode()
    signed = bytearray(signature(key, this_rank(), number, body) + body)
    data = torch.frombuffer(signed, dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([data.numel()], dtype=torch.int64, device=device))
    longest = max(int(size) for size in sizes)
    for rank, size in enumerate(map(int, sizes)):
        if not SIZE <= size <= LONGEST_MESSAGE:
            raise CollectiveError(
                f"rank {rank} announces a message of {size} bytes, {LONGEST_MESSAGE} at most"
            )
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)  # all_gather requires equal sizes
    padded[: data.numel()] = data
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded)
    values = list[Any]()
    for rank, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        message = bytes(row[: int(size)].cpu().tolist())
        if not is_genuine(key, rank, number, message):
            raise CollectiveError(f"message {number} of rank {rank} is not signed with this job's key")
        values.append(json.loads(message[SIZE:]))
    return values


def run_on_all(work: Callable[[], T]) -> T:
    """Run `work` on every rank; if it raises on any, all raise the error of the first such rank. Collective.

    Raises:
        StrettoError: if that error is one; its message names the rank if several exist.
        CollectiveError: for any other error.
    """
    result: T | None = None
    error: BaseException | None = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    failures = gather_json(None if error is None else _to_record(error))
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise _from_record(rank, failure) from error
    return result  # pyright: ignore[reportReturnType]: no rank raised, so neither did this one


def run_on_first(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its JSON-serialisable result on all; if it raises, raise on all.
    Collective.
    """
    result = run_on_all(lambda: work() if this_rank() == 0 else None)
    return gather_json(result)[0]


def error_of_rank(rank: int, error: BaseException) -> Exception:
    """Return the exception to raise on this rank for another rank's error."""
    return _from_record(rank, _to_record(error))


def _to_record(error: BaseException) -> dict[str, str | None]:
    if isinstance(error, StrettoError):
        return {"kind": "input", "message": error.message, "hint": error.hint}
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = f"the disk is full: {error}"
    elif isinstance(error, OSError | CollectiveError):
        message = str(error)
    else:
        message = f"{type(error).__name__}: {error}"
    return {"kind": "failure", "message": message[:LONGEST_ERROR], "hint": None}


def _from_record(rank: int, failure: dict[str, Any]) -> Exception:
    if failure["kind"] == "input":
        suffix = f" (on rank {rank})" if world_size() > 1 else ""
        return StrettoError(failure["message"] + suffix, hint=failure["hint"])
    return CollectiveError(f"rank {rank}: {failure['message']}")
