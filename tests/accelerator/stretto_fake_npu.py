"""A plug-in of torch, as torch_npu is one: devices of kind `npu`, and the communication library `hccl`.

torch loads it by its entry point with `import torch`, in every process of a job. The devices compute with the
CPU's kernels in the host's memory, at once; see `kernels.cpp`. The library sends through gloo.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KIND, LIBRARY, NAME, COUNT = "npu", "hccl", "Ascend 910B, simulated", 4
kernels = ctypes.CDLL(os.environ["STRETTO_FAKE_NPU"])
kernels.most_held.restype = ctypes.c_int64
calls = list[str]()  # of streams, events and devices


def load() -> None:
    """The entry point."""
    kernels.start()
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, Devices)
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(LIBRARY, HostGroup, extended_api=True, devices=[KIND])


class Stream(torch.Stream):
    """Work is done when a call returns, so that nothing has to wait; calls are noted."""

    def wait_stream(self, other: Stream) -> None:
        calls.append("wait for a stream")

    def wait_event(self, event: Event) -> None:
        assert event.at is not None, "it was not recorded"
        calls.append("wait for an event")

    def synchronize(self) -> None:
        calls.append("synchronise a stream")


class Event:
    """A mark of the host's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timing = enable_timing
        self.at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at is not None, "it was not recorded"
        calls.append("synchronise an event")

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds, as torch's events tell them."""
        assert self.timing
        assert other.timing
        assert self.at is not None
        assert other.at is not None
        return 1e3 * (other.at - self.at)


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

    @staticmethod
    def current_stream(device: Any = None) -> Stream:
        return Stream(torch.device(KIND, index_of(device)))

    @staticmethod
    @contextmanager
    def stream(stream: Stream) -> Generator[None]:
        calls.append("on a stream")
        yield

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
        return cls.generators[index_of(device)].get_state()

    @classmethod
    def set_rng_state(cls, state: Tensor, device: Any = None) -> None:
        cls.generators[index_of(device)].set_state(state)


# ------------------------------------------------------------------ communication


class HostWork(dist.Work):
    """A call of gloo on copies in the host's memory; results are on the device once it was waited for."""

    def __init__(self, work: dist.Work, copies: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work, self._copies = work, copies

    def wait(self, *timeout: Any) -> bool:
        self._work.wait(*timeout)
        for device, host in self._copies:
            device.detach().copy_(host.view_as(device))
        self._copies = []
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


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
        return HostWork(self.gloo.barrier(), [])

    def shutdown(self) -> None:
        self.gloo = None


def _through_host(name: str) -> Callable[..., HostWork]:
    def call(self: HostGroup, *arguments: Any, **named: Any) -> HostWork:
        copies = list[tuple[Tensor, Tensor]]()

        def copied(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return [copied(one) for one in value] if isinstance(value, list | tuple) else value
            if value.device.type != KIND:
                raise RuntimeError(f"{LIBRARY} {name}: a tensor of {value.device}")
            host = value.detach().cpu()
            # like NCCL it looks at the number of elements alone
            copies.append((value, host.flatten() if name == "_reduce_scatter_base" else host))
            return copies[-1][1]

        work = getattr(self.gloo, name)(*map(copied, arguments), **{k: copied(v) for k, v in named.items()})
        return HostWork(work, [] if name == "send" else copies)

    return call


for _name in (
    *("allreduce", "reduce", "broadcast", "allgather", "gather", "scatter", "reduce_scatter", "alltoall"),
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "reduce_scatter_single"),
    *("alltoall_base", "all_to_all_single", "send", "recv"),
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(HostGroup, _name, _through_host(_name))
