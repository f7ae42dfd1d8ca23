"""The update of what this rank's optimisers hold, after a step or in the middle of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from stretto.engine.optim.build import build_optimizer
from stretto.engine.optim.updater import Updater
from stretto.engine.parallel.data.sharded import ShardedStates
from stretto.engine.parallel.data.unit import Unit
from stretto.engine.parallel.fragment import Fragment
from stretto.program.action import Kind
from stretto.program.program import Program
from stretto.run.config.schema import TrainConfig


def update_of(program: Program) -> list[int]:
    """For each microbatch, the number of the update that applies its gradient; all 0 for a synchronous
    program, whose one update follows it.
    """
    found = [0] * program.microbatches
    if not program.versions:
        return found
    last = program.depth - 1  # the stages agree: an update is the same microbatches everywhere
    updates = 0
    for stage, kind, i in program.orders[program.placement[last]]:
        if stage != last:
            continue
        if kind is Kind.UPDATE:
            updates += 1
        elif kind in (Kind.B, Kind.W) and i is not None:
            found[i] = updates
    return found


def scales(updates: Sequence[int], tokens: Sequence[float]) -> list[float]:
    """What the loss of each microbatch is multiplied by: 1 over the tokens of its update.

    Args:
        updates: of each microbatch, as `update_of` has them.
        tokens: of each microbatch, those that count, over all replicas.
    """
    whole: dict[int, float] = {}
    for update, count in zip(updates, tokens, strict=True):
        whole[update] = whole.get(update, 0.0) + count
    # where nothing counts there is no gradient either
    return [1.0 / (whole[update] or 1.0) for update in updates]


Values = Callable[[str, tuple[int, ...]], Tensor]


class Updates:
    """Optimisers over the fragments of a rank: one updater for all, or one for each stage where a schedule
    updates each by itself.
    """

    def __init__(self, states: ShardedStates, config: TrainConfig) -> None:
        self.states, self.config = states, config
        self._updaters = dict[int, Updater]()  # by stage; -1: of all
        # a unit may be updated beside the backward where its rule looks at nothing else
        alone = config.optim.clip is None and config.train.dtype != "float16"
        self.eager = config.dp.offload != "none" and alone and config.optim.name in ("adamw", "sgd")

    def begin(self, values: Values | None, elsewhere: frozenset[int], by_stage: bool) -> None:
        """Make the optimisers, once the stages are there.

        Args:
            values: initial values by plain name and shape; None: a checkpoint follows.
            elsewhere: by id, parameters whose first copy is on another rank.
            by_stage: each stage is updated by itself.
        """
        states = self.states

        def own(name: str) -> Tensor:
            assert values is not None
            return states.own_part(name, values(name, states.places[name].shape))

        fragments = states.begin(None if values is None else own, elsewhere)
        if not by_stage:
            self._updaters[-1] = self._updater(fragments)
            return
        self.eager = False
        stage_of = {unit.number: stage for stage, units in self.states.units.items() for unit in units}
        for stage, group in groupby(fragments, lambda fragment: stage_of[fragment.unit]):
            self._updaters[stage] = self._updater(_each(list(group)))

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
            eager=self.eager,
        )

    def listen(self, changing: frozenset[int]) -> None:
        """Let states that are away follow the reductions.

        Args:
            changing: by id, parameters whose gradients are added up further once they are reduced.
        """
        if self.config.dp.offload == "none" or -1 not in self._updaters:
            return
        updater = self._updaters[-1]

        def told(unit: Unit) -> None:
            if not any(id(p) in changing for p in unit.parameters):
                updater.gradient_ready(unit.number)

        for buffer in self.states.buffers.values():
            buffer.on_reduced = told

    def _build(self, fragments: Sequence[Fragment]) -> torch.optim.Optimizer:
        return build_optimizer(fragments, self.config.optim)

    @property
    def away(self) -> bool:
        """Whether states are not on the device."""
        return self.config.dp.offload != "none"

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All of them."""
        return [optimizer for updater in self._updaters.values() for optimizer in updater.optimizers]

    @property
    def updaters(self) -> list[Updater]:
        """One, or one a stage."""
        return list(self._updaters.values())

    def set_rate(self, rate: float) -> None:
        """The learning rate of the updates to come; to be set before a step whose updates are `eager`."""
        for updater in self.updaters:
            updater.set_rate(rate)

    def all(self, ratio: float = 1.0) -> None:
        """Apply all gradients; weights are on their way to who holds them when this returns.

        Args:
            ratio: factor of all gradients.
        """
        self._updaters[-1].step(ratio=ratio)

    def stage(self, stage: int) -> None:
        """Apply the gradients of one stage; its weights are everywhere when this returns."""
        if stage in self._updaters:
            self._updaters[stage].step()
            self.states.await_stage(stage)

    def ensure_states(self) -> None:
        """Make the states that no update has made yet, so that a checkpoint has them."""
        for updater in self.updaters:
            if not any(optimizer.state for optimizer in updater.optimizers):
                updater.prepare(0)

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
