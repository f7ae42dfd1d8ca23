"""Optimiser states in the form of a checkpoint: tensors with a placement in the plain model."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from stretto.engine.optim.base import FragmentOptimizer, count
from stretto.engine.optim.muon import Muon
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement, TensorBox

STEP = "step"  # the number of updates, which a checkpoint stores once for the run, not for each tensor


def state_tensors(
    optimizer: torch.optim.Optimizer, fragment: ParameterFragment
) -> dict[str, tuple[Tensor, ShardPlacement]]:
    """Return the fragment's states by name with their placements; empty before an update or `prepare`.

    Most have the fragment's shape and placement. States that an optimiser lists as `replicated` have a
    different shape, are complete on every holder, and are owned by the owner of the tensor's first element.
    """
    state: dict[str, Tensor] = optimizer.state.get(fragment.parameter, {})
    replicated = optimizer.replicated if isinstance(optimizer, FragmentOptimizer) else frozenset[str]()
    return {
        key: (value, _replicated(fragment, value) if key in replicated else fragment.counted)
        for key, value in state.items()
        if key != STEP
    }


def prepare(
    optimizer: torch.optim.Optimizer, fragments: Iterable[ParameterFragment], weight_updates: int
) -> None:
    """Create zero states with `step` = `weight_updates`, to be loaded from a checkpoint."""
    for fragment in fragments:
        state = optimizer.state[fragment.parameter]
        state.clear()
        state.update(_zeros(optimizer, fragment))
        if STEP in state:
            state[STEP].fill_(weight_updates)


def _zeros(optimizer: torch.optim.Optimizer, fragment: ParameterFragment) -> dict[str, Tensor]:
    """Return the states before the first update."""
    if isinstance(optimizer, FragmentOptimizer) and fragment.parameter in optimizer.fragments:
        return optimizer.new_state(fragment)
    if isinstance(optimizer, Muon):
        assert optimizer.fallback is not None, fragment.name
        return _zeros(optimizer.fallback, fragment)
    parameter = fragment.parameter
    if isinstance(optimizer, torch.optim.AdamW):
        first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
        # fused: the count is on the parameter's device
        return {STEP: count().to(parameter.device), "exp_avg": first, "exp_avg_sq": second}
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return {"momentum_buffer": torch.zeros_like(parameter)} if momentum else {}


def _replicated(fragment: ParameterFragment, value: Tensor) -> ShardPlacement:
    """Return the placement of a state that is complete on every holder."""
    pieces = fragment.counted.pieces
    first = any(p.owned and prod(p.sizes) > 0 and not any(p.offsets) for p in pieces)
    shape, start = tuple(value.shape), (0,) * value.dim()
    piece = TensorBox(offsets=start, sizes=shape, local=start, owned=first)
    return ShardPlacement(fragment.name, shape, (piece,), fragment.placed.over)
