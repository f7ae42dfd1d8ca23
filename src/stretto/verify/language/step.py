"""Training's own steps on the samples of a trial, and what may be read of a replica beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.engine.offload.tensor_files import at_hand
from stretto.engine.optim.scale import LossScale
from stretto.engine.parallel.control import gather_json
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement, TensorBox
from stretto.job.finetune import is_router_correction
from stretto.run.data.dataset import Batch
from stretto.run.train.async_step import AsyncTrainer
from stretto.run.train.language_task import LanguageTask, TextProgress
from stretto.run.train.rank_model import RankModel
from stretto.run.train.task import StepResult
from stretto.run.train.trainer import Trainer
from stretto.verify.compare import Snapshot, misplaced, relative
from stretto.verify.language.reference import Trial

SCALE = 2.0**10  # of the loss, to exercise the path of float16: a power of two changes no bit


class TrialSamples:
    """The samples of a trial, by the index that training gives them."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._all = Batch.concatenated(batches)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Some of them."""
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
    """Of all ranks' norms the ones that are farthest off, by step. Collective."""
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
        """What is held of a fragment."""
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
    """How many copies there are of parameters that are spread over given axes, and of their states."""
    mesh, states = replica.mesh, replica.states
    copies = mesh.layout.world // (mesh.size(over) * mesh.size("pp"))
    of_states = 1 if states.dp.mode == "server" else copies // states.sizes.for_copies(copies).states
    return copies, of_states
