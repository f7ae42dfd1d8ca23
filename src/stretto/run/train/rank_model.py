"""One rank's share of a language model: its pipeline stages, what the optimisers update of them, and both as
a checkpoint sees them, every tensor under its plain-model name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import inf

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.engine.checkpoint.index import MODEL, OPTIM
from stretto.engine.checkpoint.shards import Tensors
from stretto.engine.compiler import Compiler
from stretto.engine.device import moved
from stretto.engine.documents import DocumentStarts
from stretto.engine.models.language import IGNORED
from stretto.engine.optim.build import build_optimizer
from stretto.engine.optim.norm import GradientNorm, finite
from stretto.engine.optim.rate import delay_ratio
from stretto.engine.optim.scale import LossScale
from stretto.engine.optim.sharded_optimizer import ShardedOptimizer
from stretto.engine.optim.states import state_tensors
from stretto.engine.parallel.collectives import all_max
from stretto.engine.parallel.control import gather_json
from stretto.engine.parallel.data.sharded import ShardedStates
from stretto.engine.parallel.data.unit import FlatParameter
from stretto.engine.parallel.expert.auxiliary import Auxiliary
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.replica_check import RankTensors
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.engine.pipeline import Pipeline, Recorder
from stretto.job.flops import layer_names
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.program.action import ActionKind
from stretto.program.program import Program
from stretto.run.train.agreement import StepReport


@dataclass(kw_only=True)
class RankModel:
    """This rank's share of the model and what updates it.

    Attributes:
        parameters, places: by plain-model name, as modules hold them; `places` knows which pieces are owned
            by this rank.
        states: the same, as data-parallel ranks share them out; `fragments` are what is updated here.
        norm: of all gradients, or None for an asynchronous schedule: a stage's gradients are applied and gone
            before other stages have computed theirs.
        samples: of each microbatch under way (`slots`), which dropout depends on.
        documents: of each microbatch, set before a step or an evaluation; empty if attention does not end
            with a document.
        decoders: of each microbatch, what the decoder after an encoder reads, and how many of the encoder's
            tokens are real; set before a step or an evaluation.
        split: which positions of a sample this rank holds.
        auxiliary: losses that layers add to the step's, and their statistics.
        auxiliary_scales: gradients of the losses that layers add in each microbatch under way.
        loss_scale: factor of the loss in float16.
        compiler: of the blocks, or None if nothing is compiled.
    """

    job: Job
    mesh: Mesh
    pipeline: Pipeline
    parameters: dict[str, nn.Parameter]
    places: dict[str, ShardPlacement]
    states: ShardedStates
    optimizer: StageOptimizers
    norm: GradientNorm | None
    samples: list[range]
    documents: list[DocumentStarts]
    decoders: list[tuple[Tensor, Tensor | None]]
    split: SequenceSplit
    auxiliary: Auxiliary
    auxiliary_scales: list[float]
    loss_scale: LossScale | None = None
    compiler: Compiler | None = None

    @property
    def shape(self) -> ModelShape:
        """The model's sizes, with the tokenizer's vocabulary."""
        return self.job.shape

    @cached_property
    def update_numbers(self) -> list[int]:
        """For each microbatch, the number within the step of the update that applies its gradient."""
        return update_numbers(self.pipeline.program)

    @property
    def asynchronous(self) -> bool:
        """Whether the step itself updates the weights."""
        return bool(self.pipeline.program.versions)

    def step(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        scale: Tensor,
        recorder: Recorder | None = None,
    ) -> Tensor | None:
        """Forward and backward of one batch, each microbatch as `share` returns it; see `Pipeline.step`.

        Args:
            scale: gradients of the losses, [microbatches].
        """
        self.auxiliary.reset()
        return self.pipeline.step(inputs, targets, self._scaled(scale, 0, self.loss_factor), recorder)

    def advance(
        self,
        load: Callable[[int], tuple[Sequence[Tensor], Sequence[Tensor], Tensor]],
        steps: int,
        factor: Callable[[int], float] | None = None,
        recorder: Recorder | None = None,
    ) -> Tensor | None:
        """One step further in a window of steps; see `Pipeline.advance`.

        Args:
            factor: loss scale of a step by its number in the window; by default the present one.
        """
        if self.pipeline.drained:
            self.auxiliary.reset()
        present = self.loss_factor

        def scaled(number: int) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
            inputs, targets, scale = load(number)
            return inputs, targets, self._scaled(scale, number, present if factor is None else factor(number))

        return self.pipeline.advance(scaled, steps, recorder)

    def _scaled(self, scale: Tensor, number: int, factor: float) -> Tensor:
        """The gradients of a step's losses, and of those that layers add to them, times the loss scale.

        Args:
            number: of the step in its window.
        """
        job, m = self.job, self.pipeline.program.microbatches
        # experts are balanced over all tokens, whether or not the loss counts them
        tokens = torch.full((m,), job.micro_batch * job.sequence * job.layout.dp, dtype=torch.float64)
        self.auxiliary_scales[self.slots(number)] = (
            loss_weights(self.update_numbers, tokens) * factor
        ).tolist()
        return scale * factor

    def slots(self, number: int) -> slice:
        """Slots of a step's microbatches in the ring buffers, by the step's number in its window."""
        m = self.pipeline.program.microbatches
        first = number * m % self.pipeline.ring
        return slice(first, first + m)

    def share(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's positions of samples [b, s] and their targets; padding has no target."""
        return self.split.take(inputs, 1, 0), self.split.take(targets, 1, IGNORED)

    @property
    def fragments(self) -> list[ParameterFragment]:
        """What this rank's optimisers update."""
        return self.states.fragments

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """One for all fragments, or several."""
        return self.optimizer.optimizers

    def gradients(self) -> list[Tensor]:
        """All reduced gradients of this rank, as few flat tensors."""
        return [flat for buffers in self.pipeline.buffers.values() for flat in buffers.flats]

    @property
    def loss_factor(self) -> float:
        """The loss scale, or 1 without one."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def set_rate(self, rate: float, step: int = 0, scale: float | None = None) -> None:
        """Set the learning rate of the next updates, in the step of this number from 0.

        Args:
            scale: loss scale of updates within the step; by default the present one.
        """
        if scale is None and self.loss_scale is not None:
            scale = self.loss_scale.value
        self.optimizer.set_rate(rate, step, scale)

    def gradient_norm(self) -> Tensor:
        """The norm of the step's gradients before clipping, without the loss scale: a float64 scalar, the
        same on every rank. Collective.
        """
        assert self.norm is not None, "an asynchronous schedule has updated already"
        return self.states.from_server(self.norm(self.loss_factor))

    @torch.no_grad()
    def first_bad_weight(self) -> str | None:
        """The name of the first weight of this rank that is not finite, or None."""
        weights = {n: p for n, p in self.parameters.items() if p.untyped_storage().size()}
        if finite(list(weights.values())):
            return None
        bad = (name for name, weight in weights.items() if not bool(weight.isfinite().all()))
        return next(bad, "a weight")  # if only its norm is too large

    def bad_weight(self) -> str | None:
        """Name and rank of the first weight in memory that is not finite, or None. Collective."""
        self.states.ready()  # what is still being gathered is unknown
        name = self.first_bad_weight()
        return name_on_ranks(None if name is None else (0, name))

    def loss_report(self, losses: Tensor | None) -> StepReport:
        """What this rank reports of the losses of its microbatches, [m], if it has the last stage."""
        if losses is None or not len(losses):
            return StepReport()
        pipeline = self.pipeline
        program = pipeline.program
        # a schedule such as dualpipe trains two copies of the model, and this rank has the losses of one;
        # an evaluation uses one copy for all microbatches
        copies = [stage // program.depth for stage in pipeline.stages if program.is_last(stage)]
        trained = [i for i, copy in enumerate(program.copy_of) if copy in copies]
        microbatches = trained if len(trained) == len(losses) else range(len(losses))
        bad = ~losses.isfinite()
        numbers = torch.tensor(microbatches, dtype=torch.float64) + 1.0
        first = torch.where(bad, moved(numbers, losses.device), inf).amin()
        total: float | Tensor = 0.0
        if self.mesh.index("tp") == 0:  # every tp rank computes the same loss
            total = torch.where(bad.any(), 0.0, losses.double().sum())
        return StepReport(loss=total, bad_microbatch=torch.where(bad.any(), first, 0.0))

    def refresh(self) -> None:
        """After a checkpoint was read into the optimisers: copy their values to all weights. Collective."""
        self.optimizer.refresh()

    def close(self) -> None:
        """Release communicators and offloaded memory."""
        self.optimizer.close()
        self.states.close()
        self.pipeline.close()
        self.mesh.close()
        if self.compiler is not None:
            self.compiler.close()


def tensors_of(model: RankModel) -> Tensors:
    """Parameters, in the precision of the optimiser if it updates them, and its states, to be written from or
    read into; weights that ranks are still sending each other have arrived.
    """
    model.states.ready()  # what the optimiser updates may be a part of the memory that is gathered into
    tensors = dict[str, tuple[Tensor, ShardPlacement]]()
    model.optimizer.ensure_states()
    for fragment in model.states.frozen:
        tensors[MODEL + fragment.name] = (fragment.parameter.detach(), fragment.counted)
    owners = (owner for sharded in model.optimizer.sharded for owner in sharded.owners())
    for optimizer, fragment in owners:
        tensors[MODEL + fragment.name] = (fragment.parameter.detach(), fragment.counted)
        for key, (value, place) in state_tensors(optimizer, fragment).items():
            tensors[f"{OPTIM}{key}.{fragment.name}"] = (value, place)
    return tensors


def replicated_tensors(model: RankModel) -> RankTensors:
    """Weights as the modules compute with them, and what the optimisers hold, by name with their places. If
    both are the same memory, it is listed once.
    """
    tensors = dict(tensors_of(model))
    for name, parameter in model.parameters.items():
        updated = tensors[MODEL + name][0] if MODEL + name in tensors else None
        complete = updated is not None and updated.numel() >= parameter.numel()  # not the first shard alone
        if updated is None or not complete or updated.data_ptr() != parameter.data_ptr():
            tensors[f"weights.{name}"] = parameter.detach(), model.places[name]
    return tensors


def prepare_optimizer(model: RankModel, weight_updates: int) -> None:
    """Give the optimisers the states they make at their first step, so that a checkpoint can be read into
    them."""
    for sharded in model.optimizer.sharded:
        sharded.prepare(weight_updates)


def update_numbers(program: Program) -> list[int]:
    """For each microbatch, the number within the step of the weight update that applies its gradient; all 0
    for a synchronous program, which updates once, after the step.
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


def loss_weights(numbers: Sequence[int], tokens: Tensor) -> Tensor:
    """The factor of each microbatch's loss, 1 over the tokens of the update that applies its gradient:
    [microbatches], on the device of `tokens`.

    Args:
        numbers: the update of each microbatch (`update_numbers`).
        tokens: tokens with a target in each microbatch, over all replicas; float64 [microbatches].
    """
    update = torch.tensor(numbers).to(tokens.device, non_blocking=True)
    totals = tokens.new_zeros(max(numbers) + 1).index_add_(0, update, tokens)
    total = totals.index_select(0, update)
    # an update without tokens has no gradient either
    return 1.0 / torch.where(total > 0, total, 1.0)


BadGradient = tuple[int, str]
"""How near its layer is to the loss, and the name, of a gradient that is not finite."""


def bad_gradient(states: ShardedStates, shape: ModelShape, stages: Iterable[int]) -> BadGradient | None:
    """Among the gradients of some stages that were not finite as this rank computed them, the nearest to the
    loss, where the backward begins. A gradient that became so in the sum over ranks has nearness 0.
    """
    name_of, layers = {id(p): name for name, p in states.parameters.items()}, layer_names(shape)

    def depth(name: str) -> int:
        return next((i for i, layer in enumerate(layers, 1) if name.startswith(f"{layer}.")), 1)

    computed = [name_of[id(p)] for s in stages if s in states.buffers for p in states.buffers[s].own_bad()]
    if computed:
        order = {name: i for i, name in enumerate(states.parameters)}
        name = max(computed, key=lambda name: (depth(name), order[name]))
        return depth(name), name
    units = {unit.number for s in stages for unit in states.units[s]}
    reduced = ((f.name, f.gradient) for f in states.fragments if f.unit in units)
    bad = next((name for name, g in reduced if g is not None and not bool(g.isfinite().all())), None)
    return None if bad is None else (0, f"{bad}, once summed over ranks,")


def name_on_ranks(named: BadGradient | None) -> str | None:
    """Name and rank of the tensor nearest to the loss among those that ranks name, the first rank's of
    several; None if no rank names one. Collective.
    """
    ranks = [(rank, *entry) for rank, entry in enumerate(gather_json(named)) if entry is not None]
    if not ranks:
        return None
    rank, _, name = max(ranks, key=lambda entry: entry[1])
    return f"{name} on rank {rank}"


Values = Callable[[str, tuple[int, ...]], Tensor]
_ALL_STAGES = -1


class StageOptimizers:
    """Updates a rank's fragments: all at once after the step, or stage by stage within it.

    Attributes:
        eager: units are updated during the backward, as soon as their gradients are reduced.
        overflowed: this rank skipped an update within the step because its gradients were not finite.
        refused: the gradient that `bad_gradient` names for that update; not looked for in float16.

    Args:
        together: if gradients are not finite on one rank, no rank updates: an update begins only when all
            ranks that share it know of its gradients. Otherwise a rank whose own gradients are not finite
            skips the update and others may not, after which the run has to stop.
    """

    def __init__(self, states: ShardedStates, job: Job, together: bool = False) -> None:
        self.states, self.job = states, job
        self._by_stage = dict[int, ShardedOptimizer]()  # or a single one for _ALL_STAGES
        # the rules allow rescheduling only if stages are updated one by one
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
        """Make the optimisers, once the stages exist.

        Args:
            values: initial values by plain name and shape, or None if a checkpoint follows.
            elsewhere: ids of parameters whose first copy is on another rank.
            by_stage: each stage is updated separately.
        """
        states = self.states

        def local(name: str) -> Tensor:
            assert values is not None
            return states.local_values(name, values(name, states.places[name].shape))

        fragments = states.begin(None if values is None else local, elsewhere)
        if not by_stage:
            self._by_stage[_ALL_STAGES] = self._sharded(fragments)
            return
        self.eager = False
        layout = states.mesh.layout
        self._holders = states.mesh.partition(lambda rank: layout.index(rank, "pp"))
        self._stage_of |= {unit.number: stage for stage, units in states.units.items() for unit in units}
        for stage, group in groupby(fragments, lambda fragment: self._stage_of[fragment.unit]):
            self._by_stage[stage] = self._sharded(list(group))

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
            changing: ids of parameters whose gradients are summed further after the data-parallel reduction.
        """
        if not self.offloaded or _ALL_STAGES not in self._by_stage:
            return
        sharded = self._by_stage[_ALL_STAGES]

        def reduced(unit: FlatParameter) -> None:
            if not any(id(p) in changing for p in unit.parameters):
                sharded.gradient_ready(unit.number)

        for buffer in self.states.buffers.values():
            buffer.report_to(reduced)

    def _build(self, fragments: Sequence[ParameterFragment]) -> torch.optim.Optimizer:
        return build_optimizer(fragments, self.job.optimiser)

    @property
    def offloaded(self) -> bool:
        """Whether states are not on the device."""
        return self.job.dp.offload != "none"

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Torch's optimisers inside, all of them."""
        return [optimizer for sharded in self._by_stage.values() for optimizer in sharded.optimizers]

    @property
    def sharded(self) -> list[ShardedOptimizer]:
        """One, or one a stage."""
        return list(self._by_stage.values())

    def set_rate(self, rate: float, step: int, scale: float | None = None) -> None:
        """Set the learning rate of the next updates; before a step whose updates are `eager`.

        Args:
            step: its number from 0, on which the share of it depends at which late stages of an asynchronous
                pipeline learn.
            scale: loss scale of updates within the step, or None if losses are not scaled.
        """
        self._scale = scale
        steps = self.job.optimiser.rate.rescheduling_steps
        for stage, sharded in self._by_stage.items():
            share = 1.0 if steps is None else delay_ratio(step, self._delays[stage], steps)
            sharded.set_rate(rate * share)

    def step_stage(self, stage: int) -> None:
        """Apply the gradients of one stage; all ranks have its weights when this returns. An update whose
        gradients are not finite is counted but skipped, by all ranks of the stage if they skip together.
        """
        if self._overflows(stage):
            self.overflowed = True
            if self._scale is None and self.refused is None:
                self.refused = bad_gradient(self.states, self.job.shape, [stage])
            if stage in self._by_stage:
                self._by_stage[stage].skip()
        elif stage in self._by_stage:
            self._by_stage[stage].step(ratio=1.0 if self._scale is None else 1.0 / self._scale)
            self.states.await_stage(stage)

    def _overflows(self, stage: int) -> bool:
        """Whether a reduced gradient of the stage is not finite: on any of its ranks, which is collective, if
        they skip together; otherwise on this rank.
        """
        buffer = self.states.buffers.get(stage)
        bad = buffer is not None and not finite(buffer.flats)
        if not self._together:
            return bad
        return bool(all_max(torch.full((1,), float(bad), device=self.states.mesh.device), self._holders))

    def ensure_states(self) -> None:
        """Create the states that no update has created yet, so that a checkpoint has them."""
        for sharded in self.sharded:
            if not any(optimizer.state for optimizer in sharded.optimizers):
                sharded.prepare(0)

    def refresh(self) -> None:
        """After a checkpoint was read into what the optimisers hold: copy it to all weights."""
        for sharded in self.sharded:
            for unit in sharded.visit():
                self.states.copy_masters(unit)
                self.states.publish(unit)

    def close(self) -> None:
        """Nothing is updated after this."""
        for sharded in self.sharded:
            sharded.close()
