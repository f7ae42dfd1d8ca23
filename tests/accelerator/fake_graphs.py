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

    def __init__(self, operation: str) -> None:
        super().__init__(f"operation not permitted when stream is capturing: {operation}")


def forbid(operation: str) -> None:
    """Raise if a graph is being captured."""
    if present:
        raise CaptureError(operation)


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
        self.allocated = dict[int, Tensor]()
        self._before = dict[int, tuple[Tensor, Tensor]]()  # memory that the capture changes, and its values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.partition("::")[2]
        arguments = [tensor for tensor in trees.tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        here = [tensor for tensor in arguments if tensor.device.type == KIND]
        if here and name in READING:
            raise CaptureError(name)
        if name in ("copy_", "_to_copy") and len({tensor.device.type for tensor in arguments}) > 1:
            raise CaptureError(f"{name} between the host and the device")
        if any(tensor.device.type == "cpu" and tensor.dim() for tensor in arguments) and here:
            raise CaptureError(f"{name} of a tensor of the host")
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is not None:
            raise CaptureError(f"{name} with a generator that is not registered")
        for target in written(func, args, kwargs):
            self.save(target)
        result = func(*args, **kwargs)
        outputs = [tensor for tensor in trees.tree_leaves(result) if isinstance(tensor, Tensor)]
        if name == "_to_copy" and here and any(tensor.device.type != KIND for tensor in outputs):
            raise CaptureError("a copy to the host")
        if not here and not any(tensor.device.type == KIND for tensor in outputs):
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
        inputs = {tensor.untyped_storage()._cdata for tensor in arguments}
        fresh = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in inputs]
        recorded = trees.tree_map(self.reference, (args, kwargs))
        for tensor in fresh:
            self.allocated[tensor.untyped_storage()._cdata] = tensor.detach()
        if not fresh and not written(func, args, kwargs):
            return  # a view
        results = [tensor.detach() if any(tensor is other for other in fresh) else None for tensor in outputs]

        def step() -> None:
            positional, named = trees.tree_map(tensor_of, recorded, is_leaf=lambda x: isinstance(x, Outside))
            values = trees.tree_leaves(func(*positional, **named))
            for target, value in zip(results, [v for v in values if isinstance(v, Tensor)], strict=True):
                if target is not None:
                    target.copy_(value)

        self.steps.append(step)

    def reference(self, value: Any) -> Any:
        """An argument as replays need it."""
        if not isinstance(value, Tensor):
            return value
        if value.device.type != KIND:
            return value.detach().clone()  # a number of the host
        return value.detach() if value.untyped_storage()._cdata in self.allocated else Outside.of(value)

    def save(self, x: Tensor) -> None:
        """Remember what is in memory from before the capture."""
        storage = x.untyped_storage()
        if x.device.type != KIND or storage._cdata in self.allocated or storage._cdata in self._before:
            return
        empty = torch.empty(0, dtype=torch.uint8, device=x.device)
        storage_bytes = empty.set_(storage, 0, (storage.nbytes(),), (1,))
        with unobserved():
            self._before[storage._cdata] = storage_bytes, storage_bytes.clone()

    def collective(self, call: Callable[..., dist.Work], arguments: Any, named: Any) -> CapturedWork:
        """Keep a call of a communication library, which is on streams of the graph then."""
        with _disable_current_modes():
            recorded = trees.tree_map(self.reference, (arguments, named))
        work = CapturedWork(self)

        def step() -> None:
            positional, more = trees.tree_map(tensor_of, recorded, is_leaf=lambda x: isinstance(x, Outside))
            work.under_way = call(*positional, **more)

        self.steps.append(step)
        return work

    def finish(self) -> None:
        """Undo what the capture has done."""
        with unobserved(), torch.no_grad():
            for storage_bytes, values in self._before.values():
                storage_bytes.copy_(values)
            for tensor in self.allocated.values():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
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
    return [tensor for tensor in trees.tree_leaves(changed) if isinstance(tensor, Tensor)]


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
        for tensor in self.capture.allocated.values():  # memory of no stream alone
            torch.ops.aten.record_stream(tensor, torch.get_device_module(KIND).current_stream())
        with torch.no_grad():
            for step in self.capture.steps:
                step()
