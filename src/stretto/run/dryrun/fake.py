"""Tensors without values that a rank's code can run on: follows storages, counts FLOPs, fakes values read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from math import prod
from typing import Any, Literal, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from stretto.engine import kernels
from stretto.engine.models import rotary
from stretto.engine.models.norms import RMSNorm1p
from stretto.engine.models.rotary import Rotary
from stretto.engine.optim import sharded_optimizer
from stretto.engine.parallel.collectives import native_collectives
from stretto.engine.parallel.expert.dispatch import even_routing
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.tensor import matmul
from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.run.train.memory_measured import MemoryTracker


@contextmanager
def fake_rank(layout: Layout, rank: int, native: bool = True) -> Generator[Mesh]:
    """Make this process one rank of the layout until the end of the `with`: its groups, and inside
    `without_values` its tensors.

    Args:
        layout: the job's layout.
        rank: rank in the layout.
        native: use the backend's own reduce-scatter, as on accelerators; otherwise all-to-alls, as on CPUs.

    Raises:
        StrettoError: no such rank, or this process already belongs to a job.
    """
    layout.coordinates(rank)  # raises for a rank outside the layout
    if dist.is_initialized():
        raise StrettoError(
            "a dry run in a process that is a rank already", hint="start it in a process of its own"
        )
    with ExitStack() as stack:
        dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        if native:
            stack.enter_context(native_collectives())
            stack.enter_context(patch.object(RMSNorm1p, "forward", _fused_norm))
        stack.enter_context(even_routing())
        stack.enter_context(_plain_products())
        stack.enter_context(_tables_once())
        stack.enter_context(_large_tiles())
        stack.enter_context(patch.object(sharded_optimizer, "ThreadPoolExecutor", AtOnce))
        mesh = Mesh(layout)
        stack.callback(mesh.close)
        yield mesh


def without_values() -> FakeTensorMode:
    """Return a mode in which all new tensors are without values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def _plain_products() -> Generator[None]:
    """Use torch's own products, which add weight gradients in place as accelerators do."""
    before, matmul.ONEDNN = matmul.ONEDNN, False
    try:
        yield
    finally:
        matmul.ONEDNN = before


@contextmanager
def _tables_once() -> Generator[None]:
    """Create tables of rotary positions without values once for all layers, as those with values are, and
    keep the two kinds apart.
    """
    tables, shared = rotary.rotary_tables, rotary._cached_tables

    def tables_of(self: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        length = x.shape[-2]
        rows = 1 << (length - 1).bit_length()
        cos, sin = rotary._cached_tables(
            rows, self._angles(self._frequency_length(length)), x.device, x.dtype
        )
        return cos[:length], sin[:length]

    before = Rotary._tables
    rotary._cached_tables, Rotary._tables = lru_cache(maxsize=8)(tables), tables_of
    try:
        yield
    finally:
        rotary._cached_tables, Rotary._tables = shared, before


@contextmanager
def _large_tiles() -> Generator[None]:
    """Use as many scores in a tile of naive attention as on accelerators: many heads in one call."""
    before, kernels.SCORES = kernels.SCORES, 64 * kernels.SCORES
    try:
        yield
    finally:
        kernels.SCORES = before


class _FusedNorm(torch.autograd.Function):
    """What one kernel of an accelerator keeps of an RMSNorm; on CPUs it is composed of torch's operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain, x.new_empty(x.shape[:-1]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        x, gain, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(gain)


def _fused_norm(self: RMSNorm1p, x: Tensor) -> Tensor:
    exact = torch.promote_types(x.dtype, torch.float32)
    return cast(Tensor, _FusedNorm.apply(x.to(exact), 1.0 + self.weight.to(exact))).to(x.dtype)


class AtOnce(Executor):
    """Runs what is submitted in the calling thread: a mode of tensors without values is a thread's."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(fn(*args, **kwargs))
        return future


Kind = Literal["products", "attention"]
_aten: Any = torch.ops.aten
_DEVICE: Any = torch.ops.prim.device.default


def _mm(a: Any, b: Any) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def _bmm(a: Any, b: Any) -> int:
    return 2 * prod(a.shape) * b.shape[2]


def _pairs(q: Any, k: Any) -> int:
    """One product of scores: q [b, heads, n, d], k [b, kv_heads, m, d]."""
    return 2 * prod(q.shape) * k.shape[2]


def _grouped(x: Any, w: Any) -> int:
    """Rows sorted by group times a matrix for each group, or both cut into groups."""
    if w.dim() == 3:
        return 2 * prod(x.shape) * w.shape[2]
    return 2 * prod(x.shape) * w.shape[1]


_MATRICES: dict[Any, Callable[..., int]] = {
    _aten.mm: lambda a, b, *_: _mm(a, b),
    _aten.addmm: lambda _, a, b, *__: _mm(a, b),
    _aten.addmm_: lambda _, a, b, *__: _mm(a, b),
    _aten._scaled_mm: lambda a, b, *_: _mm(a, b),
    _aten._grouped_mm: lambda x, w, *_: _grouped(x, w),
}
_BATCHES: dict[Any, Callable[..., int]] = {
    _aten.bmm: lambda a, b, *_: _bmm(a, b),
    _aten.baddbmm: lambda _, a, b, *__: _bmm(a, b),
}
_ATTENTION: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_: 2 * _pairs(q, k),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, q, k, *__: 5 * _pairs(q, k),
}


def operator_flops(func: Any, args: tuple[Any, ...]) -> tuple[Kind, int] | None:
    """Return the kind and FLOPs of one call, or None for an operator that multiplies no matrices.

    Batched products count as attention, except those with one row, which mix outputs of experts.
    """
    packet = func.overloadpacket
    if (count := _MATRICES.get(packet)) is not None:
        return "products", count(*args)
    if (count := _ATTENTION.get(packet)) is not None:
        return "attention", count(*args)
    if (count := _BATCHES.get(packet)) is not None:
        rows = args[0 if packet is _aten.bmm else 1].shape[1]
        return "products" if rows == 1 else "attention", count(*args)
    return None


FORWARD = "forward"
RECOMPUTE = "recompute"
BACKWARD = "backward"
AFTER = "update"


class Following(MemoryTracker):
    """Follows storages as `MemoryTracker` does, counts operations, and fakes numbers that the host reads.

    Every number that is read is 1 and every comparison of values is true: the loss is finite, the norm needs
    no clipping, the random streams have not moved.

    Attributes:
        phase: current phase of the step, set from outside.
        flops: FLOPs by phase and kind.
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
        if func is _DEVICE:  # autograd's engine asks twice as often as it calls operators
            return args[0].device
        self.operators += 1
        packet = func.overloadpacket
        if packet is _aten._local_scalar_dense:
            x = args[0]
            return True if x.dtype == torch.bool else 1.0 if x.is_floating_point() else 1
        if packet is _aten.equal:
            return True
        if (counted := operator_flops(func, args)) is not None:
            kind, count = counted
            self.flops[self.phase, kind] += count
            if packet is _aten._grouped_mm:
                func = _grouped_mm
        # of weights that are not gathered now: of a tensor without values even a view allocates all elements
        tensors = [x for x in args if isinstance(x, Tensor) and x.layout is torch.strided and x.numel()]
        freed = [storage for x in tensors if not (storage := x.untyped_storage()).nbytes()]
        if not freed:
            return super().__torch_dispatch__(func, types, args, kwargs)
        operator = func

        def call(*args: Any, **kwargs: Any) -> Any:
            out = operator(*args, **kwargs)
            for storage in freed:
                storage.resize_(0)
            return out

        return super().__torch_dispatch__(call, types, args, kwargs)


def _grouped_mm(x: Tensor, w: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return a tensor of the result's shape: torch's own rule accepts 16 bits only, its CPU kernel more."""
    return x.new_empty(x.shape[0], w.shape[2])
