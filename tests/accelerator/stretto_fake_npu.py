"""A plug-in of torch, as torch_npu is one: devices of kind `npu`, and the communication library `hccl`.

torch loads it by its entry point with `import torch`, in every process of a job. The devices compute with the
CPU's kernels in the host's memory, at once; see `kernels.cpp`. The library sends through gloo, on a stream of
each group, as NCCL does. Streams see each other's work as late as they may (`streams.h`): what is used
without waiting is written to the file that STRETTO_FAKE_NPU_RACES names, and its values are NaN.

A wait is known by the function that makes it, `engine.offload.shard_store.fetch: wait_event`. Those in
`dropped`, or in STRETTO_FAKE_NPU_DROP, do nothing, to see that they are missed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import fake_graphs
import torch
import torch.distributed as dist
from fake_graphs import unobserved
from torch import Tensor

KIND, LIBRARY, NAME, COUNT = "npu", "hccl", "Ascend 910B, simulated", 4
PRIVATE_USE_1 = 20  # c10::DeviceType
kernels = ctypes.CDLL(os.environ["STRETTO_FAKE_NPU"])
kernels.most_held.restype = ctypes.c_int64
kernels.stream_now.restype = kernels.event_record.restype = ctypes.c_int64
kernels.copies_deferred.restype = ctypes.c_int64
calls = list[str]()  # of streams, events and devices
waits = set[str]()  # that were made
dropped = {wait_name for wait_name in os.environ.get("STRETTO_FAKE_NPU_DROP", "").split("; ") if wait_name}


def load() -> None:
    """The entry point."""
    kernels.start()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")  # torch 2.15's asks C++ for the group's name
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, Devices)
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(LIBRARY, HostGroup, extended_api=True, devices=[KIND])
    record = torch.Tensor.record_stream

    def record_stream(tensor: Tensor, stream: torch.Stream) -> None:
        if is_made("record_stream"):
            record(tensor, stream)

    torch.Tensor.record_stream = record_stream  # pyright: ignore


_PASSING = ("stretto.engine.device", "stretto.engine.parallel.collectives", "stretto.engine.parallel.traffic")


def is_made(wait: str) -> bool:
    """Whether a wait is not dropped; notes it."""
    name = f"{_caller()}: {wait}"
    waits.add(name)
    return name not in dropped


def _caller() -> str:
    """The function of Stretto that asks for this; not those that only pass it on."""
    frame, name = sys._getframe(1), ""
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        if module.startswith("stretto."):
            name = f"{module.removeprefix('stretto.')}.{frame.f_code.co_name}"
        if name and module not in _PASSING:
            break
        frame = frame.f_back
    return name or "elsewhere"


class Stream(torch.Stream):
    """A stream whose work is ordered after that of others only where it waits for them; calls are noted."""

    def wait_stream(self, other: torch.Stream) -> None:
        fake_graphs.forbid("a wait for work that is not captured")
        calls.append("wait for a stream")
        if is_made("wait_stream"):
            kernels.stream_wait(_id(self), _id(other))

    def wait_event(self, event: Event) -> None:
        fake_graphs.forbid("a wait for work that is not captured")
        calls.append("wait for an event")
        if is_made("wait_event"):
            kernels.event_wait(event.number, _id(self))

    def synchronize(self) -> None:
        calls.append("synchronise a stream")
        fake_graphs.forbid("synchronize")
        if is_made("synchronize"):
            kernels.stream_synchronize(_id(self))


def _id(stream: torch.Stream) -> ctypes.c_int64:
    return ctypes.c_int64(stream.stream_id)


class Event:
    """A mark in a stream, and of the host's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timing = enable_timing
        self.at: float | None = None
        self._number: ctypes.c_int64 | None = None

    @property
    def number(self) -> ctypes.c_int64:
        assert self._number is not None, "it was not recorded"
        return self._number

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()
        number = kernels.stream_now() if stream is None else stream.stream_id
        self._number = ctypes.c_int64(kernels.event_record(ctypes.c_int64(number)))

    def synchronize(self) -> None:
        calls.append("synchronise an event")
        fake_graphs.forbid("synchronize")
        if is_made("synchronize"):
            kernels.event_synchronize(self.number)

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds, as torch's events tell them."""
        assert self.timing
        assert other.timing
        assert self.at is not None
        assert other.at is not None
        return 1e3 * (other.at - self.at)


@contextmanager
def _on(stream: int) -> Generator[None]:
    """Work of this thread is on the stream."""
    before = kernels.stream_now()
    kernels.stream_set(ctypes.c_int64(stream))
    try:
        yield
    finally:
        kernels.stream_set(ctypes.c_int64(before))


def index_of(device: Any) -> int:
    """A device's number; the current one's of a kind or None."""
    index = None if device is None else torch.device(device).index
    return kernels.device() if index is None else index


class Devices:
    """`torch.npu`."""

    Stream, Event = Stream, Event
    generators = tuple(torch.Generator().manual_seed(0) for _ in range(COUNT))

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return COUNT

    @staticmethod
    def current_device() -> int:
        return kernels.device()

    @staticmethod
    def set_device(device: Any) -> None:
        kernels.set_device(index_of(device))

    @staticmethod
    def synchronize(device: Any = None) -> None:
        calls.append(f"synchronise npu:{index_of(device)}")
        fake_graphs.forbid("synchronize")
        if is_made("synchronize"):
            kernels.device_synchronize()

    @staticmethod
    def current_stream(device: Any = None) -> Stream:
        index = index_of(device)
        return Stream(stream_id=kernels.stream_now(), device_index=index, device_type=PRIVATE_USE_1)

    @staticmethod
    @contextmanager
    def stream(stream: torch.Stream) -> Generator[None]:
        calls.append("on a stream")
        with _on(stream.stream_id):
            yield

    NPUGraph = fake_graphs.Graph

    @staticmethod
    @contextmanager
    def graph(
        graph: fake_graphs.Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Generator[None]:
        """As `torch.cuda.graph`; work of the capture is none of the stream's."""
        kernels.device_synchronize()
        with _on(stream.stream_id), fake_graphs.capturing(graph):
            yield
        kernels.device_synchronize()

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        return kernels.most_held()

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return NAME

    @staticmethod
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=NAME, total_memory=2**36)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        for generator in cls.generators:
            generator.manual_seed(seed)

    @classmethod
    def get_rng_state(cls, device: Any = None) -> Tensor:
        fake_graphs.forbid("the state of a generator")
        return cls.generators[index_of(device)].get_state()

    @classmethod
    def set_rng_state(cls, state: Tensor, device: Any = None) -> None:
        fake_graphs.forbid("the state of a generator")
        cls.generators[index_of(device)].set_state(state)


# ------------------------------------------------------------------ communication


class HostWork(dist.Work):
    """A call of gloo on copies in the host's memory; results are on the device once a stream waits for it.
    Until then it holds what is sent, as NCCL's does.
    """

    def __init__(
        self, work: dist.Work, copies: list[tuple[Tensor, Tensor]], sent: list[Tensor], done: Event
    ) -> None:
        super().__init__()
        self._work, self._copies, self._sent, self._done = work, copies, sent, done
        self._completed = False

    def wait(self, *timeout: Any) -> bool:
        fake_graphs.forbid("a wait for work that is not captured")
        goes_on = is_made("wait")
        self.complete(*timeout)
        if goes_on:
            kernels.event_wait(self._done.number, ctypes.c_int64(kernels.stream_now()))
        with unobserved():
            for device, host in self._copies:
                device.detach().copy_(host.view_as(device))
        self._copies, self._sent = [], []
        return True

    def complete(self, *timeout: Any) -> None:
        """Wait for gloo, which lets one wait for a message only once."""
        if not self._completed:
            self._work.wait(*timeout)
            self._completed = True

    def is_completed(self) -> bool:
        return self._completed or self._work.is_completed()


class HostGroup(dist.ProcessGroup):
    """Ranks on devices: their tensors go through gloo; tensors of the host are refused."""

    def __init__(self, how: Any, options: Any) -> None:
        store, rank, size = how.store, how.group_rank, how.group_size
        super().__init__(rank, size)  # pyright: ignore
        self._ranks, self._name = (rank, size), how.group_id
        self.gloo: Any = dist.ProcessGroup(store, rank, size)
        self.gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        backend = dist.ProcessGroupGloo(store, rank, size, how.timeout)
        self.gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        self.stream = Stream(torch.device(KIND)).stream_id
        self.queued = list[HostWork]()
        self._connected = self._aborted = False

    def connect(self, message: bool) -> None:
        """Wait at the first call for the other ranks' first calls: as NCCL's, a communicator is created then,
        by all its ranks together. (Of a message it is one of two ranks, whatever the group.)
        """
        if not self._connected and not (message and self.size() > 2):
            self._connected = True
            self.gloo.barrier().wait()

    def rank(self) -> int:
        return self._ranks[0]

    def size(self) -> int:
        return self._ranks[1]

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(KIND)]

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == KIND, device
        return SimpleNamespace(supports_coalescing=False, shutdown=lambda: None)

    def barrier(self, opts: Any = None) -> HostWork:  # pyright: ignore
        return HostWork(self.gloo.barrier(), [], [], _marked(self.stream))

    def shutdown(self) -> None:
        """Complete all that is queued, as NCCL's groups do, unless they were aborted."""
        for work in () if self._aborted else self.queued:
            work.complete()
        self.gloo = None

    def abort(self) -> None:
        self._aborted = True


def _marked(stream: int) -> Event:
    done = Event()
    with _on(stream):
        done.record()
    return done


# of each call's tensors, whether they are only read
_READS = {"send": (True,), "allreduce": (False,), "reduce": (False,), "recv": (False,)}


def _through_host(name: str) -> Callable[..., dist.Work]:
    def call(self: HostGroup, *arguments: Any, **named: Any) -> dist.Work:
        if fake_graphs.present:
            return fake_graphs.present[0].collective(partial(call, self), arguments, named)
        self.connect(name in ("send", "recv"))
        copies, sent = list[tuple[Tensor, Tensor]](), list[Tensor]()

        def copied(value: Any, read: bool) -> Any:
            if not isinstance(value, Tensor):
                return (
                    [copied(element, read) for element in value] if isinstance(value, list | tuple) else value
                )
            if value.device.type != KIND:
                raise RuntimeError(f"{LIBRARY} {name}: a tensor of {value.device}")
            used(value, writes=not read, by=f"{name} that {_caller()} starts")
            with unobserved():
                host = value.detach().cpu()
            # like NCCL it looks at the number of elements alone
            host = host.flatten() if name == "_reduce_scatter_base" else host
            sent.append(value) if read else copies.append((value, host))
            return host

        # it begins after the work of the stream that calls it
        before = kernels.stream_now()
        kernels.stream_wait(ctypes.c_int64(self.stream), ctypes.c_int64(before))
        with _on(self.stream):
            reads = _READS.get(name, (False, True))
            if name == "broadcast":
                root = arguments[1].rootRank if len(arguments) > 1 else 0
                reads = (root == self.rank(),)
            changed = [copied(value, read) for value, read in zip(arguments, reads, strict=False)]
        work = getattr(self.gloo, name)(*changed, *arguments[len(changed) :], **named)
        started = HostWork(work, copies, sent, _marked(self.stream))
        self.queued = [*(other for other in self.queued if not other.is_completed()), started]
        return started

    return call


def used(tensor: Tensor, writes: bool, by: str) -> None:
    """A message that is sent or arrives now, on the current stream."""
    if tensor.numel():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        data, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64((last + 1) * tensor.element_size())
        kernels.use_by_library(data, size, int(writes), int(tensor.is_floating_point()), by.encode())


for _name in (
    *("allreduce", "reduce", "broadcast", "allgather", "gather", "scatter", "reduce_scatter", "alltoall"),
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "reduce_scatter_single"),
    *("alltoall_base", "all_to_all_single", "send", "recv"),
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(HostGroup, _name, _through_host(_name))
