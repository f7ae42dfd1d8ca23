"""The update of what this rank's optimisers hold, after a step or in the middle of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from stretto.config.schema import TrainConfig
from stretto.optim.build import build_optimizer
from stretto.optim.updater import Updater
from stretto.parallel.fragment import Fragment
from stretto.parallel.sharded import ShardedStates

Values = Callable[[str, tuple[int, ...]], Tensor]


class Updates:
    """Optimisers over the fragments of a rank: one updater for all, or one for each stage where a schedule
    updates each by itself.
    """

    def __init__(self, states: ShardedStates, config: TrainConfig) -> None:
        self.states, self.config = states, config
        self._updaters = dict[int, Updater]()  # by stage; -1: of all

    def begin(self, values: Values | None, elsewhere: frozenset[int], by_stage: bool) -> None:
        """Make the optimisers, once the stages are there.

        Args:
            values: initial values by plain name and shape; None: a checkpoint follows.
            elsewhere: by id, parameters whose first copy is on another rank.
            by_stage: each stage is updated by itself.
        """
        fragments = self.states.begin(values, elsewhere)
        if not by_stage:
            self._updaters[-1] = self._updater(fragments)
            return
        stage_of = {unit.number: stage for stage, units in self.states.units.items() for unit in units}
        for stage, own in groupby(fragments, lambda fragment: stage_of[fragment.unit]):
            self._updaters[stage] = self._updater(_each(list(own)))

    def _updater(self, fragments: Generator[Fragment]) -> Updater:
        dp, mesh = self.config.dp, self.states.mesh
        return Updater(
            fragments,
            self._build,
            where=dp.offload,
            path=dp.path,
            device=mesh.device,
            rank=mesh.rank,
            copy=self.states.take,
            after=self.states.publish,
        )

    def _build(self, fragments: Sequence[Fragment]) -> torch.optim.Optimizer:
        return build_optimizer(fragments, self.config.optim)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All of them."""
        return [optimizer for updater in self._updaters.values() for optimizer in updater.optimizers]

    @property
    def updaters(self) -> list[Updater]:
        """One, or one a stage."""
        return list(self._updaters.values())

    def set_rate(self, rate: float) -> None:
        """The learning rate of the updates to come."""
        for updater in self.updaters:
            updater.set_rate(rate)

    def all(self) -> None:
        """Apply all gradients; weights are on their way to who holds them when this returns."""
        self._updaters[-1].step()

    def stage(self, stage: int) -> None:
        """Apply the gradients of one stage; its weights are everywhere when this returns."""
        if stage in self._updaters:
            self._updaters[stage].step()
            self.states.await_stage(stage)

    def refresh(self) -> None:
        """What optimisers hold was read from a checkpoint: bring it to all weights."""
        for updater in self.updaters:
            for unit in updater.visit():
                self.states.take(unit)
                self.states.publish(unit)

    def close(self) -> None:
        """Nothing is updated after this."""
        for updater in self.updaters:
            updater.close()


def _each(fragments: list[Fragment]) -> Generator[Fragment]:
    yield from fragments
