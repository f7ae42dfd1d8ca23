"""The update of what this rank's optimisers hold, after a step or in the middle of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.config.schema import TrainConfig
from stretto.optim.build import build_optimizer
from stretto.parallel.fragment import Fragment
from stretto.parallel.sharded import ShardedStates


class Updates:
    """Optimisers over the fragments of a rank.

    Attributes:
        optimizers: one for all fragments, or one a stage where each is updated by itself.
    """

    def __init__(self, states: ShardedStates, config: TrainConfig) -> None:
        self.states, self.config = states, config
        self.optimizers: list[torch.optim.Optimizer] = []
        self._stages = dict[int, tuple[torch.optim.Optimizer, list[Fragment], frozenset[int]]]()

    def begin(
        self,
        values: Callable[[str, tuple[int, ...]], Tensor] | None,
        elsewhere: frozenset[int],
        by_stage: bool,
    ) -> None:
        """Make the optimisers, once the stages are there.

        Args:
            values: initial values by plain name and shape; None: a checkpoint follows.
            elsewhere: by id, parameters whose first copy is on another rank.
            by_stage: each stage is updated by itself.
        """
        fragments = self.states.make_fragments(elsewhere)
        if values is not None:
            self.states.load(values)
        if not by_stage:
            self.optimizers = [self._build(fragments)] if fragments else []
            return
        first = 0
        for stage, units in self.states.units.items():
            numbers = frozenset(range(first, first + len(units)))
            first += len(units)
            own = [fragment for fragment in fragments if fragment.unit in numbers]
            if own:
                self._stages[stage] = self._build(own), own, numbers
        self.optimizers = [optimizer for optimizer, _, _ in self._stages.values()]

    def _build(self, fragments: Sequence[Fragment]) -> torch.optim.Optimizer:
        return build_optimizer(fragments, self.config.optim)

    def set_rate(self, rate: float) -> None:
        """The learning rate of the updates to come."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def all(self) -> None:
        """Apply all gradients; weights are on their way to who holds them when this returns."""
        for optimizer in self.optimizers:
            _step(optimizer, self.states.fragments)
        self.states.publish()

    def stage(self, stage: int) -> None:
        """Apply the gradients of one stage; its weights are everywhere when this returns."""
        if stage not in self._stages:
            return
        optimizer, own, numbers = self._stages[stage]
        _step(optimizer, own)
        self.states.publish(numbers)
        self.states.await_stage(stage)

    def close(self) -> None:
        """Nothing is updated after this."""


def _step(optimizer: torch.optim.Optimizer, fragments: Sequence[Fragment]) -> None:
    passing = list[Fragment]()
    for fragment in fragments:
        parameter, gradient = fragment.parameter, fragment.gradient
        if gradient is None or parameter.grad is gradient:
            continue
        if gradient.dtype != parameter.dtype or gradient.device != parameter.device:
            gradient = gradient.to(parameter.device, parameter.dtype)
            passing.append(fragment)
        parameter.grad = gradient
    optimizer.step()
    for fragment in passing:
        fragment.parameter.grad = None


__all__ = ["Updates"]
