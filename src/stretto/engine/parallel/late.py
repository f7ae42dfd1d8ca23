"""Delays messages as long as allowed, to find code that does not wait for them.

    with delay_messages(seed=1) as delayed:
        step()
    assert not delayed.broken

Over a fast link a message arrives before it is used, so a missing wait has no effect until the link is slow.
Within the context everything that a communication guarantees only after its `wait()` is withheld until then:
it runs on private copies, its results are NaN (integers: 0) before, and its inputs must be unchanged when it
is waited for. A missing wait, a buffer that is reused or freed in flight, or a message that is never waited
for then always gives wrong numbers or an entry in `DelayedMessages.broken`. Starts, waits, and jobs of the
threads that move offloaded tensors are also delayed at random, so that ranks and threads interleave
differently.

A program with all necessary waits gives bitwise the same results as without delays.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.device import carrier

_READ = "read"
_WRITTEN = "written"
_BOTH = "both"
_FROM_ROOT = "from root"
# the use that a method makes of the tensors in its first arguments
_ROLES: dict[str, tuple[str, ...]] = {
    "allreduce": (_BOTH,),
    "allreduce_coalesced": (_BOTH,),
    "reduce": (_BOTH,),
    "_allgather_base": (_WRITTEN, _READ),
    "allgather": (_WRITTEN, _READ),
    "allgather_into_tensor_coalesced": (_WRITTEN, _READ),
    "_reduce_scatter_base": (_WRITTEN, _READ),
    "reduce_scatter": (_WRITTEN, _READ),
    "reduce_scatter_tensor_coalesced": (_WRITTEN, _READ),
    "alltoall_base": (_WRITTEN, _READ),
    "alltoall": (_WRITTEN, _READ),
    "all_gather_single": (_WRITTEN, _READ),
    "reduce_scatter_single": (_WRITTEN, _READ),
    "all_to_all_single": (_WRITTEN, _READ),
    "broadcast": (_FROM_ROOT,),
    "gather": (_WRITTEN, _READ),
    "scatter": (_WRITTEN, _READ),
    "send": (_READ,),
    "recv": (_WRITTEN,),
    "recv_anysource": (_WRITTEN,),
}
_DELAY_ONE_IN = 8  # fraction of starts, waits and jobs that are delayed
_MAX_DELAY = 1e-3  # seconds
_THREADS = "stretto-"  # prefix of the names of the threads that move offloaded tensors
_MAX_VIOLATIONS = 8  # entries of `broken`


class DelayedMessages:
    """Messages that `delay_messages` has delayed, and the violations it found.

    Attributes:
        broken: descriptions of the violations.
        messages: number of messages sent.
    """

    def __init__(self, seed: int) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.broken = list[str]()
        self.messages = 0
        self._random = Random(f"{seed} {rank}")
        self._lock = Lock()
        self._pending = dict[int, _Message]()

    def pause(self) -> None:
        """Sleep for a random time, in one of `_DELAY_ONE_IN` calls."""
        with self._lock:
            seconds = (
                self._random.random() * _MAX_DELAY if self._random.randrange(_DELAY_ONE_IN) == 0 else 0.0
            )
        if seconds:
            time.sleep(seconds)

    def report_violation(self, violation: str) -> None:
        """Add a violation to `broken`, unless it is already there."""
        with self._lock:
            if violation not in self.broken and len(self.broken) < _MAX_VIOLATIONS:
                self.broken.append(violation)

    def start(self, message: _Message) -> None:
        """Register a message in flight."""
        with self._lock:
            self.messages += 1
            pending = list(self._pending.values())
            self._pending[id(message)] = message
        for other in pending:
            if any(
                _overlap(written, used)
                for writer, user in ((message, other), (other, message))
                for written in writer.writes
                for used in (*user.reads, *user.writes)
            ):
                self.report_violation(f"{message} uses memory of another one in flight: {other}")

    def end(self, message: _Message) -> None:
        """Remove a message that has been waited for."""
        with self._lock:
            self._pending.pop(id(message), None)

    @property
    def in_flight(self) -> list[str]:
        """Descriptions of the messages that have not been waited for."""
        with self._lock:
            pending = list(self._pending.values())
        return [str(message) for message in pending]

    def check_end(self) -> None:
        """Report messages that were never waited for."""
        for message in self.in_flight:
            self.report_violation(f"{message} is never waited for")


class _Message:
    """A communication in progress, in place of torch's `Work`.

    Args:
        read: tensors of the caller that are sent, each with the private copy that is sent instead.
        written: tensors of the caller for the results, each with the private memory that receives them.
    """

    def __init__(
        self,
        delayed: DelayedMessages,
        method: str,
        group: ProcessGroup,
        read: Sequence[tuple[Tensor, Tensor]],
        written: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.work: Any = None
        self.reads = [_memory(tensor) for tensor, _ in read]
        self.writes = [_memory(tensor) for tensor, _ in written]
        self._method = method
        self._group = group
        self._caller = _caller()
        self._delayed = delayed
        self._read, self._written = read, written
        self._done = False
        for tensor, _ in written:
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)
        for (tensor, copy), memory in zip(read, self.reads, strict=True):
            if any(
                _overlap(memory, another) for another in self.writes
            ):  # a part of the result is also an input
                tensor.data.copy_(copy)
        delayed.start(self)

    def __str__(self) -> str:
        method = self._method.strip("_").removesuffix("_base")
        ranks = ", ".join(map(str, dist.get_process_group_ranks(self._group)))
        return f"the {method} over ranks {ranks} that {self._caller} starts"

    def wait(self, *arguments: Any) -> bool:
        """Complete the message and copy its results to the caller."""
        if self._done:
            return True
        self._delayed.pause()
        if self.work is not None:
            self.work.wait(*arguments)
        self._done = True
        self._delayed.end(self)
        if not all(_allocated(tensor) for tensor, _ in (*self._read, *self._written)):
            self._delayed.report_violation(f"{self} is in flight while its memory is freed")
            return True
        if not all(_same_bits(tensor, copy) for tensor, copy in self._read):
            self._delayed.report_violation(f"{self} is in flight while what it sends is overwritten")
        for tensor, arrived in self._written:
            tensor.data.copy_(arrived)
        return True

    def is_completed(self) -> bool:
        """True once the message has been waited for."""
        return self._done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


Memory = tuple[int, int]  # addresses of the first byte and of the byte after the last


def _memory(tensor: Tensor) -> Memory:
    """Return the memory that a tensor spans."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlap(message: Memory, another: Memory) -> bool:
    return message[0] < another[1] and another[0] < message[1]


def _allocated(tensor: Tensor) -> bool:
    """True if the memory of a tensor has not been freed."""
    if not tensor.numel():
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed


def _same_bits(message: Tensor, another: Tensor) -> bool:
    if not message.numel():
        return True
    # compares bytes, since NaN is not equal to itself
    a, b = (
        t.detach().to(another.device).contiguous().flatten().view(torch.uint8) for t in (message, another)
    )
    return torch.equal(a, b)


@contextmanager
def delay_messages(seed: int) -> Generator[DelayedMessages]:
    """Withhold the results of messages until they are waited for, on all threads of this process.

    Args:
        seed: seed of the random delays, which also depend on the rank.
    """
    delayed, replaced = DelayedMessages(seed), dict[str, Any]()
    submit = ThreadPoolExecutor.submit
    for method, roles in _ROLES.items():
        if method in vars(ProcessGroup):
            replaced[method] = vars(ProcessGroup)[method]  # getattr would not return the descriptor
            setattr(
                ProcessGroup, method, _keeping_back(getattr(ProcessGroup, method), method, roles, delayed)
            )

    def submit_delayed(self: Any, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        if not self._thread_name_prefix.startswith(_THREADS):
            return submit(self, call, *arguments, **named)

        def job() -> Any:
            delayed.pause()
            return call(*arguments, **named)

        return submit(self, job)

    ThreadPoolExecutor.submit = submit_delayed
    try:
        yield delayed
        delayed.check_end()
    finally:
        ThreadPoolExecutor.submit = submit
        for method, original in replaced.items():
            setattr(ProcessGroup, method, original)


def _keeping_back(original: Any, method: str, roles: Sequence[str], delayed: DelayedMessages) -> Any:
    """Return the method on private copies of the tensors in its first arguments."""

    def call(group: ProcessGroup, *arguments: Any, **named: Any) -> Any:
        delayed.pause()
        home = carrier(group)
        read, written = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()

        def private(role: str, value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [private(role, item) for item in value]  # pyright: ignore[reportUnknownVariableType]
            assert isinstance(value, Tensor)
            # on the host if the backend sends from there and does not accept an accelerator's tensors
            copy = torch.empty(value.shape, dtype=value.dtype, device=home).copy_(value.detach())
            (read if role == _READ else written).append((value.detach(), copy))
            return copy

        changed = list(arguments)
        for at, role in enumerate(roles):
            if role == _FROM_ROOT:
                role = _READ if _is_root(group, (*arguments[1:], *named.values())) else _WRITTEN
            changed[at] = private(role, arguments[at])
        message = _Message(delayed, method, group, read, written)
        message.work = original(group, *changed, **named)
        if message.work is None:  # the method is synchronous
            message.wait()
            return None
        return message

    return call


def _is_root(group: ProcessGroup, arguments: Sequence[Any]) -> bool:
    """True if this rank is the root of a broadcast, given the arguments after the tensors."""
    root = arguments[0] if arguments else 0
    return group.rank() == getattr(root, "rootRank", root)


_PASSED_ON = (__name__, "stretto.engine.parallel.collectives", "stretto.engine.parallel.traffic")


def _caller() -> str:
    """Return the function that communicates, without wrappers."""
    frame = sys._getframe(1)
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        if module not in _PASSED_ON and not module.startswith("torch."):
            return f"{module.removeprefix('stretto.')}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown function"
