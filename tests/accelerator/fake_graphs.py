"""Graphs of the simulated NPU, with the rules of CUDA's.

A capture records operators and does none of them: what they would have changed is put back, what they would
have returned is NaN until a replay. A replay does them on the same memory, also where that has been freed or
moved meanwhile, which is an error here. Numbers of the host are those of the capture. While capturing, the
host may neither wait for the device nor copy to it or from it, nor ask for a state of a generator.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as trees
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

KIND = "npu"
READING = {  # operators that read values of the device before they go on
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim"),
    *("unique_consecutive", "bincount", "equal"),
}
kernels = ctypes.CDLL(os.environ["STRETTO_FAKE_NPU"])
kernels.allocation.restype = ctypes.c_int64
present: list[Capture] = []  # the capture under way
replayed = 0  # graphs, in this process


@contextmanager
def unobserved() -> Generator[None]:
    """Copies of this thread are no work of a stream."""
    kernels.unobserved_set(1)
    try:
        yield
    finally:
        kernels.unobserved_set(0)


def allocation(address: int) -> int:
    """The number of the device's allocation that begins there; 0: there is none."""
    return kernels.allocation(ctypes.c_void_p(address))


class CaptureError(RuntimeError):
    """As CUDA reports it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"operation not permitted when stream is capturing: {what}")


def forbid(what: str) -> None:
    """Raise if a graph is being captured."""
    if present:
        raise CaptureError(what)


@dataclass
class Outside:
    """A tensor that was there before the capture, by its memory: a graph does not keep it."""

    storage: StorageWeakRef
    address: int
    number: int
    like: Tensor  # of its sizes and type, without memory
    offset: int

    @classmethod
    def of(cls, x: Tensor) -> Outside:
        storage = x.untyped_storage()
        address = storage.data_ptr()
        return cls(
            StorageWeakRef(storage),
            address,
            allocation(address),
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"),
            x.storage_offset(),
        )

    def tensor(self) -> Tensor:
        """The tensor in the memory of the capture."""
        like = self.like
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise RuntimeError(f"a graph uses memory that was freed: {like.dtype} {list(like.shape)}")
        if storage.data_ptr() != self.address or allocation(self.address) != self.number:
            raise RuntimeError(f"a graph uses memory that has moved: {like.dtype} {list(like.shape)}")
        empty = torch.empty(0, dtype=like.dtype, device=storage.device)
        return empty.set_(storage, self.offset, like.shape, like.stride())


def tensor_of(value: Any) -> Any:
    """What an operator is called with in a replay."""
    return value.tensor() if isinstance(value, Outside) else value


class Capture(TorchDispatchMode):
    """Records the operators of a device while it is entered.

    Attributes:
        steps: of a replay.
        made: by storage, tensors in the memory of the graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps = list[Callable[[], object]]()
        self.made = dict[int, Tensor]()
        self._before = dict[int, tuple[Tensor, Tensor]]()  # memory that the capture changes, and its values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.partition("::")[2]
        arguments = [one for one in trees.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        here = [one for one in arguments if one.device.type == KIND]
        if here and name in READING:
            raise CaptureError(name)
        if name in ("copy_", "_to_copy") and len({one.device.type for one in arguments}) > 1:
            raise CaptureError(f"{name} between the host and the device")
        if any(one.device.type == "cpu" and one.dim() for one in arguments) and here:
            raise CaptureError(f"{name} of a tensor of the host")
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is not None:
            raise CaptureError(f"{name} with a generator that is not registered")
        for one in written(func, args, kwargs):
            self.save(one)
        result = func(*args, **kwargs)
        outputs = [one for one in trees.tree_leaves(result) if isinstance(one, Tensor)]
        if name == "_to_copy" and here and any(one.device.type != KIND for one in outputs):
            raise CaptureError("a copy to the host")
        if not here and not any(one.device.type == KIND for one in outputs):
            return result
        if not here and arguments:
            raise CaptureError(f"{name} copies to the device")
        self.note(func, args, kwargs, arguments, outputs)
        return result

    def note(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        arguments: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        """Keep an operator for replays."""
        known = {one.untyped_storage()._cdata for one in arguments}
        fresh = [one for one in outputs if one.untyped_storage()._cdata not in known]
        recorded = trees.tree_map(self.kept, (args, kwargs))
        for one in fresh:
            self.made[one.untyped_storage()._cdata] = one.detach()
        if not fresh and not written(func, args, kwargs):
            return  # a view
        results = [one.detach() if any(one is other for other in fresh) else None for one in outputs]

        def step() -> None:
            words, named = trees.tree_map(tensor_of, recorded, is_leaf=lambda x: isinstance(x, Outside))
            values = trees.tree_leaves(func(*words, **named))
            for target, value in zip(results, [v for v in values if isinstance(v, Tensor)], strict=True):
                if target is not None:
                    target.copy_(value)

        self.steps.append(step)

    def kept(self, value: Any) -> Any:
        """An argument as replays need it."""
        if not isinstance(value, Tensor):
            return value
        if value.device.type != KIND:
            return value.detach().clone()  # a number of the host
        return value.detach() if value.untyped_storage()._cdata in self.made else Outside.of(value)

    def save(self, x: Tensor) -> None:
        """Remember what is in memory from before the capture."""
        storage = x.untyped_storage()
        if x.device.type != KIND or storage._cdata in self.made or storage._cdata in self._before:
            return
        empty = torch.empty(0, dtype=torch.uint8, device=x.device)
        whole = empty.set_(storage, 0, (storage.nbytes(),), (1,))
        with unobserved():
            self._before[storage._cdata] = whole, whole.clone()

    def collective(self, call: Callable[..., dist.Work], arguments: Any, named: Any) -> CapturedWork:
        """Keep a call of a communication library, which is on streams of the graph then."""
        with _disable_current_modes():
            recorded = trees.tree_map(self.kept, (arguments, named))
        work = CapturedWork(self)

        def step() -> None:
            words, more = trees.tree_map(tensor_of, recorded, is_leaf=lambda x: isinstance(x, Outside))
            work.under_way = call(*words, **more)

        self.steps.append(step)
        return work

    def finish(self) -> None:
        """Undo what the capture has done."""
        with unobserved(), torch.no_grad():
            for whole, values in self._before.values():
                whole.copy_(values)
            for one in self.made.values():
                if one.is_floating_point():
                    one.fill_(float("nan"))
        self._before.clear()


class CapturedWork(dist.Work):
    """A call that every replay makes."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture
        self.under_way: dist.Work | None = None

    def wait(self, *timeout: Any) -> bool:
        assert present == [self._capture], "its graph does not wait for it"
        self._capture.steps.append(self._wait)
        return True

    def _wait(self) -> None:
        assert self.under_way is not None
        self.under_way.wait()


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator changes."""
    named = {argument.name: argument for argument in func._schema.arguments}
    values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    changed = [
        value
        for name, value in (values | kwargs).items()
        if (alias := named[name].alias_info) is not None and alias.is_write
    ]
    return [one for one in trees.tree_leaves(changed) if isinstance(one, Tensor)]


@contextmanager
def capturing(graph: Graph) -> Generator[None]:
    """Within this context the graph records what the device is to do."""
    graph.capture = capture = Capture()
    present.append(capture)
    try:
        with capture:
            yield
    finally:
        present.clear()
        capture.finish()


class Graph:
    """As `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.capture: Capture | None = None

    def replay(self) -> None:
        global replayed
        assert self.capture is not None, "nothing was captured"
        replayed += 1
        for one in self.capture.made.values():  # memory of no stream alone
            torch.ops.aten.record_stream(one, torch.get_device_module(KIND).current_stream())
        with torch.no_grad():
            for step in self.capture.steps:
                step()
