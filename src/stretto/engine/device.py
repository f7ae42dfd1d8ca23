"""The device of a rank, of whatever kind torch knows: its name, memory, streams, random state and
communication library.

Other files work with any kind of device. What differs between kinds is asked for here, of
`torch.accelerator`, `torch.get_device_module` and `torch.distributed`, which plug-ins such as torch_npu
extend. None of it goes by the name of a device but the last part, what only CUDA is known to have.
"""

from __future__ import annotations

import os
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

from stretto.errors import StrettoError, nearest
from stretto.job.devices import AUTO, HOST, KINDS

GIB = 2**30

# ------------------------------------------------------------------ which device


def device_kind(name: str) -> str:
    """The kind of device that `train.device` means on this machine: "cpu", "cuda", "npu", ...

    `auto` is the accelerator that torch sees, if its communication library carries tensors of that kind;
    otherwise the CPU.

    Raises:
        StrettoError: torch sees no such device here.
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
    """How many devices of this kind torch sees on this machine; 0 where it does not know the kind.

    Raises:
        StrettoError: the plug-in of that kind is installed, but cannot be imported.
    """
    plugin = _plugin(kind)
    if plugin is not None and not hasattr(torch, kind) and _is_installed(plugin):
        try:  # `import torch` has loaded it already, unless it is old, or TORCH_DEVICE_BACKEND_AUTOLOAD=0
            import_module(plugin)
        except Exception as error:  # whatever the plug-in's libraries raise
            raise StrettoError(f"train.device is {kind}, but {plugin} cannot be imported: {error}") from error
    try:
        module: Any = torch.get_device_module(kind)
    except (RuntimeError, ValueError):
        return 0
    return module.device_count() if module.is_available() else 0


def rank_device(name: str) -> torch.device:
    """The device of this rank, which is current from then on: the one that LOCAL_RANK counts to.

    Args:
        name: a kind of device, or `auto`.

    Raises:
        StrettoError: torch sees no such device here.
    """
    kind = device_kind(name)
    if kind == HOST:
        return torch.device(HOST)
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
    if not _is_single(device):
        _module(device).set_device(device)
    return device


def on_accelerator(device: torch.device) -> bool:
    """Whether tensors there are apart from the host's memory, and calls only queue work."""
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
    """Whether machines have one device of this kind at most, as Apple's do: it is not chosen."""
    return not hasattr(_module(device), "set_device")


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


# ------------------------------------------------------------------ communication


def backend_for(kind: str, choice: str = "auto") -> str:
    """The communication library of ranks on devices of this kind, by torch's name: nccl, gloo, hccl, xccl ...

    Args:
        choice: of `train.backend`; `auto` is the one that torch or a plug-in has registered for the kind.

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
    """Where tensors must be to be sent over a group: on the host, if it takes those, else on this rank's
    accelerator. The default group: None.
    """
    default = dist.group.WORLD
    assert default is not None, "no default group"
    kinds = [device.type for device in (group or default)._device_types]
    return torch.device(HOST if HOST in kinds else kinds[0])


def flight_record() -> bytes:
    """The last collectives and messages of this process, as the flight recorder of the default group's
    library pickles them, with their stack traces.
    """
    recorders: Any = c10d
    dump = getattr(recorders, f"_dump_{dist.get_backend()}_trace", recorders._dump_fr_trace)
    return dump(True, True, False)


# ------------------------------------------------------------------ memory and names


def peak_memory(device: torch.device) -> float:
    """Peak memory of torch's tensors on the device so far, GiB; 0 on a CPU, and where it is not counted."""
    peak = getattr(_module(device), "max_memory_allocated", None) if on_accelerator(device) else None
    return 0.0 if peak is None else peak(device) / GIB


def model_name(device: torch.device) -> str:
    """The vendor's name of this device, "NVIDIA H100 80GB HBM3"; its kind where torch does not say."""
    name = getattr(_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def total_memory(device: torch.device) -> float:
    """Memory of the device, bytes."""
    properties = getattr(_module(device), "get_device_properties", None)
    if properties is not None and hasattr(device_properties := properties(device), "total_memory"):
        return float(device_properties.total_memory)
    return float(torch.accelerator.get_memory_info(device)[1])


# ------------------------------------------------------------------ streams


def synchronize(device: torch.device) -> None:
    """Wait for all work that is queued on the device; nothing on a CPU."""
    if on_accelerator(device):
        _module(device).synchronize(*(() if _is_single(device) else (device,)))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. The host waits for a copy to its own memory, which it could read at once; not
    for one to an accelerator, where work that is queued after it finds it complete.
    """
    return tensor.to(device, non_blocking=on_accelerator(device))


def new_stream(device: torch.device) -> torch.Stream:
    """A further stream of the device, for work beside that of its current stream.

    Raises:
        StrettoError: devices of this kind have no streams.
    """
    if not has_streams(device):
        raise StrettoError(
            f"{device.type} has no streams, which offloading copies on", hint="offload nothing on this device"
        )
    return _module(device).Stream(device)


def has_streams(device: torch.device) -> bool:
    """Whether there can be more than one stream of the device's work."""
    return on_accelerator(device) and hasattr(_module(device), "Stream")


class CopyStreams:
    """The streams on which one owner copies between a device and the host, made when first asked for. Each
    direction has its own, since a link carries both at once.
    """

    def __init__(self) -> None:
        self._streams = dict[tuple[torch.device, bool], torch.Stream]()

    def to_host(self, device: torch.device) -> torch.Stream:
        """For copies from the device to the host."""
        return self._of(device, True)

    def to_device(self, device: torch.device) -> torch.Stream:
        """For copies from the host to the device."""
        return self._of(device, False)

    def _of(self, device: torch.device, to_host: bool) -> torch.Stream:
        if (device, to_host) not in self._streams:
            self._streams[device, to_host] = new_stream(device)
        return self._streams[device, to_host]


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that work is queued on now."""
    return _module(device).current_stream(device)


def on_stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Within this context work is queued on the stream; None: on the current one."""
    return nullcontext() if stream is None else _module(stream.device).stream(stream)


def new_event(device: torch.device, *, timing: bool = False) -> torch.Event:
    """A mark to record in a stream, for other streams and the host to wait for."""
    return _module(device).Event(enable_timing=timing)


def recorded_event(stream: torch.Stream) -> torch.Event:
    """A mark of what is queued on the stream so far."""
    event = new_event(stream.device)
    event.record(stream)
    return event


# ------------------------------------------------------------------ graphs

_capturing = False  # in this process, one graph at a time


class Graph:
    """Work that a device captures once and then replays: the same kernels on the same memory, launched as
    one. What the host computes meanwhile is done once, at the capture.

    Before the capture the same work is to be done a few times (`warm_up`), since libraries choose kernels and
    caches are filled when they are first used. All of it is on one stream of the graph's own: a backward goes
    on where its forward was, and a capture must not meet work of a stream that is not captured.

    The classes are those of the device's module, as torch and its plug-ins name them;
    `torch.accelerator.Graph` came later, and without a way to register generators.

    Args:
        device: one with graphs (`has_graphs`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, new_stream(device)
        self._graph: Any = None

    @property
    def captured(self) -> bool:
        """Whether there is something to replay."""
        return self._graph is not None

    def warm_up(self, work: Callable[[], None]) -> None:
        """Do the work, after what the current stream has been given and before what it is given next."""
        current: Any = current_stream(self._device)
        stream: Any = self._stream
        stream.wait_stream(current)
        with on_stream(self._stream):
            work()
        current.wait_stream(stream)

    def capture(self, work: Callable[[], None]) -> None:
        """Let the device record the work, without doing it. What it allocates is the graph's from then on.

        Raises:
            RuntimeError: it does what no graph can, such as to read a value of the device.
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
        """Do it once more, on the current stream."""
        self._graph.replay()


def has_graphs(kind: str) -> bool:
    """Whether this torch captures the work of such devices as graphs."""
    try:
        module: Any = torch.get_device_module(kind)
    except (RuntimeError, ValueError):
        return False
    return hasattr(module, "graph") and hasattr(module, _graph_class(kind))


def _graph_class(kind: str) -> str:
    """How modules of devices name the class: by the kind in capitals."""
    return f"{kind.upper()}Graph"


def is_capturing() -> bool:
    """Whether a graph is being captured: what it reads must stay where it is, and no state of a generator
    may be read.
    """
    return _capturing


# ------------------------------------------------------------------ random state


def random_state(device: torch.device) -> Tensor:
    """State of the device's random generator, as a host tensor of bytes."""
    return torch.get_rng_state() if not on_accelerator(device) else _module(device).get_rng_state(device)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore what `random_state` returned."""
    if on_accelerator(device):
        _module(device).set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """States of the generators of this process, the host's and the device's, by kind of device: for layers of
    users, since data, dropout and initial values are functions of the seed alone.
    """
    return {
        generator_device.type: random_state(generator_device)
        for generator_device in dict.fromkeys((torch.device(HOST), device))
    }


def set_random_states(device: torch.device, states: Mapping[str, Tensor]) -> None:
    """Restore what `random_states` returned; a state of another kind of device is left out."""
    for generator_device in (torch.device(HOST), device):
        if generator_device.type in states:
            set_random_state(generator_device, states[generator_device.type])


def forked_random(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """After this context the generators of the host and of these devices, of one kind, are as before it."""
    accelerators = [device for device in devices if on_accelerator(device)]
    return torch.random.fork_rng(accelerators, device_type=accelerators[0].type if accelerators else HOST)


# ------------------------------------------------------------------ what only CUDA is known to have


def has_cuda_kernels(device: torch.device) -> bool:
    """Whether torch's kernels for CUDA run there, on AMD's GPUs too: attention by the operators that also
    return the log-sum-exp and take it in the backward, and RMSNorm that saves one number a row. Other devices
    may have such operators, but nobody has looked at what theirs return; the formulas are right everywhere.
    """
    return device.type == "cuda"


def compute_capability(device: torch.device) -> tuple[int, int]:
    """CUDA's compute capability, (9, 0) of an H100; (0, 0) on other devices. AMD's numbers of this name mean
    something else: (9, 4) has 8-bit products, but in other formats.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)
