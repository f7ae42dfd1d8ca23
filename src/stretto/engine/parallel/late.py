"""Messages that are as late as they may be, to find what does not wait for them.

    with delay_messages(seed=1) as delayed:
        step()
    assert not delayed.broken

Over a fast link a message has arrived before anybody looks, so a missing wait changes nothing, until the
link is slow. Within the context everything that a communication promises only after its `wait()` is kept back
until then: it runs on private copies, its results hold NaN (integers: 0) before, and what it sends must be
unchanged when it is waited for. A missing wait, a buffer that is used twice or freed in flight, or a message
that is never waited for then gives wrong numbers or an entry in `DelayedMessages.broken` every time.
Starts, waits, and jobs of the threads that move offloaded tensors are delayed at random as well, so that
ranks and threads meet in other orders.

A program that waits where it must comes to the same bits as without.
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
# what a method does with the tensors of its first arguments
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
_OFTEN = 8  # one start, wait or job in so many is delayed
_LONGEST = 1e-3  # seconds of a delay
_THREADS = "stretto-"  # how the names of the threads begin that move offloaded tensors
_SHOWN = 8  # entries of `broken` that are kept


class DelayedMessages:
    """What was found within the context.

    Attributes:
        broken: how messages were used wrongly, in words.
        messages: how many were sent.
    """

    def __init__(self, seed: int) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.broken = list[str]()
        self.messages = 0
        self._random = Random(f"{seed} {rank}")
        self._lock = Lock()
        self._flying = dict[int, _Message]()

    def pause(self) -> None:
        """Sometimes sleep for a while."""
        with self._lock:
            seconds = self._random.random() * _LONGEST if self._random.randrange(_OFTEN) == 0 else 0.0
        if seconds:
            time.sleep(seconds)

    def report_violation(self, what: str) -> None:
        """Add to `broken`, once."""
        with self._lock:
            if what not in self.broken and len(self.broken) < _SHOWN:
                self.broken.append(what)

    def start(self, message: _Message) -> None:
        """A message is on its way."""
        with self._lock:
            self.messages += 1
            flying = list(self._flying.values())
            self._flying[id(message)] = message
        for other in flying:
            if _collide(message, other):
                self.report_violation(f"{message} uses memory of another one in flight: {other}")

    def end(self, message: _Message) -> None:
        """It has been waited for."""
        with self._lock:
            self._flying.pop(id(message), None)

    @property
    def in_flight(self) -> list[str]:
        """The messages that are not waited for yet, in words."""
        with self._lock:
            flying = list(self._flying.values())
        return [str(message) for message in flying]

    def check_end(self) -> None:
        """Blame what was never waited for."""
        for message in self.in_flight:
            self.report_violation(f"{message} is never waited for")


class _Message:
    """A communication in progress, in place of torch's `Work`.

    Args:
        read: the caller's tensors that are sent, each with the copy that is.
        written: the caller's tensors for what arrives, each with the memory in which it does.
    """

    def __init__(
        self,
        late: DelayedMessages,
        method: str,
        group: ProcessGroup,
        read: Sequence[tuple[Tensor, Tensor]],
        written: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.work: Any = None
        self.reads = [_memory(mine) for mine, _ in read]
        self.writes = [_memory(mine) for mine, _ in written]
        self._method = method
        self._group = group
        self._caller = _caller()
        self._late = late
        self._read, self._written = read, written
        self._done = False
        for mine, _ in written:
            mine.data.fill_(float("nan") if mine.is_floating_point() else 0)
        for (mine, copy), memory in zip(read, self.reads, strict=True):
            if any(_overlap(memory, other) for other in self.writes):  # a part of the result is here already
                mine.data.copy_(copy)
        late.start(self)

    def __str__(self) -> str:
        what = self._method.strip("_").removesuffix("_base")
        ranks = ", ".join(map(str, dist.get_process_group_ranks(self._group)))
        return f"the {what} over ranks {ranks} that {self._caller} starts"

    def wait(self, *arguments: Any) -> bool:
        """Complete: only now does the caller get what has arrived."""
        if self._done:
            return True
        self._late.pause()
        if self.work is not None:
            self.work.wait(*arguments)
        self._done = True
        self._late.end(self)
        if not all(_allocated(mine) for mine, _ in (*self._read, *self._written)):
            self._late.report_violation(f"{self} is in flight while its memory is freed")
            return True
        if not all(_same_bits(mine, copy) for mine, copy in self._read):
            self._late.report_violation(f"{self} is in flight while what it sends is overwritten")
        for mine, arrived in self._written:
            mine.data.copy_(arrived)
        return True

    def is_completed(self) -> bool:
        """Whether it was waited for: it is as late as it may be."""
        return self._done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


Memory = tuple[int, int]  # addresses of the first byte, and of the one after the last


def _memory(tensor: Tensor) -> Memory:
    """The memory that a tensor spans."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlap(one: Memory, other: Memory) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _collide(one: _Message, other: _Message) -> bool:
    """Whether one of the two writes what the other uses."""
    ours, theirs = (*one.reads, *one.writes), (*other.reads, *other.writes)
    return any(_overlap(w, m) for w in one.writes for m in theirs) or any(
        _overlap(w, m) for w in other.writes for m in ours
    )


def _allocated(tensor: Tensor) -> bool:
    """Whether the memory of a tensor has not been given back."""
    if not tensor.numel():
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if not one.numel():
        return True
    # not equality of numbers: NaN is not equal to itself
    a, b = (t.detach().to(other.device).contiguous().flatten().view(torch.uint8) for t in (one, other))
    return torch.equal(a, b)


@contextmanager
def delay_messages(seed: int) -> Generator[DelayedMessages]:
    """Keep back what messages bring until they are waited for, on all threads of this process.

    Args:
        seed: of the random delays, which also depend on the rank.
    """
    late, replaced = DelayedMessages(seed), dict[str, Any]()
    submit = ThreadPoolExecutor.submit
    for method, roles in _ROLES.items():
        if method in vars(ProcessGroup):
            replaced[method] = vars(ProcessGroup)[method]  # getattr would not return the descriptor
            setattr(ProcessGroup, method, _keeping_back(getattr(ProcessGroup, method), method, roles, late))

    def delayed(self: Any, call: Callable[..., Any], /, *rest: Any, **named: Any) -> Future[Any]:
        if not self._thread_name_prefix.startswith(_THREADS):
            return submit(self, call, *rest, **named)

        def job() -> Any:
            late.pause()
            return call(*rest, **named)

        return submit(self, job)

    ThreadPoolExecutor.submit = delayed
    try:
        yield late
        late.check_end()
    finally:
        ThreadPoolExecutor.submit = submit
        for method, original in replaced.items():
            setattr(ProcessGroup, method, original)


def _keeping_back(original: Any, method: str, roles: Sequence[str], late: DelayedMessages) -> Any:
    """The method, on private copies of the tensors in its first arguments."""

    def call(group: ProcessGroup, *arguments: Any, **named: Any) -> Any:
        late.pause()
        home = carrier(group)
        read, written = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()

        def private(role: str, value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [private(role, one) for one in value]  # pyright: ignore[reportUnknownVariableType]
            assert isinstance(value, Tensor)
            # on the host where the library sends from there, which may not take an accelerator's tensors
            copy = torch.empty(value.shape, dtype=value.dtype, device=home).copy_(value.detach())
            (read if role == _READ else written).append((value.detach(), copy))
            return copy

        changed = list(arguments)
        for at, role in enumerate(roles):
            if role == _FROM_ROOT:
                role = _READ if _is_root(group, (*arguments[1:], *named.values())) else _WRITTEN
            changed[at] = private(role, arguments[at])
        message = _Message(late, method, group, read, written)
        message.work = original(group, *changed, **named)
        if message.work is None:  # the method has waited
            message.wait()
            return None
        return message

    return call


def _is_root(group: ProcessGroup, rest: Sequence[Any]) -> bool:
    """Whether this rank is the root of a broadcast, of which the arguments after the tensors say the rank."""
    root = rest[0] if rest else 0
    return group.rank() == getattr(root, "rootRank", root)


_PASSED_ON = (__name__, "stretto.engine.parallel.collectives", "stretto.engine.parallel.traffic")


def _caller() -> str:
    """The function that communicates; not those that only pass it on."""
    frame = sys._getframe(1)
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        if module not in _PASSED_ON and not module.startswith("torch."):
            return f"{module.removeprefix('stretto.')}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown function"
