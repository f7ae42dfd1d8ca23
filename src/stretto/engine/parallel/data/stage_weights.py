"""The owner of the weights of a rank's pipeline stages: the protocol, and its plain implementation with whole
weights on every rank. `ShardedStates` (`data.sharded`) is the other one, for ZeRO, mixed precision and
offloading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from stretto.engine.parallel.data.gradients import BUCKET_BYTES, GradientBuffer, Groups, buffer_of
from stretto.engine.parallel.mesh import Mesh

SHARED = -1  # stands for the parameters that several stages of one rank share, where a stage is named


class StageWeights(Protocol):
    """Weights, gradients and updates of one rank's stages, as `Pipeline` and its executor use them.

    In a step weights are gathered before use and released after it (UNSHARD, RESHARD), gradients are reduced
    over data-parallel ranks (REDUCE_GRAD), and an asynchronous schedule updates each stage within the step
    (UPDATE).
    """

    @property
    def buffers(self) -> Mapping[int, GradientBuffer]:
        """The gradients of each stage, those that several share under SHARED; filled by `attach`."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether weights may be split, or still on their way. Where they never are, the executor leaves out
        `gather`, `await_stage`, `release` and `end_backward`.
        """
        ...

    @property
    def updates_stages(self) -> bool:
        """Whether `update` has an optimiser to apply, as asynchronous schedules need."""
        ...

    def attach(
        self,
        mesh: Mesh,
        stages: Mapping[int, Sequence[nn.Module]],
        shared: Sequence[nn.Parameter],
        separate: frozenset[int],
    ) -> None:
        """Take charge of the parameters of all stages. Called once, before the first step.

        Args:
            stages: the layers of each stage of this rank, in order.
            shared: parameters that several of these stages share.
            separate: by id, parameters that are summed with other stages' copies, apart from all others.
        """
        ...

    def gather(self, stage: int) -> None:
        """Start bringing the stage's whole weights to this rank."""
        ...

    def await_stage(self, stage: int) -> None:
        """Wait for the stage's weights."""
        ...

    def release(self, stage: int) -> None:
        """Free what `gather` brought."""
        ...

    def end_backward(self, stage: int) -> None:
        """A microbatch's backward through the stage is done."""
        ...

    def reduce(self, stage: int) -> None:
        """Start summing the stage's gradients over data-parallel ranks, as far as it has not begun."""
        ...

    def update(self, stage: int) -> None:
        """Apply the stage's reduced gradients, and wait for the new weights."""
        ...

    def recreate_storage(self, stage: int) -> None:
        """Move the stage's parameters to new memory, values unchanged; older versions keep the old memory."""
        ...


def trained_parameters(
    stages: Mapping[int, Sequence[nn.Module]], shared: Sequence[nn.Parameter]
) -> dict[int, list[nn.Parameter]]:
    """The parameters to train of each stage, each once and in model order; those in `shared` under SHARED."""
    return _parameters(stages, shared, trained=True)


def frozen_parameters(
    stages: Mapping[int, Sequence[nn.Module]], shared: Sequence[nn.Parameter]
) -> dict[int, list[nn.Parameter]]:
    """As `trained_parameters`, the parameters that are not trained."""
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
    """Whole weights and gradients on every data-parallel rank; the owner of plain modules.

    Args:
        optimizer: for asynchronous schedules: from the parameters of a stage to their optimiser.
        group_of: the ranks over which a parameter's gradient is summed; by default those of cp and dp.
        bucket_bytes: size of one gradient reduction.

    Attributes:
        optimizers: by stage.
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
        """Whether there is an optimiser for asynchronous schedules."""
        return self._make_optimizer is not None

    def attach(
        self,
        mesh: Mesh,
        stages: Mapping[int, Sequence[nn.Module]],
        shared: Sequence[nn.Parameter],
        separate: frozenset[int],
    ) -> None:
        """Make the gradient buffers and optimisers; whole gradients need no separate units."""
        group_of = self._group_of or (lambda _: mesh.group("cp-dp"))
        self._parameters = trained_parameters(stages, shared)
        for stage, parameters in self._parameters.items():
            layers = stages.get(stage, ())
            self.buffers[stage] = buffer_of(parameters, layers, group_of, self._bucket_bytes)
            if self._make_optimizer is not None and parameters:
                self.optimizers[stage] = self._make_optimizer(parameters)

    def gather(self, stage: int) -> None:
        """Weights are always whole."""

    def await_stage(self, stage: int) -> None:
        """Weights are always here."""

    def release(self, stage: int) -> None:
        """Weights stay whole."""

    def end_backward(self, stage: int) -> None:
        """Nothing was gathered for it."""

    def reduce(self, stage: int) -> None:
        """Start the reductions that are not under way yet."""
        self.buffers[stage].flush()

    def update(self, stage: int) -> None:
        """Step the stage's optimiser; a stage without trained parameters has none."""
        if stage in self.optimizers:
            self.optimizers[stage].step()

    def recreate_storage(self, stage: int) -> None:
        """A copy of each parameter."""
        for parameter in self._parameters[stage]:
            parameter.data = parameter.data.clone()
