"""A replica as a checkpoint sees it: every tensor under its plain-model name, with its place."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.checkpoint.shards import Tensors
from stretto.optim.states import state_tensors
from stretto.parallel.placed import Placed
from stretto.train.replica import Replica

MODEL, OPTIM = "model.", "optim."


def tensors_of(replica: Replica) -> Tensors:
    """Parameters, in the precision of the optimiser, and its states, to be written from or read into."""
    found = dict[str, tuple[Tensor, Placed]]()
    replica.updates.ensure_states()
    owners = (owner for updater in replica.updates.updaters for owner in updater.owners())
    for optimizer, fragment in owners:
        found[MODEL + fragment.name] = (fragment.parameter.detach(), fragment.counted)
        for key, (value, place) in state_tensors(optimizer, fragment).items():
            found[f"{OPTIM}{key}.{fragment.name}"] = (value, place)
    return found


def prepare_optimizer(replica: Replica, updates: int) -> None:
    """Give the optimisers the states they make at their first step, so that a checkpoint can be read into
    them."""
    for updater in replica.updates.updaters:
        updater.prepare(updates)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Torch's generators on this rank. Ours need none: data, dropout and initial values are functions of the
    seed."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Put back what `random_state` gave."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
