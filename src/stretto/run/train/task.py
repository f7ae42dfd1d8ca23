"""What a training run does that depends on its model: the `Task` protocol, and the state of a run.

`trainer.py` is the loop and the step; `language_task.py` and `recommender/train/task.py` are the two tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from stretto.engine.checkpoint.shards import Saved
from stretto.engine.parallel.replica_check import RankTensors
from stretto.engine.pipeline import Recorder
from stretto.run.train.agreement import StepAgreement, StepReport
from stretto.run.train.guard import BadStep, Judged
from stretto.run.train.metrics import AnyEval, AnyStep, LogFormat

T = TypeVar("T")
Log = Callable[[str], object]
Evaluate = Callable[[int], tuple[float, AnyEval]]
"""`RunTask.evaluate`."""


@dataclass(kw_only=True)
class TrainProgress:
    """How far a run is; with the seed it determines which samples come next."""

    step: int = 0  # steps made, including those whose update was skipped
    samples: int = 0  # index of the next sample in the order of the run
    counted_from: dict[str, int] = field(default_factory=lambda: {"step": 0, "samples": 0})
    """The step and the samples since which every step has taken a batch of the config's size."""
    loss: float | None = None  # of the last step that had one
    held_out_loss: float | None = None  # of an evaluation after the last step
    skipped: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Ranges [first, end) of samples without an update."""
    history: list[Judged] = field(default_factory=list[Judged])
    """Losses and norms by which spikes are judged (`Guard`); empty if none are looked for."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a session of training ended.

    Attributes:
        loss: of the last step, or None if the run has made none.
        stopped: by a signal, before the last step.
        checkpoint: the newest, or None if training was stopped before there was one.
        warning: what is wrong with the run although it reached its end.
        details: what the task adds: speed, quality, placement.
    """

    step: int
    loss: float | None
    stopped: bool
    checkpoint: str | None
    warning: str | None
    details: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data, which ranks send to their launcher."""
        common = {name: getattr(self, name) for name in ("step", "loss", "stopped", "checkpoint", "warning")}
        return {**common, **self.details}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A finished step, the same on every rank.

    Attributes:
        step: its number, from 1.
        samples: index behind its last sample in the order of the run.
        loss: mean over what the loss counts in the global batch, without the losses that layers add; NaN if
            that of a microbatch is not finite.
        norm: of the gradients before clipping, or None if none is computed. If it is not finite, nothing was
            updated.
        bad: why the update was not applied, if the guard skips or undoes such a step.
    """

    step: int
    samples: int
    loss: float
    norm: float | None
    agreed: StepAgreement
    bad: BadStep | None = None


@dataclass(frozen=True)
class Fault:
    """What is wrong with a step's loss or gradients, and the samples that may have caused it."""

    reason: str
    suspects: Sequence[range]


@dataclass(frozen=True, kw_only=True)
class CheckpointContent:
    """What this rank contributes to a checkpoint, and the metadata, which are the same on every rank."""

    tensors: Saved
    meta: Mapping[str, Any]
    per_rank: Mapping[str, Tensor] | None = None


class Task(Protocol):
    """One rank's model, data and optimiser, as a training run sees them. Every rank makes the same calls in
    the same order; collective calls say so.

    Attributes:
        device: where losses and statistics are.
        global_batch: samples of a step, over all ranks.
        log: prints a line, on rank 0; set by the trainer.
        recorder: times or marks the calls of a step that is traced or profiled.
    """

    device: torch.device
    global_batch: int
    log: Log
    recorder: Recorder | None

    @property
    def peer_ranks(self) -> Sequence[Sequence[int]]:
        """Groups of ranks that have the same work in every step, whose times are comparable."""
        ...

    def batch(self, step: int, samples: int) -> Any:
        """Return this rank's part of the global batch that begins at sample `samples`; `step` is from 0."""
        ...

    def forward_backward(self, batch: Any, step: int) -> StepReport:
        """Compute the loss and the gradients of a batch and reduce these over the ranks; return the loss and
        the first microbatch whose loss is not finite. Collective.
        """
        ...

    def statistics(self) -> dict[str, Tensor]:
        """Return numbers of the step that are the same on every rank, [n] each: the gradient `norm` before
        clipping, if it is computed, and the `targets` that a summed loss is a mean over. Collective.
        """
        ...

    def fault(self, agreed: StepAgreement, norm: float | None, samples: range) -> Fault | None:
        """Return what is wrong with the loss or gradients of the step, or None. Collective."""
        ...

    def update(self, step: int, norm: float | None, apply: bool) -> None:
        """Clip the gradients and apply them, or drop them. Collective."""
        ...

    def record(
        self, result: StepResult, progress: TrainProgress, seconds: float, slow: dict[str, float] | None
    ) -> AnyStep:
        """Count a finished step in `progress`, and return its record for metrics. Collective.

        Args:
            seconds: that the step took.
            slow: ranks that are slow, and how many times longer than usual they take.
        """
        ...

    def tensors(self, purpose: Literal["replicas", "memory"]) -> RankTensors:
        """Return weights and optimiser states of this rank by name, with their places: those that other ranks
        may hold too, or those in memory that only an update changes.
        """
        ...

    def bad_weight(self) -> str | None:
        """Return rank and name of the first weight that is not finite, or None. Collective."""
        ...

    def details(self) -> dict[str, Any]:
        """Return what the task adds to the result of training."""
        ...

    def timed(self, label: str, call: Callable[[], T]) -> T:
        """Make a call, and record it if there is a recorder."""
        ...


class RunTask(Task, Protocol):
    """A task that can be evaluated, saved and resumed."""

    def evaluate(self, step: int) -> tuple[float, AnyEval]:
        """Return the held-out loss after `step` steps, and the record of it for metrics. Collective."""
        ...

    def checkpoint(self, progress: TrainProgress) -> CheckpointContent:
        """Return what is saved of this rank."""
        ...

    def restore(self, path: Path, check: bool | None = None) -> TrainProgress:
        """Fill model and optimisers from a checkpoint, whatever layout wrote it. Collective.

        Args:
            check: read every byte first. By default only if the config names this checkpoint, which nobody
                has read so far.

        Raises:
            StrettoError: it is damaged, or of another model, data or optimiser.
        """
        ...


def mean_loss(agreed: StepAgreement) -> float:
    """The loss of a step: the ranks' sum over the targets that it counts; NaN if that of a microbatch is not
    finite.
    """
    if agreed.bad_microbatches:
        return nan
    return agreed.loss / (agreed.statistic("targets") or 1.0)


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """A task that is ready to train.

    Attributes:
        checkpoint: what the run resumes from, or None.
        write_files: writes into a folder what else belongs to the run, such as its tokenizer.
        log_format: how steps and evaluations are printed.
        trainer: `Trainer`, or the class of one with another step.
    """

    task: RunTask
    progress: TrainProgress
    checkpoint: Path | None
    write_files: Callable[[Path], object]
    log_format: LogFormat
    trainer: Callable[..., Any]
