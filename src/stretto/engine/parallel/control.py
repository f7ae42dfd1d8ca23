"""All ranks succeed or all ranks raise: the control messages of saving and loading.

What crosses ranks here is JSON of limited length, over the default process group; without one everything runs
in this process alone.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from stretto.errors import StrettoError
from stretto.files import full_disk

T = TypeVar("T")
LONGEST_ERROR = 4000  # characters of an error that are sent to the other ranks


class CheckpointError(RuntimeError):
    """Saving or loading failed, on every rank alike; the message names the rank where it began."""


def has_group() -> bool:
    """Whether there are other ranks to agree with."""
    return dist.is_available() and dist.is_initialized()


def this_rank() -> int:
    """This process's rank; 0 when it is alone."""
    return dist.get_rank() if has_group() else 0


def world_size() -> int:
    """Number of ranks; 1 when this process is alone."""
    return dist.get_world_size() if has_group() else 1


def gather(value: Any) -> list[Any]:
    """Every rank's JSON-able value, in rank order, on all ranks."""
    if not has_group():
        return [value]
    device = torch.device("cpu")
    if "gloo" not in dist.get_backend() and (accelerator := torch.accelerator.current_accelerator()):
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([data.numel()], dtype=torch.int64, device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded)
    return [
        json.loads(bytes(row[: int(n)].cpu().tolist()).decode()) for row, n in zip(rows, sizes, strict=True)
    ]


def together(work: Callable[[], T]) -> T:
    """Run `work` on every rank; if it raises on any, raise the first such rank's error on all.

    Raises:
        StrettoError: bad input, with the rank added when there are several.
        CheckpointError: anything else.
    """
    result: T | None = None
    mine: BaseException | None = None
    try:
        result = work()
    except Exception as error:
        mine = error
    outcomes = gather(None if mine is None else _describe(mine))
    for rank, failure in enumerate(outcomes):
        if failure is not None:
            raise _error(rank, failure) from mine
    return result  # pyright: ignore[reportReturnType]: no rank raised, so neither did this one


def on_first(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and give its JSON-able result to all; if it raises, raise on all."""
    result = together(lambda: work() if this_rank() == 0 else None)
    return gather(result)[0]


def storing(work: Callable[[], T]) -> T:
    """Run a collective of torch.distributed.checkpoint; what it raises, a BaseException, becomes ours."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            return work()
    except CheckpointException as failure:
        rank = min(failure.failures)
        raise _error(rank, _describe(failure.failures[rank][0])) from None


def _describe(error: BaseException) -> dict[str, str | None]:
    if isinstance(error, StrettoError):
        return {"kind": "input", "message": error.message, "hint": error.hint}
    if isinstance(error, OSError) and full_disk(error):
        message = f"the disk is full: {error}"
    elif isinstance(error, OSError | CheckpointError):
        message = str(error)
    else:
        message = f"{type(error).__name__}: {error}"
    return {"kind": "failure", "message": message[:LONGEST_ERROR], "hint": None}


def _error(rank: int, failure: dict[str, Any]) -> Exception:
    if failure["kind"] == "input":
        where = f" (on rank {rank})" if world_size() > 1 else ""
        return StrettoError(failure["message"] + where, hint=failure["hint"])
    return CheckpointError(f"rank {rank}: {failure['message']}")
