"""What tensors without values do while a rank's code runs on them: bytes held, operations, numbers read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from stretto.dryrun.flops import operator_flops
from stretto.pipeline.live import Call
from stretto.pipeline.recorder import Recorder
from stretto.train.held import HeldMemory

_aten: Any = torch.ops.aten
FORWARD, RECOMPUTE, BACKWARD, AFTER = "forward", "recompute", "backward", "update"


class Following(HeldMemory):
    """Follows storages as `HeldMemory` does, counts operations, and answers who reads a number.

    A number that is read is 1, and a question about values is answered with yes: the loss is finite, the
    norm needs no clipping, the random streams are where they were.

    Attributes:
        phase: of the step, set from outside.
        flops: by phase and kind.
        operators: calls of torch's operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = AFTER
        self.flops = Counter[tuple[str, str]]()
        self.operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators += 1
        packet = func.overloadpacket
        if packet is _aten._local_scalar_dense:
            return _one(args[0])
        if packet is _aten.equal:
            return True
        if (found := operator_flops(func, args)) is not None:
            kind, count = found
            self.flops[self.phase, kind] += count
            if packet is _aten._grouped_mm:
                func = _grouped_mm
        if freed := list(_freed(args)):
            func = _without_room(func, freed)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _one(x: Tensor) -> bool | int | float:
    if x.dtype == torch.bool:
        return True
    return 1.0 if x.is_floating_point() else 1


def _grouped_mm(x: Tensor, w: Tensor, *_: Any, **__: Any) -> Tensor:
    """The result's shape: torch's own rule knows 16 bits only, its kernel for CPUs more."""
    return x.new_empty(x.shape[0], w.shape[2])


def _freed(args: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Storages of tensors whose memory was given back, such as weights that are not gathered now."""
    for x in args:
        if isinstance(x, Tensor) and x.layout is torch.strided and x.numel():
            storage = x.untyped_storage()
            if not storage.nbytes():
                yield storage


def _without_room(func: Callable[..., Any], freed: list[torch.UntypedStorage]) -> Callable[..., Any]:
    """The operator, which leaves freed storages as they are. Of a tensor without values even a view makes
    room for all of its elements; of a real one none does.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        for storage in freed:
            storage.resize_(0)
        return out

    return call


class PhaseRecorder(Recorder):
    """Tells who counts which phase of a step an action belongs to, and notes the fullest one."""

    def __init__(self, following: Following) -> None:
        super().__init__("cpu")
        self.following = following
        self.actions = list[tuple[str, int, int]]()  # label, bytes held after, most while it ran

    def record(self, label: str, call: Call, wait: Call | None) -> None:
        """Run a call, after the wait that it would begin with."""
        following = self.following
        if wait is not None:
            wait()
        before, fullest = following.peak, following.at_peak
        following.peak = following.held
        following.phase = _phase(label)
        call()
        following.phase = AFTER
        following.look()
        self.actions.append((label, following.held, following.peak))
        if following.peak <= before:
            following.peak, following.at_peak = before, fullest


def _phase(label: str) -> str:
    """Of an action's text such as 2F0; whatever is no forward belongs to the backward."""
    number = label.lstrip("0123456789")
    return FORWARD if number.startswith("F") and number != label else BACKWARD
