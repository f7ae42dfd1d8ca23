"""Run the training code of one rank on a simulated GPU, where torch's own allocator holds its memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.nn.attention import SDPBackend, sdpa_kernel

from stretto.engine.device import backend_for, rank_device
from stretto.engine.parallel.expert.dispatch import even_routing
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.pipeline.executor import PipelineError
from stretto.errors import StrettoError
from stretto.job.job import Job
from stretto.layout.layout import Layout
from stretto.run.dryrun.simulated_gpu import SimulatedGpu
from stretto.run.train.assemble import assemble
from stretto.run.train.memory_measured import random_step

STEPS = 3
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, kw_only=True)
class AllocatorRun:
    """What torch's allocator held for one rank, and what the host asked of the device.

    Attributes:
        rank, coordinates: the rank and its index on each axis.
        allocated: the most bytes of tensors in the last step; if memory ran out, at that time.
        reserved: the most bytes that the allocator took from the device.
        retries: how often it returned its free blocks to the device and tried again.
        work: kernels, products, messages, ... of the last step.
        host_s: seconds in which the host ran the last step.
        out_of_memory: the action in which memory ran out and torch's report; None if the job fits.
    """

    rank: int
    coordinates: dict[str, int]
    allocated: int
    reserved: int
    retries: int
    work: dict[str, int]
    host_s: float
    out_of_memory: str | None


def run_on_allocator(
    gpu: SimulatedGpu, job: Job, rank: int, *, progress: Callable[[str, int, int], None] | None = None
) -> AllocatorRun:
    """Assemble one rank of a job and run `STEPS` steps.

    Blocks are not compiled. Other ranks do not exist: messages take their time and their memory on this
    rank's side alone. Every number that the host reads is 1, and experts are chosen evenly.

    Args:
        gpu: loaded before torch was imported.
        job: a legal job.
        rank: rank in the job's layout, 0 to world - 1.
        progress: called with the current part, the steps that are done, and their total.

    Raises:
        StrettoError: no such rank, or torch does not see the simulated device.
    """
    attention = "auto" if job.attention == "flex" else job.attention
    uncompiled = replace(job, compile="off", attention=attention)
    before, started = gpu.counts(), time.perf_counter()
    failure = None
    with simulated_rank(job.layout, rank) as mesh:
        memory = torch.get_device_module(mesh.device)
        try:
            replica = assemble(uncompiled, mesh, seed=0, fresh=False)
            replica.pipeline.train()
            for step in range(1, STEPS + 1):
                if progress is not None:
                    progress("steps", step - 1, STEPS)
                memory.reset_peak_memory_stats()
                before, started = gpu.counts(), time.perf_counter()
                random_step(replica, step)
        except (torch.OutOfMemoryError, PipelineError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and not isinstance(
                error.__cause__, torch.OutOfMemoryError
            ):
                raise
            failure = str(error)
        seconds = time.perf_counter() - started
        statistics: Mapping[str, int] = memory.memory_stats()
    return AllocatorRun(
        rank=rank,
        coordinates=dict(mesh.coordinates),
        allocated=statistics["allocated_bytes.all.peak"],
        reserved=statistics["reserved_bytes.all.peak"],
        retries=statistics["num_alloc_retries"],
        work=gpu.counts().since(before),
        host_s=seconds,
        out_of_memory=failure,
    )


class _StoreOfOne(Store):
    """A job's store in which the other ranks seem to have written and arrived whenever this one asks."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self._world, self._values = world, dict[str, bytes]()

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values.get(key, bytes(128))  # a communicator's identity, which its first rank writes

    def add(self, key: str, value: int) -> int:
        return self._world

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        return

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


@contextmanager
def simulated_choices() -> Generator[None]:
    """Inside the `with`, experts are chosen evenly, since no value says how, and attention does without the
    library that torch prefers on this device: it is the real one, and finds no device.
    """
    with even_routing(), sdpa_kernel(_ATTENTION):
        yield


@contextmanager
def simulated_rank(layout: Layout, rank: int) -> Generator[Mesh]:
    """Inside the `with`, this process is one rank of a layout, with the process groups of the simulated GPU
    and its `simulated_choices`.

    Raises:
        StrettoError: no such rank, torch does not see the GPU, or this process already belongs to a job.
    """
    layout.coordinates(rank)  # raises for a rank outside the layout
    device = rank_device("auto")
    if not torch.accelerator.is_available():
        raise StrettoError(f"torch {torch.__version__} does not see the simulated GPU")
    if dist.is_initialized():
        raise StrettoError(
            "a dry run in a process that is a rank already", hint="start it in a process of its own"
        )
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"  # a thread that reads the store of the other ranks
    store = _StoreOfOne(layout.world)
    dist.init_process_group(backend_for(device.type), store=store, rank=rank, world_size=layout.world)
    mesh = Mesh(layout, device)
    try:
        with simulated_choices():
            yield mesh
    finally:
        mesh.close()
        dist.destroy_process_group()
