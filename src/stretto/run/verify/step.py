"""One training step of a layout, on the samples that the reference sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.models.language import IGNORED
from stretto.engine.offload.tensor_files import at_hand
from stretto.engine.parallel.fragment import Fragment, Piece, Placed
from stretto.prove.compare import misplaced
from stretto.run.data.dataset import microbatch_indices
from stretto.run.train.optimizer import scales, update_numbers
from stretto.run.train.replica import Replica
from stretto.run.verify.reference import Batch


def run_step(replica: Replica, step: int, batch: Batch) -> float:
    """Forward and backward of one global batch on this layout, with the updates of an asynchronous schedule;
    returns the loss, the same on every rank.
    """
    inputs, targets = batch
    job, mesh = replica.job, replica.mesh
    m = replica.pipeline.program.microbatches
    replica.samples[:] = [
        microbatch_indices(
            step=step,
            microbatch=j,
            dp_rank=mesh.index("dp"),
            dp=mesh.size("dp"),
            micro_batch=job.micro_batch,
            microbatches=m,
        )
        for j in range(m)
    ]
    first = step * job.global_batch
    rows = [slice(r.start - first, r.stop - first) for r in replica.samples]
    tokens = int((targets != IGNORED).sum())
    scale: float | list[float] = 1.0 / tokens
    if replica.asynchronous:
        unit = (targets != IGNORED).reshape(m, -1).sum(1)  # of one microbatch of all replicas
        scale = scales(update_numbers(replica.pipeline.program), unit.double().tolist())
    pairs = [replica.share(inputs[r], targets[r]) for r in rows]
    losses = replica.step([x for x, _ in pairs], [y for _, y in pairs], scale)
    total = replica.auxiliary.losses.sum()  # of the tokens that this rank routed
    if losses is not None and mesh.index("tp") == 0:
        total = total + losses.sum()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return float(total) / tokens


def gradients_of(replica: Replica) -> Held:
    """The reduced gradients of what this rank's optimiser updates; zero where there is none."""
    gradients = Held({}, {})
    for fragment in replica.fragments:
        there = fragment.gradient
        gradients.add(fragment, torch.zeros_like(fragment.parameter) if there is None else there)
    return gradients


def masters_of(replica: Replica) -> Held:
    """The values that this rank's optimiser updates, by plain name, with what norm and checkpoints count."""
    masters = Held({}, {})
    for fragment in replica.fragments:
        masters.add(fragment, at_hand(fragment.parameter.detach()).clone())  # files give one at a time
    return masters


def own_part(weights: Mapping[str, Tensor], replica: Replica) -> Held:
    """Of the weights that modules compute with, what this rank's own optimiser updates; as whole tensors."""
    updated = Held({}, {})
    for fragment in replica.fragments:
        name, shape = fragment.name, fragment.placed.shape
        whole = torch.zeros(shape, dtype=weights[name].dtype)
        for piece in replica.places[name].pieces:
            piece.of_full(whole).copy_(piece.of_local(weights[name]))
        boxes = [Piece(offsets=p.offsets, sizes=p.sizes, local=p.offsets) for p in fragment.placed.pieces]
        updated.add(fragment, whole)
        updated.places[name] = Placed(name, shape, tuple(boxes))
    return updated


@dataclass
class Held:
    """Tensors by plain name, and where they lie."""

    tensors: dict[str, Tensor]
    places: dict[str, Placed]

    def add(self, fragment: Fragment, tensor: Tensor) -> None:
        """What is held of a fragment."""
        self.tensors[fragment.name], self.places[fragment.name] = tensor, fragment.counted


def wrongly_held(replica: Replica, reference: Mapping[str, Tensor]) -> dict[str, str]:
    """What is wrong with who holds and counts what: of the optimisers' values, once in each copy of the
    states, and of the weights, once in each copy of them. Collective.
    """
    masters = masters_of(replica)
    states = misplaced(masters.tensors, masters.places, reference, lambda over: copies_of(replica, over)[1])
    weights = misplaced(
        replica.parameters, replica.places, reference, lambda over: copies_of(replica, over)[0]
    )
    return {**weights, **states}


def copies_of(replica: Replica, over: str) -> tuple[int, int]:
    """How many copies there are of parameters that are spread over given axes, and of their states."""
    mesh, states = replica.mesh, replica.states
    copies = mesh.layout.world // (mesh.size(over) * mesh.size("pp"))
    of_states = 1 if states.dp.mode == "server" else copies // states.sizes.for_copies(copies).states
    return copies, of_states
