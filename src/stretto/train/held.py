"""What one rank really holds while it trains: every storage from its first use to its end, in bytes.

Counted are the tensors that torch's operators make, take and return. What a kernel allocates and frees inside
of itself (workspaces, a collective's own buffers) is seen by nobody here.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.pipeline.live import Call
from stretto.pipeline.recorder import Recorder

OTHER = "other"


@dataclass(frozen=True)
class Sample:
    """One action: bytes held after it, and the most that was held during it."""

    label: str
    held: int
    peak: int


class _Storage:
    """One storage: its size, its kind, and word of its end."""

    __slots__ = ("bytes", "kind", "reference")

    def __init__(self, size: int, kind: str) -> None:
        self.bytes, self.kind = size, kind
        self.reference: Any = None


class HeldMemory(TorchDispatchMode):
    """Follows all storages of this process while it is active; costs nothing otherwise.

    Attributes:
        held: bytes now.
        peak: most bytes at once since the start or the last `restart`.
        kinds: bytes now, by kind: "parameters", "gradients", ... as `name` was told, else "other".
        at_peak: `kinds` at the peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.kinds, self.at_peak = Counter[str](), Counter[str]()
        self._known = dict[int, _Storage]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for tensor in _tensors((args, kwargs, out)):
            self._see(tensor)
        return out

    def name(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Say what kind these tensors' storages are of."""
        for tensor in tensors:
            known = self._see(tensor)
            if known is not None and known.kind != kind:
                self.kinds[known.kind] -= known.bytes
                self.kinds[kind] += known.bytes
                known.kind = kind

    def restart(self) -> None:
        """Begin the search for the peak anew."""
        self.peak, self.at_peak = self.held, self.kinds.copy()

    def _see(self, tensor: Tensor) -> _Storage | None:
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Storage(0, OTHER)
            known.reference = weakref.ref(storage, lambda _: self._free(key))
        if (grown := storage.nbytes() - known.bytes) != 0:
            self._add(known.kind, grown)
            known.bytes += grown
        return known

    def _free(self, key: int) -> None:
        known = self._known.pop(key)
        self._add(known.kind, -known.bytes)

    def _add(self, kind: str, size: int) -> None:
        self.held += size
        self.kinds[kind] += size
        if self.held > self.peak:
            self.peak, self.at_peak = self.held, self.kinds.copy()


class HeldRecorder(Recorder):
    """Takes a sample after every action of a step instead of its time."""

    def __init__(self, memory: HeldMemory, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.memory, self.samples = memory, list[Sample]()

    def record(self, label: str, call: Call, wait: Call | None) -> None:
        """Run a call, after the wait that it would begin with."""
        if wait is not None:
            wait()
        before, memory = self.memory.peak, self.memory
        memory.peak = memory.held
        call()
        self.samples.append(Sample(label, memory.held, memory.peak))
        memory.peak = max(before, memory.peak)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(item)
