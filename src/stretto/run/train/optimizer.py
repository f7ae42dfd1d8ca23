"""The optimiser of a replica: one for all of a rank's fragments, or one for each stage within the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.optim.build import build_optimizer
from stretto.engine.optim.norm import finite
from stretto.engine.optim.rate import delay_ratio
from stretto.engine.optim.sharded_optimizer import ShardedOptimizer
from stretto.engine.parallel.collectives import all_max
from stretto.engine.parallel.data.sharded import ShardedStates
from stretto.engine.parallel.data.unit import FlatParameter
from stretto.engine.parallel.fragment import ParameterFragment
from stretto.program.action import ActionKind
from stretto.program.program import Program
from stretto.spec.flops import layer_names
from stretto.spec.job import Job
from stretto.spec.shape import ModelShape


def update_numbers(program: Program) -> list[int]:
    """For each microbatch, the number within the step of the weight update that applies its gradient; all 0
    for a synchronous program, whose one update follows it.
    """
    numbers = [0] * program.microbatches
    if not program.versions:
        return numbers
    last = program.depth - 1  # the stages agree: an update is the same microbatches everywhere
    number = 0
    for stage, kind, i in program.orders[program.placement[last]]:
        if stage != last:
            continue
        if kind is ActionKind.UPDATE:
            number += 1
        elif kind in (ActionKind.B, ActionKind.W) and i is not None:
            numbers[i] = number
    return numbers


def scales(numbers: Sequence[int], tokens: Tensor) -> Tensor:
    """The factor of each microbatch's loss: 1 over the tokens of the update that applies its gradient;
    [microbatches], where `tokens` is.

    Args:
        numbers: of each microbatch's update (`update_numbers`).
        tokens: of each microbatch, those that have a target, over all replicas; float64 [microbatches].
    """
    update = torch.tensor(numbers).to(tokens.device, non_blocking=True)
    totals = tokens.new_zeros(max(numbers) + 1).index_add_(0, update, tokens)
    total = totals.index_select(0, update)
    # an update without tokens has no gradient either
    return 1.0 / torch.where(total > 0, total, 1.0)


BadGradient = tuple[int, str]
"""The name of a gradient that is not finite, and how near its layer is to the loss."""


def bad_gradient(states: ShardedStates, shape: ModelShape, stages: Iterable[int]) -> BadGradient | None:
    """Of the gradients of some stages that were not finite as this rank computed them the one nearest to the
    loss, where the backward begins; 0 stands for one that is not finite since it was summed with others'.
    """
    name_of, layers = {id(p): name for name, p in states.parameters.items()}, layer_names(shape)

    def depth(name: str) -> int:
        return next((at for at, layer in enumerate(layers, 1) if name.startswith(f"{layer}.")), 1)

    computed = [name_of[id(p)] for s in stages if s in states.buffers for p in states.buffers[s].own_bad()]
    if computed:
        order = {name: at for at, name in enumerate(states.parameters)}
        name = max(computed, key=lambda name: (depth(name), order[name]))
        return depth(name), name
    units = {unit.number for s in stages for unit in states.units[s]}
    reduced = ((f.name, f.gradient) for f in states.fragments if f.unit in units)
    bad = next((name for name, g in reduced if g is not None and not bool(g.isfinite().all())), None)
    return None if bad is None else (0, f"{bad}, once summed over ranks,")


Values = Callable[[str, tuple[int, ...]], Tensor]
_ALL_STAGES = -1


class ReplicaOptimizer:
    """Updates a rank's fragments: all at once after the step, or stage by stage within it.

    Attributes:
        eager: units are updated beside the backward, as soon as their gradients are reduced.
        overflowed: within the step an update was skipped here, for its gradients were not finite.
        refused: of such an update, what `bad_gradient` names; with float16 it is not looked for.

    Args:
        together: where gradients are not finite on one rank, none updates: no update begins before all ranks
            that share it know of its gradients. Else a rank whose own gradients are not finite does not
            update, and the others may: the run is to stop then.
    """

    def __init__(self, states: ShardedStates, job: Job, together: bool = False) -> None:
        self.states, self.job = states, job
        self._of = dict[int, ShardedOptimizer]()  # by stage, or one for _ALL_STAGES
        # the rules refuse rescheduling but where stages are updated one by one
        self._delays = () if job.optimiser.rate.rescheduling_steps is None else job.delays()
        self._scale: float | None = None  # of the losses of the updates within the step
        self._holders: ProcessGroup | None = None  # of the stages here
        self._stage_of = dict[int, int]()  # by number of a unit
        self.overflowed = False
        self.refused: BadGradient | None = None
        self._together = together or job.precision.dtype == "float16"
        # an update that needs only its unit's gradients: neither clipping nor the search for overflows
        independent = job.optimiser.clip is None and not self._together
        # parameters in files hold one of few blocks of memory from their update until all ranks have them,
        # which the updating thread cannot wait for
        at_hand = job.dp.offload_parameters != "nvme"
        self.eager = self.offloaded and independent and at_hand and job.optimiser.name in ("adamw", "sgd")

    def begin(self, values: Values | None, elsewhere: frozenset[int], by_stage: bool) -> None:
        """Make the optimisers, once the stages are there.

        Args:
            values: initial values by plain name and shape; None: a checkpoint follows.
            elsewhere: by id, parameters whose first copy is on another rank.
            by_stage: each stage is updated separately.
        """
        states = self.states

        def local(name: str) -> Tensor:
            assert values is not None
            return states.local_values(name, values(name, states.places[name].shape))

        fragments = states.begin(None if values is None else local, elsewhere)
        if not by_stage:
            self._of[_ALL_STAGES] = self._sharded(fragments)
            return
        self.eager = False
        layout = states.mesh.layout
        self._holders = states.mesh.partition(lambda rank: layout.index(rank, "pp"))
        self._stage_of |= {unit.number: stage for stage, units in states.units.items() for unit in units}
        for stage, group in groupby(fragments, lambda fragment: self._stage_of[fragment.unit]):
            self._of[stage] = self._sharded(list(group))

    def _sharded(self, fragments: Iterable[ParameterFragment]) -> ShardedOptimizer:
        dp, mesh = self.job.dp, self.states.mesh
        return ShardedOptimizer(
            fragments,
            self._build,
            offload=dp.offload,
            path=dp.path,
            device=mesh.device,
            rank=mesh.rank,
            copy=self.states.copy_masters,
            after=self.states.publish,
            eager=self.eager,
        )

    def follow_reductions(self, changing: frozenset[int]) -> None:
        """Start the transfers (and with `eager` the update) of offloaded states as gradients are reduced.

        Args:
            changing: by id, parameters whose gradients are summed further after the data-parallel reduction.
        """
        if not self.offloaded or _ALL_STAGES not in self._of:
            return
        sharded = self._of[_ALL_STAGES]

        def reduced(unit: FlatParameter) -> None:
            if not any(id(p) in changing for p in unit.parameters):
                sharded.gradient_ready(unit.number)

        for buffer in self.states.buffers.values():
            buffer.on_reduced = reduced

    def _build(self, fragments: Sequence[ParameterFragment]) -> torch.optim.Optimizer:
        return build_optimizer(fragments, self.job.optimiser)

    @property
    def offloaded(self) -> bool:
        """Whether states are not on the device."""
        return self.job.dp.offload != "none"

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Torch's optimisers inside, all of them."""
        return [optimizer for sharded in self._of.values() for optimizer in sharded.optimizers]

    @property
    def sharded(self) -> list[ShardedOptimizer]:
        """One, or one a stage."""
        return list(self._of.values())

    def set_rate(self, rate: float, step: int, scale: float | None = None) -> None:
        """The learning rate of the updates to come; set it before a step whose updates are `eager`.

        Args:
            step: its number from 0, by which late stages of an asynchronous pipeline learn at a share of it.
            scale: the loss scale of updates within the step; None: losses are not scaled.
        """
        self._scale = scale
        steps = self.job.optimiser.rate.rescheduling_steps
        for stage, sharded in self._of.items():
            share = 1.0 if steps is None else delay_ratio(step, self._delays[stage], steps)
            sharded.set_rate(rate * share)

    def step(self, ratio: float = 1.0) -> None:
        """Apply all gradients; weights are on their way to the ranks that hold them when this returns.

        Args:
            ratio: factor of all gradients.
        """
        self._of[_ALL_STAGES].step(ratio=ratio)

    def step_stage(self, stage: int) -> None:
        """Apply the gradients of one stage; its weights are everywhere when this returns. An update whose
        gradients are not finite is counted, but skipped: by all ranks of the stage, if they skip together.
        """
        if self._overflows(stage):
            self.overflowed = True
            if self._scale is None and self.refused is None:
                self.refused = bad_gradient(self.states, self.job.shape, [stage])
            if stage in self._of:
                self._of[stage].skip()
        elif stage in self._of:
            self._of[stage].step(ratio=1.0 if self._scale is None else 1.0 / self._scale)
            self.states.await_stage(stage)

    def _overflows(self, stage: int) -> bool:
        """Whether a reduced gradient of the stage is not finite: on any of its ranks, collectively; unless
        they skip together, on this one.
        """
        buffer = self.states.buffers.get(stage)
        bad = buffer is not None and not finite(buffer.flats)
        if not self._together:
            return bad
        return bool(all_max(torch.full((1,), float(bad), device=self.states.mesh.device), self._holders))

    def ensure_states(self) -> None:
        """Make the states that no update has made yet, so that a checkpoint has them."""
        for sharded in self.sharded:
            if not any(optimizer.state for optimizer in sharded.optimizers):
                sharded.prepare(0)

    def refresh(self) -> None:
        """After reading a checkpoint into what the optimisers hold: bring it to all weights."""
        for sharded in self.sharded:
            for unit in sharded.visit():
                self.states.copy_masters(unit)
                self.states.publish(unit)

    def close(self) -> None:
        """Nothing is updated after this."""
        for sharded in self.sharded:
            sharded.close()
