"""A rank among thousands that are not there: a process group that answers nothing, tensors without values.

Tensors are those of torch's FakeTensorMode: shapes, types and storages of true sizes without memory. They lie
on the "CPU", for torch without CUDA cannot run a backward on CUDA tensors; where layers take another way on
CPUs than on accelerators, reduce-scatters and products take the accelerators'.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.parallel import matmul
from stretto.parallel.collectives import native_collectives
from stretto.parallel.dispatch import even_routing
from stretto.parallel.mesh import Mesh


@contextmanager
def fake_rank(layout: Layout, rank: int, native: bool = True) -> Generator[Mesh]:
    """This process as one rank of the layout, until the end of the `with`: its groups, and inside of
    `without_values` its tensors.

    Args:
        native: reduce-scatters are the backend's own, as on accelerators; else all-to-alls, as on CPUs.

    Raises:
        StrettoError: no such rank, or this process belongs to a job already.
    """
    layout.coordinates(rank)  # refuses what is none
    if dist.is_initialized():
        raise StrettoError(
            "a dry run in a process that is a rank already", hint="start it in a process of its own"
        )
    with ExitStack() as stack:
        dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        if native:
            stack.enter_context(native_collectives())
        stack.enter_context(even_routing())
        stack.enter_context(_plain_products())
        mesh = Mesh(layout)
        stack.callback(mesh.close)
        yield mesh


def without_values() -> FakeTensorMode:
    """While inside, all tensors that are made have no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def _plain_products() -> Generator[None]:
    """Products by torch's own library, which adds weight gradients in place as accelerators do."""
    was, matmul.ONEDNN = matmul.ONEDNN, False
    try:
        yield
    finally:
        matmul.ONEDNN = was
