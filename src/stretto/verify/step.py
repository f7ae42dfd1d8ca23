"""One training step of a layout, on the samples that the reference sees."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from stretto.config.schema import TrainConfig
from stretto.data.sampler import microbatch_indices
from stretto.models.language import IGNORED
from stretto.train.assemble import Replica
from stretto.train.updates import scales, update_of

Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 [global batch, sequence]


def run_step(replica: Replica, config: TrainConfig, step: int, batch: Batch) -> float:
    """Forward and backward of one global batch on this layout, with the updates of an asynchronous schedule;
    returns the loss, the same on every rank.
    """
    inputs, targets = batch
    mesh, m, size = replica.mesh, config.microbatches, config.batch.micro_size
    replica.samples[:] = [
        microbatch_indices(step, j, mesh.index("dp"), mesh.size("dp"), size, m) for j in range(m)
    ]
    first = step * config.batch.global_size
    rows = [slice(r.start - first, r.stop - first) for r in replica.samples]
    tokens = int((targets != IGNORED).sum())
    scale: float | list[float] = 1.0 / tokens
    if replica.asynchronous:
        unit = (targets != IGNORED).reshape(m, -1).sum(1)  # of one microbatch of all replicas
        scale = scales(update_of(replica.pipeline.program), unit.double().tolist())
    pairs = [replica.share(inputs[r], targets[r]) for r in rows]
    losses = replica.step([x for x, _ in pairs], [y for _, y in pairs], scale)
    total = replica.auxiliary.losses.sum()  # of the tokens that this rank routed
    if losses is not None and mesh.index("tp") == 0:
        total = total + losses.sum()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return float(total) / tokens


def weights_of(replica: Replica) -> dict[str, Tensor]:
    """This rank's weights by plain name."""
    return {name: parameter.detach() for name, parameter in replica.parameters.items()}


def copies_of(replica: Replica) -> Callable[[str], int]:
    """How many copies there are of parameters that are spread over given axes."""
    mesh = replica.mesh
    return lambda over: mesh.layout.world // (mesh.size(over) * mesh.size("pp"))
