"""The owner of the weights of a rank's pipeline stages: the protocol, and an implementation with replicated
weights. `ShardedStates` (`data.sharded`) is the other one, for ZeRO, mixed precision and offloading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from stretto.engine.parallel.data.gradients import BUCKET_BYTES, GradientBuffer, Groups, buffer_of
from stretto.engine.parallel.mesh import Mesh

SHARED = -1  # index, in place of a stage's, of parameters that several stages of one rank share


class StageWeights(Protocol):
    """Weights, gradients and updates of one rank's stages, as `Pipeline` and its executor use them.

    In a step weights are gathered before use and released after it (UNSHARD, RESHARD), gradients are reduced
    over data-parallel ranks (REDUCE_GRAD), and an asynchronous schedule updates each stage within the step
    (UPDATE).
    """

    @property
    def buffers(self) -> Mapping[int, GradientBuffer]:
        """The gradients of each stage, and under SHARED those of shared parameters; filled by `attach`."""
        ...

    @property
    def gathers(self) -> bool:
        """True if weights may be sharded or in transit; otherwise the executor omits `gather`, `await_stage`,
        `release` and `end_backward`.
        """
        ...

    @property
    def updates_stages(self) -> bool:
        """True if `update` has an optimiser to apply, as asynchronous schedules require."""
        ...

    def attach(
        self,
        mesh: Mesh,
        stages: Mapping[int, Sequence[nn.Module]],
        shared: Sequence[nn.Parameter],
        separate: frozenset[int],
    ) -> None:
        """Take ownership of the parameters of all stages. Called once, before the first step.

        Args:
            stages: the layers of each stage of this rank, in order.
            shared: parameters that several of these stages share.
            separate: ids of parameters whose gradients are summed with other stages' copies, separately from
                all others.
        """
        ...

    def gather(self, stage: int) -> None:
        """Start gathering the stage's weights on this rank."""
        ...

    def await_stage(self, stage: int) -> None:
        """Wait for the stage's weights."""
        ...

    def release(self, stage: int) -> None:
        """Free the weights that `gather` has gathered."""
        ...

    def end_backward(self, stage: int) -> None:
        """Called after a microbatch's backward through the stage."""
        ...

    def reduce(self, stage: int) -> None:
        """Start the remaining sums of the stage's gradients over data-parallel ranks."""
        ...

    def update(self, stage: int) -> None:
        """Apply the stage's reduced gradients, and wait for the new weights."""
        ...

    def recreate_storage(self, stage: int) -> None:
        """Move the stage's parameters to new memory with the same values; older versions keep the old
        memory.
        """
        ...


def trained_parameters(
    stages: Mapping[int, Sequence[nn.Module]], shared: Sequence[nn.Parameter]
) -> dict[int, list[nn.Parameter]]:
    """Return the trained parameters of each stage, without duplicates, in model order; shared ones under
    SHARED.
    """
    return _parameters(stages, shared, trained=True)


def frozen_parameters(
    stages: Mapping[int, Sequence[nn.Module]], shared: Sequence[nn.Parameter]
) -> dict[int, list[nn.Parameter]]:
    """Return the parameters that are not trained, like `trained_parameters`."""
    return _parameters(stages, shared, trained=False)


def _parameters(
    stages: Mapping[int, Sequence[nn.Module]], shared: Sequence[nn.Parameter], trained: bool
) -> dict[int, list[nn.Parameter]]:
    elsewhere = {id(p) for p in shared}
    chosen = dict[int, list[nn.Parameter]]()
    for stage, layers in stages.items():
        unique = {id(p): p for layer in layers for p in layer.parameters() if id(p) not in elsewhere}
        chosen[stage] = [p for p in unique.values() if p.requires_grad is trained]
    if several := [p for p in shared if p.requires_grad is trained]:
        chosen[SHARED] = several
    return chosen


class ReplicatedWeights:
    """Replicated weights and gradients on every data-parallel rank; the owner of plain modules.

    Args:
        optimizer: for asynchronous schedules, creates the optimiser of a stage's parameters.
        group_of: returns the group over which a parameter's gradient is summed; by default that of cp and dp.
        bucket_bytes: size of one gradient reduction.

    Attributes:
        optimizers: optimisers by stage.
    """

    gathers = False

    def __init__(
        self,
        *,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        group_of: Groups | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.buffers = dict[int, GradientBuffer]()
        self.optimizers = dict[int, torch.optim.Optimizer]()
        self._make_optimizer = optimizer
        self._group_of = group_of
        self._bucket_bytes = bucket_bytes
        self._parameters = dict[int, list[nn.Parameter]]()

    @property
    def updates_stages(self) -> bool:
        """True if an optimiser for asynchronous schedules exists."""
        return self._make_optimizer is not None

    def attach(
        self,
        mesh: Mesh,
        stages: Mapping[int, Sequence[nn.Module]],
        shared: Sequence[nn.Parameter],
        separate: frozenset[int],
    ) -> None:
        """Create the gradient buffers and optimisers; replicated gradients need no separate units."""
        group_of = self._group_of or (lambda _: mesh.group("cp-dp"))
        self._parameters = trained_parameters(stages, shared)
        for stage, parameters in self._parameters.items():
            layers = stages.get(stage, ())
            self.buffers[stage] = buffer_of(parameters, layers, group_of, self._bucket_bytes)
            if self._make_optimizer is not None and parameters:
                self.optimizers[stage] = self._make_optimizer(parameters)

    def gather(self, stage: int) -> None:
        """Do nothing: weights are never sharded."""

    def await_stage(self, stage: int) -> None:
        """Do nothing: weights are never in transit."""

    def release(self, stage: int) -> None:
        """Do nothing: weights are never gathered."""

    def end_backward(self, stage: int) -> None:
        """Do nothing: no layer was gathered."""

    def reduce(self, stage: int) -> None:
        """Start the reductions that have not started yet."""
        self.buffers[stage].flush()

    def update(self, stage: int) -> None:
        """Step the stage's optimiser; a stage without trained parameters has none."""
        if stage in self.optimizers:
            self.optimizers[stage].step()

    def recreate_storage(self, stage: int) -> None:
        """Copy each parameter to new memory."""
        for parameter in self._parameters[stage]:
            parameter.data = parameter.data.clone()
