"""Host overhead beside kernels: Python, autograd and the executor, by layer and by action.

Models whose tensors are so small that their kernels hardly count train for a few steps with more and fewer
blocks and microbatches. Differences of differences leave a block's time and a microbatch's; what `cost` says
of their kernels is taken off. On a GPU the host runs ahead of its kernels, and none of this adds to a step.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from stretto.engine.parallel.mesh import Mesh
from stretto.planner.counts.activations import ComputeConfig
from stretto.planner.machines.device import Device
from stretto.planner.time.layer import kernel_times
from stretto.run.calibrate.stopwatch import Stopwatch
from stretto.run.config.load import parse
from stretto.run.config.schema import TrainConfig
from stretto.run.train.assemble import Replica, assemble
from stretto.spec.shape import ModelShape

_BLOCKS, _MICROBATCHES = (1, 5), (2, 10)
_HIDDEN = 32
_HEADS = 2
_VOCAB = 260
_SEQUENCE = 8
_STEPS = 12  # the fastest of which counts: disturbances only add, and the differences looked for are small


@dataclass(frozen=True)
class Host:
    """Seconds beside kernels.

    Attributes:
        layer: of a block, forward and backward.
        action: of a microbatch's forward, and of its backward.
    """

    layer: float
    action: float


def small_steps(watch: Stopwatch) -> dict[tuple[int, int], float]:
    """Seconds of a step, by blocks and microbatches. Collective over all ranks, each a replica."""
    seconds = dict[tuple[int, int], float]()
    for blocks in _BLOCKS:
        for microbatches in _MICROBATCHES:
            config = _config(blocks, microbatches)
            with replica_of(config) as replica:
                times = [watch.once(partial(random_step, config, replica, step)) for step in range(_STEPS)]
            seconds[blocks, microbatches] = min(times[2:])
    return seconds


def host_of(steps: dict[tuple[int, int], float], device: Device) -> Host:
    """Host overhead: `small_steps` less the kernels, which are timed as measured on the device."""
    (few, many), (less, more) = _BLOCKS, _MICROBATCHES
    each = {b: (steps[b, more] - steps[b, less]) / (more - less) for b in _BLOCKS}
    block = (each[many] - each[few]) / (many - few)
    shape = ModelShape(
        family="gpt", layers=few, hidden=_HIDDEN, heads=_HEADS, vocab=_VOCAB, sequence=_SEQUENCE
    )
    how = ComputeConfig(batch=1, sequence=_SEQUENCE, element=4)

    def kernels(kind: str) -> float:
        work = kernel_times(
            shape=shape, kind=kind, how=how, device=device, precision="fp32", causal=True, attention=1.0
        )
        return work.forward + work.back + work.weight

    rest = each[few] - few * block - kernels("embed") - kernels("head")
    return Host(max(0.0, block - kernels("block")), max(0.0, rest / 2))


def _config(blocks: int, microbatches: int) -> TrainConfig:
    world = dist.get_world_size()
    sizes = f"layers: {blocks}, hidden: {_HIDDEN}, heads: {_HEADS}, vocab: {_VOCAB}, dropout: 0.0"
    return parse(
        f"""
model: {{family: gpt, {sizes}}}
data: {{sequence: {_SEQUENCE}, vocab: {_VOCAB}}}
layout: {{dp: {world}}}
batch: {{global_size: {world * microbatches}, micro_size: 1}}
train: {{device: cpu, threads: 1}}
"""
    )


@contextmanager
def replica_of(config: TrainConfig) -> Generator[Replica]:
    """The config's replica on this rank. Collective over all ranks."""
    replica = assemble(config, config.shape(), Mesh(config.layout.to_layout()))
    try:
        yield replica
    finally:
        dist.barrier()  # no rank closes its groups while others still use them
        replica.close()


def random_step(config: TrainConfig, replica: Replica, step: int) -> None:
    """One training step on random tokens, its update included."""
    m = config.microbatches
    size = config.batch.micro_size
    sequence = config.data.sequence
    random = torch.Generator().manual_seed(step)
    replica.samples[:] = [range(i * size, (i + 1) * size) for i in range(m)]
    pairs = [
        replica.share(*torch.randint(replica.shape.vocab, (2, size, sequence), generator=random).unbind())
        for _ in range(m)
    ]
    tokens = float(m * size * sequence * config.layout.dp)
    replica.set_rate(config.optim.lr)
    replica.step([x.clone() for x, _ in pairs], [y.clone() for _, y in pairs], 1.0 / tokens)
    if not replica.asynchronous:
        replica.update(config.optim.lr)
    replica.states.ready()
