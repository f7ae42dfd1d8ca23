"""The reference of a proof: the plain model in one process, with none of the parallel code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import nn

from stretto.engine.documents import DocumentStarts, Packing, share_packing
from stretto.engine.models.build import build
from stretto.engine.models.language import IGNORED, LanguageModel
from stretto.engine.models.moe import MoE, correct
from stretto.engine.models.weights import freeze, initialise
from stretto.engine.optim.rate import LearningRate
from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
from stretto.engine.parallel.tensor.fp8 import enable_fp8
from stretto.engine.parallel.tensor.user_loss import UserLoss
from stretto.engine.user_model import UserModel
from stretto.job.job import Job
from stretto.job.parameters import parameter_shapes
from stretto.job.user_shape import UserShape
from stretto.run.data.dataset import Batch
from stretto.verify.compare import Snapshot, share
from stretto.verify.optimizer import ReferenceOptimizer


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is trained beside the job: the same for the layouts and for one process.

    Attributes:
        batches: of each step, in the order of the samples.
        seed: of initial values and dropout.
        total_steps: of the run, by which the learning rate decays.
        twice: make the steps both as messages come and with all of them late; else late only.
        timeout: longest wait for a message; None: torch's default.
    """

    batches: Sequence[Batch]
    seed: int
    total_steps: int
    twice: bool = False
    timeout: timedelta | None = None

    def rate(self, job: Job) -> LearningRate:
        """The learning rate by step."""
        return LearningRate.of(job.optimiser, self.total_steps)


@dataclass(frozen=True)
class PlainReference:
    """The plain model, and what it must know of the samples of a forward and its backward."""

    model: LanguageModel | UserModel
    keys: DropoutKeys
    packing: Packing

    def begin(self, samples: range, batch: Batch) -> None:
        """Begin a microbatch.

        Args:
            samples: their numbers, on which dropout depends.
        """
        self.keys.samples = samples
        self.packing.documents = None if batch.begins is None else DocumentStarts(batch.begins)
        self.packing.decoder, self.packing.lengths = batch.decoder, batch.lengths


def build_reference(job: Job, seed: int) -> PlainReference:
    """The plain model in float64 with its initial values.

    Args:
        seed: seed of initial values and dropout.
    """
    if isinstance(job.shape, UserShape):
        model = UserModel(job.shape.build, job.shape.arguments, seed).double()
    else:
        model = build(job.shape)
        initialise(model, seed, job.initial)
        model = model.double()
        model.tie()
    freeze(model, job.trained)
    if job.loss is not None:
        model.loss = UserLoss(job.loss, model.loss, job.shape.vocab)
    if job.precision.fp8 != "none":
        enable_fp8(model, job.precision.fp8)
    keys, packing = DropoutKeys(seed), Packing()
    key_dropout(model, keys)
    share_packing(model, packing)
    return PlainReference(model, keys, packing)


def run_reference(job: Job, trial: Trial) -> list[Snapshot]:
    """Train the plain model in float64 for a few steps."""
    plain = build_reference(job, trial.seed)
    model = plain.model
    named = list(model.named_parameters())
    learning = [(name, p) for name, p in named if p.requires_grad]
    optimizer, rate = ReferenceOptimizer(learning, job.optimiser), trial.rate(job)
    snapshots, size = list[Snapshot](), job.micro_batch
    for step, batch in enumerate(trial.batches):
        counted = int((batch.targets != IGNORED).sum()) or 1
        total = torch.zeros((), dtype=torch.float64)
        loads = Loads(model)
        for start in range(0, len(batch.inputs), size):
            first, part = step * job.global_batch + start, batch.take(slice(start, start + size))
            plain.begin(range(first, first + size), part)
            loss = model.loss(model(part.inputs), part.targets)
            loss = loss / counted + model.auxiliary() / batch.inputs.numel()
            loss.backward()
            total += loss.detach()
            loads.add()
        gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in learning], job.optimiser.clip or float("inf"))
        optimizer.step(rate(step))
        loads.correct()
        weights = {name: p.detach().clone() for name, p in named}
        snapshots.append(Snapshot(loss=float(total), norm=float(norm), gradients=gradients, weights=weights))
    return snapshots


class Loads:
    """How often experts of the plain model are chosen in a step, by which their corrections move after it."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, MoE)]
        self._sums = [torch.zeros_like(layer.load) for layer in self._layers]

    def add(self) -> None:
        """Add the choices of the last forward."""
        for total, layer in zip(self._sums, self._layers, strict=True):
            total += layer.load

    def correct(self) -> None:
        """Move the corrections, at the end of a step."""
        for load, layer in zip(self._sums, self._layers, strict=True):
            router = layer.router
            if router.correction is not None:
                correct(router.correction, load, router.moe.correction_rate)


def share_all(
    snapshots: list[Snapshot] | None, job: Job, steps: int, gradients: bool = True
) -> list[Snapshot]:
    """Bring rank 0's snapshots to all ranks. Collective over the default group.

    Args:
        job: the job of the snapshots' model.
        gradients: True if the snapshots have gradients.
    """
    shared = list[Snapshot]()
    for step in range(steps):
        local = snapshots[step] if snapshots is not None else None
        numbers = share(
            None if local is None else torch.tensor([local.loss, local.norm], dtype=torch.float64), (2,)
        )
        snapshot = Snapshot(loss=float(numbers[0]), norm=float(numbers[1]), gradients={}, weights={})
        for name, size in parameter_shapes(job.shape).items():
            if gradients and job.trained(name):
                snapshot.gradients[name] = share(local and local.gradients[name], size)
            snapshot.weights[name] = share(local and local.weights[name], size)
        shared.append(snapshot)
    return shared
