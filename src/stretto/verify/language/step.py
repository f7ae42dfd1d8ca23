"""Training's own steps on the samples of a trial: read one by one, or as training makes them.

Reading a tensor waits for it, and so hides a layer that fails to wait for its updated weights. Therefore some
steps are made with nothing read between them, and weights are compared once, after the last. The result must
not depend on when messages arrive either: these steps are made with every message and every thread delayed
(`engine.parallel.late`), and must reach the same bits as without the delay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf

import torch
from torch import Tensor

from stretto.engine.offload.tensor_files import at_hand
from stretto.engine.optim.scale import LossScale
from stretto.engine.parallel.control import gather_json
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement, TensorBox
from stretto.engine.parallel.late import delay_messages
from stretto.job.finetune import is_router_correction
from stretto.run.data.dataset import Batch
from stretto.run.launch.failure import TrainingFailed
from stretto.run.train.async_step import AsyncTrainer
from stretto.run.train.language_task import LanguageTask, TextProgress
from stretto.run.train.rank_model import RankModel
from stretto.run.train.task import StepResult
from stretto.run.train.trainer import Trainer
from stretto.verify.compare import (
    TOLERANCE,
    Comparison,
    Quantity,
    Snapshot,
    misplaced,
    relative,
    worst_quantities,
)
from stretto.verify.evidence import Verdict
from stretto.verify.language.reference import Trial

SCALE = 2.0**10  # of the loss, to exercise the path of float16: a power of two changes no bit


class TrialSamples:
    """The samples of a trial, by the index that training gives them."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._all = Batch.concatenated(batches)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return some of them."""
        return self._all.take(list(indices))


class TrialTask(LanguageTask):
    """Training's task on the samples of a trial.

    Attributes:
        observed: read the gradients of a step before it updates.
        gradients: of the last step that was observed, without the loss scale.
    """

    def __init__(self, model: RankModel, trial: Trial) -> None:
        super().__init__(model, TrialSamples(trial.batches), trial.rate(model.job))
        self.observed = False
        self.gradients = PlacedTensors({}, {})

    def update(self, step: int, norm: float | None, apply: bool) -> None:
        """As training; the gradients are kept before, if they are observed."""
        if self.observed:
            self.gradients = gradients_of(self.model, self.model.loss_factor)
        super().update(step, norm, apply)

    def scale_losses(self) -> bool:
        """Scale the loss as float16 does, if this model could train in float16; returns whether it does."""
        if self.model.optimizer.eager:
            return False
        self.model.loss_scale = LossScale(value=SCALE)
        return True


class TrialAsyncTrainer(AsyncTrainer):
    """Training with an asynchronous schedule that drains before the steps `drains`, from 0, and otherwise
    after each step.
    """

    drains: Sequence[int] = ()

    def next_drain(self, step: int) -> int:
        """The next of these steps."""
        return next((drain for drain in self.drains if drain > step), step + 1)


def trial_trainer(task: TrialTask, first: int = 0, drains: Sequence[int] = ()) -> Trainer:
    """Training's own trainer for a trial.

    Args:
        first: the step to begin with, from 0; the model has made those before.
        drains: steps before which an asynchronous schedule drains.
    """
    progress = TextProgress(step=first, samples=first * task.global_batch)
    if not task.model.asynchronous:
        return Trainer(task, progress)
    trainer = TrialAsyncTrainer(task, progress)
    trainer.drains = drains
    return trainer


def loss_of(done: StepResult) -> float:
    """The loss of a step with what layers add to it."""
    return done.loss + (done.agreed.statistic("experts") or 0.0)


def worst(norms: Sequence[float], reference: Sequence[Snapshot]) -> list[float]:
    """Return the norm of the ranks that is farthest off, by step. Collective."""
    everywhere: list[list[float]] = gather_json(list(norms))
    of_steps = zip(zip(*everywhere, strict=True), reference, strict=True)
    return [max(ranks, key=lambda norm: relative(norm, expected.norm)) for ranks, expected in of_steps]


def gradients_of(replica: RankModel, factor: float = 1.0) -> PlacedTensors:
    """The reduced gradients of what this rank's optimiser updates, over `factor`; zero where it has none."""
    gradients = PlacedTensors({}, {})
    for fragment in replica.fragments:
        gradient = fragment.gradient
        gradients.add(
            fragment, torch.zeros_like(fragment.parameter) if gradient is None else gradient / factor
        )
    return gradients


def masters_of(replica: RankModel) -> PlacedTensors:
    """The values that this rank's optimiser updates, by plain name, with what norm and checkpoints count."""
    masters = PlacedTensors({}, {})
    for fragment in replica.fragments:
        masters.add(fragment, at_hand(fragment.parameter.detach()).clone())  # files give one at a time
    return masters


def own_part(weights: Mapping[str, Tensor], replica: RankModel) -> PlacedTensors:
    """Of the weights that modules compute with, what this rank's own optimiser updates; as whole tensors."""
    updated = PlacedTensors({}, {})
    for fragment in replica.fragments:
        name, shape = fragment.name, fragment.placed.shape
        full = torch.zeros(shape, dtype=weights[name].dtype)
        for piece in replica.places[name].pieces:
            piece.of_full(full).copy_(piece.of_local(weights[name]))
        boxes = [TensorBox(offsets=p.offsets, sizes=p.sizes, local=p.offsets) for p in fragment.placed.pieces]
        updated.add(fragment, full)
        updated.places[name] = ShardPlacement(name, shape, tuple(boxes))
    return updated


@dataclass
class PlacedTensors:
    """Tensors by plain name, and where they lie."""

    tensors: dict[str, Tensor]
    places: dict[str, ShardPlacement]

    def add(self, fragment: ParameterFragment, tensor: Tensor) -> None:
        """Add the tensor of a fragment."""
        self.tensors[fragment.name], self.places[fragment.name] = tensor, fragment.counted


def wrongly_held(replica: RankModel, reference: Mapping[str, Tensor]) -> dict[str, str]:
    """What is wrong with who holds and counts what: of the optimisers' values, once in each copy of the
    states, of the weights, once in each copy of them, and of what checkpoints write of frozen weights, once
    in each copy of their shards. Collective.
    """
    masters, frozen = masters_of(replica), PlacedTensors({}, {})
    for fragment in replica.states.frozen:
        frozen.add(fragment, fragment.parameter)
    trained = {name: weight for name, weight in reference.items() if replica.job.trained(name)}
    sharded = {
        n: weight for n, weight in reference.items() if n not in trained and not is_router_correction(n)
    }

    def copies(over: str) -> int:
        return copies_of(replica, over)[0]

    return {
        **misplaced(replica.parameters, replica.places, reference, copies),
        **misplaced(
            frozen.tensors,
            frozen.places,
            sharded,
            lambda over: copies(over) // replica.states.sizes.for_copies(copies(over)).parameters,
        ),
        **misplaced(masters.tensors, masters.places, trained, lambda over: copies_of(replica, over)[1]),
    }


def copies_of(replica: RankModel, over: str) -> tuple[int, int]:
    """Return the numbers of copies of parameters that are split over these axes, and of their states."""
    mesh, states = replica.mesh, replica.states
    copies = mesh.layout.world // (mesh.size(over) * mesh.size("pp"))
    of_states = 1 if states.dp.mode == "server" else copies // states.sizes.for_copies(copies).states
    return copies, of_states


Fresh = Callable[[], AbstractContextManager[RankModel]]  # a new replica, closed at the end


@dataclass(kw_only=True)
class Ran:
    """The results of steps; the same on every rank but for `bits`.

    Attributes:
        late: True if messages were late.
        losses, norms: relative errors by step.
        weights: after the last step; None if a step failed.
        bits: a digest of what this rank has computed.
        failure: why a step failed.
        broken: how messages were used wrongly, on any rank.
    """

    late: bool = False
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    weights: Comparison | None = None
    bits: str = ""
    failure: str | None = None
    broken: list[str] = field(default_factory=list[str])

    def equal(self, tolerance: float) -> bool:
        """True if all errors are within the tolerance and no message was used wrongly."""
        complete = self.failure is None and self.weights is not None and not self.broken
        return complete and all(quantity.equal for quantity in self.quantities(tolerance))

    def quantities(self, tolerance: float) -> list[Quantity]:
        """Return the largest errors; they are infinite if a step failed."""
        weights = self.weights
        return [
            Quantity("loss", max(self.losses) if weights is not None else inf, tolerance),
            Quantity("gradients", None, tolerance),
            Quantity("norm", max(self.norms, default=None), tolerance),
            Quantity("weights", inf, tolerance)
            if weights is None
            else weights.quantity("weights", tolerance),
        ]

    @property
    def wrong_use(self) -> str | None:
        """How messages were used wrongly, in words."""
        more = f", and {len(self.broken) - 1} more" if len(self.broken) > 1 else ""
        return f"{self.broken[0]}{more}" if self.broken else None


@dataclass(frozen=True)
class Steps:
    """Steps of a trial with nothing read between them.

    Attributes:
        fresh: returns a new replica; the context closes it.
        reference: of these steps.
        windows: how many steps an asynchronous schedule makes before it drains, and again; none: it drains
            after each step.
    """

    fresh: Fresh
    trial: Trial
    reference: Sequence[Snapshot]
    windows: Sequence[int] = ()

    def run(self, replica: RankModel, late: bool = False) -> Ran:
        """Make the steps. Collective.

        Args:
            late: keep messages back until they are waited for.
        """
        if not late:
            return self._run(replica)
        with delay_messages(self.trial.seed) as messages:
            ran = self._run(replica)
            if ran.failure is not None:
                flying: list[list[str]] = gather_json(messages.in_flight)
                if first := next((message for rank in flying for message in rank), None):
                    ran.failure = f"{ran.failure} while {first} is still in flight"
            replica.states.ready()
        ran.late = True
        everywhere: list[list[str]] = gather_json(messages.broken)
        ran.broken = [misuse for rank in everywhere for misuse in rank]
        return ran

    def _run(self, replica: RankModel) -> Ran:
        task, ran = TrialTask(replica, self.trial), Ran()
        trainer = trial_trainer(task, drains=list(accumulate(self.windows)))
        if replica.asynchronous:
            task.scale_losses()
        results = list[tuple[float, float | None]]()
        try:
            for _ in self.reference:
                for done in trainer.step():
                    results.append((loss_of(done), done.norm))
        except TrainingFailed as failed:
            ran.failure = str(failed)
            return ran
        pairs = list(zip(results, self.reference, strict=True))
        ran.losses += [relative(loss, snapshot.loss) for (loss, _), snapshot in pairs]
        norms = [norm for _, norm in results if norm is not None]
        if norms:
            farthest = zip(worst(norms, self.reference), self.reference, strict=True)
            ran.norms += [relative(norm, snapshot.norm) for norm, snapshot in farthest]
        digest = hashlib.blake2b(repr(results).encode(), digest_size=16)
        with replica.states.full_weights() as weights:
            for weight in weights.values():  # of a copy: memory that numpy sees cannot be released
                digest.update(weight.clone(memory_format=torch.contiguous_format).numpy().tobytes())
            ran.weights = self.reference[-1].compare_placed("weights", weights, replica.places)
        ran.bits = digest.hexdigest()
        return ran

    def same_bits_late(self, verdict: Verdict, ran: Ran) -> Verdict:
        """Return a verdict of equality if the steps come to the same bits with everything late. Collective.

        Args:
            ran: the steps without delays.
        """
        with self.fresh() as replica:
            again = self.run(replica, late=True)
        equal_bits: list[bool] = gather_json(again.bits == ran.bits and again.failure is None)
        if all(equal_bits) and not again.broken:
            return verdict
        if again.failure is not None or again.broken:
            return only_unread(verdict, again)
        ranks = [str(rank) for rank, equal in enumerate(equal_bits) if not equal]
        difference = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} come to other bits: {_EARLY}"
        return _with_errors(verdict, again, f"{_WHEN_LATE} {difference}")

    def with_wrong_use(self, verdict: Verdict, ran: Ran) -> Verdict:
        """Add to a verdict of difference how messages are used wrongly, if they are. Collective."""
        if not ran.late:
            with self.fresh() as replica:
                ran = self.run(replica, late=True)
        if ran.wrong_use is None or verdict.diagnosis is None or ran.wrong_use in verdict.diagnosis:
            return verdict
        return replace(verdict, diagnosis=f"{verdict.diagnosis}; {ran.wrong_use}")


_EARLY = "something is used before it has arrived"
_WHEN_LATE = "equal where messages arrive at once; where they are late,"


def wrong_use_verdict(layout: str, ran: Ran) -> Verdict:
    """The verdict on steps that use messages wrongly. They are not made again: without `delay_messages` ranks
    might wait for each other for ever.
    """
    return Verdict(layout=layout, quantities=ran.quantities(TOLERANCE), diagnosis=ran.wrong_use)


def only_unread(verdict: Verdict, ran: Ran) -> Verdict:
    """The verdict on steps that are equal when each is read, and differ as they `ran`."""
    if ran.late:
        failure = "results differ" if ran.failure is None else ran.failure
        return _with_errors(verdict, ran, f"{_WHEN_LATE} {ran.wrong_use or f'{failure}: {_EARLY}'}")
    failure = "" if ran.failure is None else f" ({ran.failure})"
    steps = f"steps are equal when each is read, and differ when nothing is read between them{failure}"
    return _with_errors(verdict, ran, f"{steps}: {_EARLY}")


def _with_errors(verdict: Verdict, ran: Ran, diagnosis: str) -> Verdict:
    """The verdict with the errors of steps that differ, and a diagnosis."""
    quantities = worst_quantities([verdict.quantities, ran.quantities(verdict["loss"].bound)])
    return replace(verdict, quantities=quantities, diagnosis=diagnosis)
