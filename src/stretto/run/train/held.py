"""What a rank of a language model holds: weights, masters, optimiser states."""

from __future__ import annotations

from torch import Tensor

from stretto.engine.parallel.replica_check import RankTensors
from stretto.run.train.replica import MODEL, Replica, tensors_of


def held_by(replica: Replica) -> RankTensors:
    """Weights as the modules compute with them and what the optimisers hold, by name, each with its place.
    Where both are the same memory it is there once.
    """
    held = dict(tensors_of(replica))
    for name, parameter in replica.parameters.items():
        updated = held[MODEL + name][0] if MODEL + name in held else None
        whole = updated is not None and updated.numel() >= parameter.numel()  # not the first shard alone
        if updated is None or not whole or updated.data_ptr() != parameter.data_ptr():
            held[f"weights.{name}"] = parameter.detach(), replica.places[name]
    return held


def updated_by(replica: Replica) -> dict[str, Tensor]:
    """Of this, by name, what only an update changes: all but weights that are gathered when they are used."""
    held = held_by(replica) if replica.job.dp.mode != "zero3" else tensors_of(replica)
    return {name: tensor for name, (tensor, _) in held.items()}
