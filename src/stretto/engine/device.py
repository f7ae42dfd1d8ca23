"""The device of a rank, of any kind that torch supports: its name, memory, streams, random state and
communication library.

Other files work with any kind of device. This module gets the differences between kinds from
`torch.accelerator`, `torch.get_device_module` and `torch.distributed`, which plug-ins such as torch_npu
extend. Only the last section, for CUDA, depends on a device's name.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import Backend, ProcessGroup
from torch.profiler import ProfilerActivity

from stretto.errors import StrettoError, nearest
from stretto.job.devices import AUTO, HOST, KINDS

GIB = 2**30

# ------------------------------------------------------------------ which device


def device_kind(name: str) -> str:
    """Return the kind of device that `train.device` selects on this machine: "cpu", "cuda", "npu", ...

    `auto` is torch's current accelerator if its communication library can send tensors of that kind;
    otherwise the CPU.

    Raises:
        StrettoError: torch sees no such device on this machine.
    """
    if name == AUTO:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return HOST
        backend = Backend.default_device_backend_map.get(accelerator.type, "")
        return accelerator.type if accelerator.type in Backend.backend_capability.get(backend, ()) else HOST
    if name != HOST and not device_count(name):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        present = HOST if accelerator is None else f"{accelerator.type} and {HOST}"
        raise StrettoError(
            f"train.device is {name}, but there is no such device here: torch sees {present}",
            hint=_remedy(name),
        )
    return name


def device_count(kind: str) -> int:
    """Return the number of devices of this kind that torch sees on this machine; 0 for an unknown kind.

    Raises:
        StrettoError: the plug-in of that kind is installed, but cannot be imported.
    """
    plugin = _plugin(kind)
    if plugin is not None and not hasattr(torch, kind) and _is_installed(plugin):
        try:  # `import torch` has loaded it already, unless it is old, or TORCH_DEVICE_BACKEND_AUTOLOAD=0
            import_module(plugin)
        except Exception as error:  # any error of the plug-in's libraries
            raise StrettoError(f"train.device is {kind}, but {plugin} cannot be imported: {error}") from error
    try:
        module: Any = torch.get_device_module(kind)
    except (RuntimeError, ValueError):
        return 0
    return module.device_count() if module.is_available() else 0


def rank_device(name: str) -> torch.device:
    """Return the device of this rank, with index LOCAL_RANK, and make it the current one.

    Args:
        name: a kind of device, or `auto`.

    Raises:
        StrettoError: torch sees no such device on this machine.
    """
    kind = device_kind(name)
    if kind == HOST:
        return torch.device(HOST)
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
    if not _is_single(device):
        _module(device).set_device(device)
    return device


def on_accelerator(device: torch.device) -> bool:
    """True if the device has separate memory, and calls only queue work."""
    return device.type not in (HOST, "meta")


def _remedy(kind: str) -> str:
    plugin = _plugin(kind)
    if plugin is not None and not _is_installed(plugin):
        return f"install {plugin.partition('.')[0]}, which makes torch know {kind}; or use train.device=cpu"
    suggestion = nearest(kind, KINDS) if kind not in KINDS else None
    return f"did you mean {suggestion}?" if suggestion else "use train.device=auto or cpu"


def _plugin(kind: str) -> str | None:
    return KINDS[kind].plugin if kind in KINDS else None


def _is_installed(module: str) -> bool:
    return find_spec(module.partition(".")[0]) is not None


def _is_single(device: torch.device) -> bool:
    """True if a machine has at most one device of this kind, like Apple's, which cannot be selected."""
    return not hasattr(_module(device), "set_device")


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


# ------------------------------------------------------------------ communication


def backend_for(kind: str, choice: str = "auto") -> str:
    """Return torch's name of the communication library for devices of this kind: nccl, gloo, hccl, xccl, ...

    Args:
        choice: value of `train.backend`; `auto` is the library that torch or a plug-in has registered.

    Raises:
        StrettoError: this torch has no such library, or it cannot send tensors of this kind.
    """
    able = Backend.backend_capability
    backends = [
        backend
        for backend in able
        if kind in able[backend] and backend != Backend.FAKE and _is_built(backend)
    ]
    hint = f"for {kind}, this torch has {', '.join(backends)}" if backends else None
    if choice == AUTO:
        choice = Backend.default_device_backend_map.get(kind, "")
        if not choice:
            raise StrettoError(
                f"no communication library is registered for {kind}", hint=hint or "load its plug-in"
            )
    elif kind not in able.get(choice, (kind,)):
        raise StrettoError(f"train.backend is {choice}, which does not send tensors of {kind}", hint=hint)
    if not _is_built(choice):
        raise StrettoError(f"train.backend is {choice}, which this torch does not have", hint=hint)
    return choice


def _is_built(backend: str) -> bool:
    return dist.is_available() and dist.is_backend_available(backend)


def carrier(group: ProcessGroup | None = None) -> torch.device:
    """Return the device of tensors for a group, by default the default group: the host if the group can send
    host tensors, else this rank's accelerator.
    """
    default = dist.group.WORLD
    assert default is not None, "no default group"
    kinds = [device.type for device in (group or default)._device_types]
    return torch.device(HOST if HOST in kinds else kinds[0])


def flight_record() -> bytes:
    """Return the last collectives and messages of this process with their stack traces, pickled by the flight
    recorder of the default group's library.
    """
    recorders: Any = c10d
    dump = getattr(recorders, f"_dump_{dist.get_backend()}_trace", recorders._dump_fr_trace)
    return dump(True, True, False)


# ------------------------------------------------------------------ memory and names


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of torch's tensors on the device so far, GiB; 0 on a CPU, and if torch has
    none.
    """
    peak = getattr(_module(device), "max_memory_allocated", None) if on_accelerator(device) else None
    return 0.0 if peak is None else peak(device) / GIB


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    """Return what torch's profiler can record of work on the device: the host's part, and the device's."""
    activity = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.PrivateUse1)
    supported: set[ProfilerActivity] = torch.profiler.supported_activities()
    return [ProfilerActivity.CPU, *([activity] if on_accelerator(device) and activity in supported else [])]


def memory_history(device: torch.device) -> Any | None:
    """Return torch's module whose `_record_memory_history` and `_dump_snapshot` are of the device's
    allocator; None on a CPU, and if torch has none for this kind.
    """
    memory = getattr(_module(device), "memory", None) if on_accelerator(device) else None
    return memory if hasattr(memory, "_dump_snapshot") else None


def peak_host_memory() -> float:
    """Return the peak memory of this process on the host so far, GiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def model_name(device: torch.device) -> str:
    """Return the vendor's name of the device, "NVIDIA H100 80GB HBM3"; its kind if torch has no name."""
    name = getattr(_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def total_memory(device: torch.device) -> float:
    """Return the memory of the device in bytes."""
    properties = getattr(_module(device), "get_device_properties", None)
    if properties is not None and hasattr(device_properties := properties(device), "total_memory"):
        return float(device_properties.total_memory)
    return float(torch.accelerator.get_memory_info(device)[1])


# ------------------------------------------------------------------ streams


def synchronize(device: torch.device) -> None:
    """Wait for all work that is queued on the device; does nothing on a CPU."""
    if on_accelerator(device):
        _module(device).synchronize(*(() if _is_single(device) else (device,)))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device.

    A copy to the host is awaited, since the host could read it at once; a copy to an accelerator is not,
    since later work is queued after it.
    """
    return tensor.to(device, non_blocking=on_accelerator(device))


def new_stream(device: torch.device) -> torch.Stream:
    """Return a new stream of the device, for work concurrent with that of the current stream.

    Raises:
        StrettoError: devices of this kind have no streams.
    """
    if not has_streams(device):
        raise StrettoError(f"{device.type} has no streams, which offloading needs", hint="disable offloading")
    return _module(device).Stream(device)


def has_streams(device: torch.device) -> bool:
    """True if the device can have several streams."""
    return on_accelerator(device) and hasattr(_module(device), "Stream")


class CopyStreams:
    """Streams for copies between devices and the host, created at first use.

    Each direction has a separate stream, since a link can transfer in both directions at once.
    """

    def __init__(self) -> None:
        self._streams = dict[tuple[torch.device, bool], torch.Stream]()

    def to_host(self, device: torch.device) -> torch.Stream:
        """Return the stream for copies from the device to the host."""
        return self._of(device, True)

    def to_device(self, device: torch.device) -> torch.Stream:
        """Return the stream for copies from the host to the device."""
        return self._of(device, False)

    def _of(self, device: torch.device, to_host: bool) -> torch.Stream:
        if (device, to_host) not in self._streams:
            self._streams[device, to_host] = new_stream(device)
        return self._streams[device, to_host]


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which work is currently queued."""
    return _module(device).current_stream(device)


def on_stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Return a context in which work is queued on the stream, by default the current one."""
    return nullcontext() if stream is None else _module(stream.device).stream(stream)


def new_event(device: torch.device, *, timing: bool = False) -> torch.Event:
    """Return an event to record in a stream, for which other streams and the host can wait."""
    return _module(device).Event(enable_timing=timing)


def recorded_event(stream: torch.Stream) -> torch.Event:
    """Return an event that completes with the work queued on the stream so far."""
    event = new_event(stream.device)
    event.record(stream)
    return event


# ------------------------------------------------------------------ graphs

_capturing = False  # a process captures one graph at a time


class Graph:
    """Work that a device captures once and then replays: the same kernels on the same memory, with one
    launch. Computation of the host is done only once, at the capture.

    The same work must be run a few times before the capture (`warm_up`), since libraries choose kernels and
    fill caches at first use. All runs are on a separate stream: a backward runs on the stream of its forward,
    and a capture must not depend on work of other streams.

    The graph class is that of the device's module, by the naming of torch and its plug-ins;
    `torch.accelerator.Graph` is newer, and cannot register generators.

    Args:
        device: a device with graphs (`has_graphs`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, new_stream(device)
        self._graph: Any = None

    @property
    def captured(self) -> bool:
        """True if the graph was captured and can be replayed."""
        return self._graph is not None

    def warm_up(self, work: Callable[[], None]) -> None:
        """Run the work on the graph's stream, ordered with the work of the current stream."""
        current: Any = current_stream(self._device)
        stream: Any = self._stream
        stream.wait_stream(current)
        with on_stream(self._stream):
            work()
        current.wait_stream(stream)

    def capture(self, work: Callable[[], None]) -> None:
        """Record the work without running it. The graph owns all memory that the work allocates.

        Raises:
            RuntimeError: the work has an operation that graphs do not support, such as a copy to the host.
        """
        global _capturing
        module = _module(self._device)
        graph = getattr(module, _graph_class(self._device.type))()
        _capturing = True
        try:
            # other threads may pin memory meanwhile
            with module.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                work()
        finally:
            _capturing = False
        self._graph = graph

    def replay(self) -> None:
        """Run the captured work on the current stream."""
        self._graph.replay()


def has_graphs(kind: str) -> bool:
    """True if this torch can capture graphs on devices of this kind."""
    try:
        module: Any = torch.get_device_module(kind)
    except (RuntimeError, ValueError):
        return False
    return hasattr(module, "graph") and hasattr(module, _graph_class(kind))


def _graph_class(kind: str) -> str:
    """Return the name of the graph class of a device module, the kind in capitals and "Graph"."""
    return f"{kind.upper()}Graph"


def is_capturing() -> bool:
    """True during a capture: tensors that the graph reads must keep their memory, and generator states cannot
    be read.
    """
    return _capturing


# ------------------------------------------------------------------ random state


def random_state(device: torch.device) -> Tensor:
    """Return the state of the device's random generator, a uint8 tensor on the host."""
    return torch.get_rng_state() if not on_accelerator(device) else _module(device).get_rng_state(device)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore a state from `random_state`."""
    if on_accelerator(device):
        _module(device).set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the host's and the device's generators, by kind of device.

    Only layers of users need them: data, dropout and initial values are functions of the seed.
    """
    return {
        generator_device.type: random_state(generator_device)
        for generator_device in dict.fromkeys((torch.device(HOST), device))
    }


def set_random_states(device: torch.device, states: Mapping[str, Tensor]) -> None:
    """Restore states from `random_states`; those of another kind of device are ignored."""
    for generator_device in (torch.device(HOST), device):
        if generator_device.type in states:
            set_random_state(generator_device, states[generator_device.type])


def seed_random(device: torch.device, seed: int) -> None:
    """Seed the host's generator and, for an accelerator, those of all devices. `torch.manual_seed` would also
    leave every kind of accelerator that is not in use a record of the stack, and read its source files.
    """
    if on_accelerator(device):
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def forked_random(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Return a context that restores the generators of the host and of these devices, all of one kind."""
    accelerators = [device for device in devices if on_accelerator(device)]
    return torch.random.fork_rng(accelerators, device_type=accelerators[0].type if accelerators else HOST)


# ------------------------------------------------------------------ what only CUDA is known to have


def has_cuda_kernels(device: torch.device) -> bool:
    """True if torch's CUDA kernels run on the device, including AMD GPUs.

    They are attention operators with the log-sum-exp as output and as input of the backward, and RMSNorm that
    saves one value per row. Similar operators of other devices were not examined; formulas are used there.
    """
    return device.type == "cuda"


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return CUDA's compute capability, (9, 0) for an H100; (0, 0) on other devices.

    AMD's numbers have another meaning: (9, 4) has 8-bit products, but in other formats.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return _module(device).get_device_capability(device)
