"""What a rank of a language model holds that other ranks may hold too: weights, masters, optimiser states."""

from __future__ import annotations

from stretto.engine.parallel.copies import Held
from stretto.run.train.replica import MODEL, Replica, tensors_of


def held_by(replica: Replica) -> Held:
    """Weights as the modules compute with them and what the optimisers hold, by name, each with its place.
    Where both are the same memory it is there once.
    """
    held = dict(tensors_of(replica))
    for name, parameter in replica.parameters.items():
        updated = held.get(MODEL + name)
        if updated is None or updated[0].data_ptr() != parameter.data_ptr():
            held[f"weights.{name}"] = parameter.detach(), replica.places[name]
    return held
