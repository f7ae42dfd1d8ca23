"""Host overhead beside kernels: Python, autograd and the executor, by layer and by action.

Models with tensors so small that kernels hardly count train for a few steps, with more and fewer blocks and
microbatches. Differences of differences leave the time of a block and of a microbatch, from which the
predicted time of their kernels is subtracted. On a GPU the host runs ahead of its kernels, so none of this
adds to a step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from stretto.engine.parallel.mesh import Mesh
from stretto.job.job import VOCAB_MULTIPLE, Job
from stretto.job.optimiser import Optimiser
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.machines.device import Device
from stretto.planner.time.kernels import kernel_times
from stretto.run.calibrate.stopwatch import Stopwatch
from stretto.run.train.assemble import assemble
from stretto.run.train.memory_measured import random_step
from stretto.run.train.rank_model import RankModel

Row = list[float]  # blocks, microbatches, seconds of a step

_BLOCKS, _MICROBATCHES = (1, 5), (2, 10)
_HIDDEN = 32
_HEADS = 2
_VOCAB = 260
_SEQUENCE = 8
_STEPS = 12  # the fastest counts: disturbances only add, and the differences are small


@dataclass(frozen=True)
class HostOverhead:
    """Host seconds beside kernels.

    Attributes:
        layer: per block, forward and backward.
        action: per forward of a microbatch, and per backward.
    """

    layer: float
    action: float


TYPICAL = HostOverhead(layer=6e-4, action=3e-4)  # of one machine: 511 to 811 us, and 221 to 383 us


def small_steps(watch: Stopwatch, quick: bool) -> Iterator[tuple[str, Callable[[list[Row]], None]]]:
    """Measurements: a name, and a call that adds a row. Collective over all ranks, each a replica."""
    steps = _STEPS // 2 if quick else _STEPS
    for blocks in _BLOCKS:
        for microbatches in _MICROBATCHES:

            def measure(into: list[Row], blocks: int = blocks, microbatches: int = microbatches) -> None:
                with replica_of(_job(blocks, microbatches)) as replica:
                    times = [watch.once(partial(random_step_done, replica, step)) for step in range(steps)]
                into.append([blocks, microbatches, min(times[2:])])

            yield f"{blocks} blocks, {microbatches} microbatches", measure


def host_of(rows: list[Row], device: Device) -> HostOverhead | None:
    """Host overhead: `small_steps` less their kernels, predicted from the device's measurements. None if not
    all of them were measured.
    """
    (few, many), (less, more) = _BLOCKS, _MICROBATCHES
    steps = {(blocks, microbatches): seconds for blocks, microbatches, seconds in rows}
    if len(steps) < len(_BLOCKS) * len(_MICROBATCHES):
        return None
    each = {b: (steps[b, more] - steps[b, less]) / (more - less) for b in _BLOCKS}
    block = (each[many] - each[few]) / (many - few)
    shape = ModelShape(
        family="gpt", layers=few, hidden=_HIDDEN, heads=_HEADS, vocab=_VOCAB, sequence=_SEQUENCE
    )
    compute = ComputeConfig(batch=1, sequence=_SEQUENCE, element=4)

    def kernels(kind: str) -> float:
        work = kernel_times(shape, kind, compute, device, "fp32")
        return work.forward + work.back + work.weight

    microbatch = each[few] - few * block - kernels("embed") - kernels("head")
    return HostOverhead(max(0.0, block - kernels("block")), max(0.0, microbatch / 2))


def _job(blocks: int, microbatches: int) -> Job:
    world = dist.get_world_size()
    shape = ModelShape(
        family="gpt", layers=blocks, hidden=_HIDDEN, heads=_HEADS, vocab=_VOCAB, sequence=_SEQUENCE
    )
    return Job(
        shape=shape,
        layout=Layout(dp=world),
        global_batch=world * microbatches,
        optimiser=Optimiser(),
        vocab_multiple=VOCAB_MULTIPLE,
        unified_memory=True,
    )


@contextmanager
def replica_of(job: Job) -> Generator[RankModel]:
    """The job's replica on this rank. Collective over all ranks."""
    replica = assemble(job, Mesh(job.layout), seed=0)
    try:
        yield replica
    finally:
        dist.barrier()  # no rank closes its groups while others still use them
        replica.close()


def random_step_done(replica: RankModel, step: int) -> None:
    """One training step on random tokens, until its updated weights are on all ranks."""
    random_step(replica, step)
    replica.states.ready()
