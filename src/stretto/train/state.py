"""A replica as a checkpoint sees it: every tensor under its plain-model name, with its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.checkpoint.shards import Tensors
from stretto.parallel.placed import Placed
from stretto.train.assemble import Replica

MODEL, OPTIM = "model.", "optim."


def tensors_of(replica: Replica) -> Tensors:
    """Parameters and optimiser states, to be written from or read into."""
    found = dict[str, tuple[Tensor, Placed]]()
    for name, parameter in replica.parameters.items():
        place = replica.places[name]
        found[MODEL + name] = (parameter.detach(), place)
        for key, value in _optimizer_state(replica, name).items():
            found[f"{OPTIM}{key}.{name}"] = (value, place)
    return found


def prepare_optimizer(replica: Replica, updates: int) -> None:
    """Give the optimisers the states they make at their first step, so that a checkpoint can be read into
    them."""
    for optimizer in replica.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if isinstance(optimizer, torch.optim.AdamW):
                    state["step"] = torch.tensor(float(updates), dtype=torch.float32, device=parameter.device)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                elif group.get("momentum"):
                    state["momentum_buffer"] = torch.zeros_like(parameter)


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


def _optimizer_state(replica: Replica, name: str) -> dict[str, Any]:
    """The states of one parameter that have its shape."""
    parameter = replica.parameters[name]
    found = (o.state[parameter] for o in replica.optimizers if parameter in o.state)
    state: dict[str, Any] = next(found, {})
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step"
    }
