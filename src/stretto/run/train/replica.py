"""A replica as a checkpoint sees it: every tensor under its plain-model name, with its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn

from stretto.engine.checkpoint.index import MODEL, OPTIM
from stretto.engine.checkpoint.shards import Tensors
from stretto.engine.compiler import Compiler
from stretto.engine.documents import DocumentStarts
from stretto.engine.models.language import IGNORED
from stretto.engine.optim.norm import GradientNorm, ratio
from stretto.engine.optim.scale import LossScale
from stretto.engine.optim.states import state_tensors
from stretto.engine.parallel.data.sharded import ShardedStates
from stretto.engine.parallel.expert.auxiliary import Auxiliary
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.engine.pipeline import Pipeline, Recorder
from stretto.run.train.optimizer import ReplicaOptimizer, scales, update_numbers
from stretto.spec.job import Job
from stretto.spec.shape import ModelShape


@dataclass(kw_only=True)
class Replica:
    """This rank's share of the model and what updates it.

    parameters, places: by plain-model name, as modules hold them; `places` knows which pieces are owned here.
    states: the same, as data-parallel ranks share them out; `fragments` are what is updated here.
    norm: None for an asynchronous schedule: a stage's gradients are applied and gone before other stages
        have computed theirs.
    samples: of each microbatch under way (`place`): what dropout depends on.
    documents: the same, set before a step or an evaluation; none where attention does not end at a
        document's.
    decoders: of each microbatch, what the decoder beside an encoder reads, and how many of the encoder's
        tokens are real; set before a step or an evaluation.
    split: which positions of a sample this rank holds.
    auxiliary: losses that layers add to the step's, and their statistics.
    auxiliary_scales: gradients of the losses that layers add in each microbatch under way.
    loss_scale: with float16, the factor of the loss.
    compiler: of the blocks; None where nothing is compiled.
    """

    job: Job
    mesh: Mesh
    pipeline: Pipeline
    parameters: dict[str, nn.Parameter]
    places: dict[str, ShardPlacement]
    states: ShardedStates
    optimizer: ReplicaOptimizer
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

    def step(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        scale: Tensor,
        recorder: Recorder | None = None,
    ) -> Tensor | None:
        """Forward and backward of one batch, each microbatch as `share` gives it; see `Pipeline.step`.

        Args:
            scale: gradients of the losses, [microbatches].
        """
        self.auxiliary.reset()
        return self.pipeline.step(inputs, targets, self._scaled(scale, 0, self._factor), recorder)

    def advance(
        self,
        enter: Callable[[int], tuple[Sequence[Tensor], Sequence[Tensor], Tensor]],
        steps: int,
        factor: Callable[[int], float] | None = None,
        recorder: Recorder | None = None,
    ) -> Tensor | None:
        """One step further in a window of steps; see `Pipeline.advance`.

        Args:
            factor: from the number of a step in the window to its loss scale; None: all have the present one.
        """
        if self.pipeline.drained:
            self.auxiliary.reset()
        present = self._factor

        def scaled(number: int) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
            inputs, targets, scale = enter(number)
            return inputs, targets, self._scaled(scale, number, present if factor is None else factor(number))

        return self.pipeline.advance(scaled, steps, recorder)

    def _scaled(self, scale: Tensor, number: int, factor: float) -> Tensor:
        """The gradients of a step's losses, and of those that layers add to them, with the loss scale.

        Args:
            number: of the step in its window.
            factor: the loss scale.
        """
        job, program = self.job, self.pipeline.program
        m = program.microbatches
        # experts are balanced over all tokens, whether or not the loss counts them
        tokens = torch.full((m,), job.micro_batch * job.sequence * job.layout.dp, dtype=torch.float64)
        self.auxiliary_scales[self.place(number)] = (
            scales(update_numbers(program), tokens) * factor
        ).tolist()
        return scale * factor

    def place(self, number: int) -> slice:
        """Where what is known of each microbatch of a step is kept, by the step's number in its window."""
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
    def asynchronous(self) -> bool:
        """Whether the step itself updates the weights."""
        return bool(self.pipeline.program.versions)

    def set_rate(self, rate: float, step: int = 0, scale: float | None = None) -> None:
        """The learning rate of the updates to come, in the step of this number from 0.

        Args:
            scale: the loss scale of updates within the step; None: the present one.
        """
        if scale is None and self.loss_scale is not None:
            scale = self.loss_scale.value
        self.optimizer.set_rate(rate, step, scale)

    def gradient_norm(self) -> Tensor:
        """The norm of the step's gradients before clipping, without the loss scale: a float64 scalar, the
        same on every rank. Collective.
        """
        assert self.norm is not None, "an asynchronous schedule has updated already"
        return self.states.from_server(self.norm(self._factor))

    def update(self, rate: float, norm: float) -> None:
        """Clip and apply the gradients at learning rate `rate`.

        Nothing is applied where the norm is not finite; with float16 the loss scale takes note.

        Args:
            norm: what `gradient_norm` returned.
        """
        factor = ratio(norm, self.job.optimiser.clip, self._factor)
        if self.loss_scale is not None:
            self.loss_scale.update(not isfinite(norm))
        if not isfinite(norm):
            return
        if not self.optimizer.eager:  # else they have begun, at the rate that was set before
            self.set_rate(rate)
        if self.optimizer.offloaded:  # copies of the gradients are on their way already
            self.optimizer.step(factor)
        else:
            gradients = self.gradients()
            if factor != 1.0 and gradients:
                torch._foreach_mul_(gradients, factor)
            self.optimizer.step()

    @property
    def _factor(self) -> float:
        """The loss scale; 1 without one."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

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


def tensors_of(replica: Replica) -> Tensors:
    """Parameters, in the precision of the optimiser if it updates them, and its states, to be written from or
    read into; weights that ranks are still sending each other have arrived.
    """
    replica.states.ready()  # what the optimiser updates may be a part of the memory that is gathered into
    tensors = dict[str, tuple[Tensor, ShardPlacement]]()
    replica.optimizer.ensure_states()
    for fragment in replica.states.frozen:
        tensors[MODEL + fragment.name] = (fragment.parameter.detach(), fragment.counted)
    owners = (owner for sharded in replica.optimizer.sharded for owner in sharded.owners())
    for optimizer, fragment in owners:
        tensors[MODEL + fragment.name] = (fragment.parameter.detach(), fragment.counted)
        for key, (value, place) in state_tensors(optimizer, fragment).items():
            tensors[f"{OPTIM}{key}.{fragment.name}"] = (value, place)
    return tensors


def prepare_optimizer(replica: Replica, weight_updates: int) -> None:
    """Give the optimisers the states they make at their first step, so that a checkpoint can be read into
    them."""
    for sharded in replica.optimizer.sharded:
        sharded.prepare(weight_updates)
