"""The step of schedules that update the weights within it, such as PipeDream's.

Such a pipeline does not drain at the end of a step: forwards of the next step enter while the backwards of
the last are under way. A rank therefore returns from a step after its own last action of it, starts the
all-reduce of the step's agreement, and reads that of an earlier step, which all ranks have finished by then.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from stretto.engine.progress import PROGRESS, label
from stretto.run.launch.failure import TrainingFailed
from stretto.run.launch.stop import StopRequest
from stretto.run.train import trace
from stretto.run.train.agreement import Agreement
from stretto.run.train.language_task import LanguageTask
from stretto.run.train.rank_model import BadGradient, loss_weights, name_on_ranks
from stretto.run.train.task import StepResult, mean_loss
from stretto.run.train.trainer import Trainer
from stretto.run.watch.slow import BUSY

_LOADING, _AGREEING = label("loading data"), label("agreement on the step")


@dataclass(kw_only=True)
class _InFlight:
    """Steps that follow one another without a drain.

    Attributes:
        first: number of the first step, from 0.
        samples: index of its first sample.
        until: number of the step after the last.
        targets: by step under way, the tokens that the loss counts in each microbatch.
        agreements: on the steps that this rank has finished, in order.
        bad_gradients: by step, a gradient of this rank that was not finite, whose update was therefore
            skipped, or the first weight that was not finite then.
        loss_scales: at the beginning, and after each step that has been reported; empty without a loss scale.
        seconds: durations of the steps that are not reported yet.
    """

    first: int
    samples: int
    until: int
    targets: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    agreements: deque[tuple[int, Agreement]] = field(default_factory=deque[tuple[int, Agreement]])
    bad_gradients: dict[int, BadGradient | None] = field(default_factory=dict[int, "BadGradient | None"])
    loss_scales: list[float] = field(default_factory=list[float])
    seconds: deque[float] = field(default_factory=deque[float])


class AsyncTrainer(Trainer):
    """Trains with a schedule that updates the weights within the step. Arguments are those of `Trainer`."""

    task: LanguageTask

    def __init__(self, task: LanguageTask, *arguments: Any, **options: Any) -> None:
        super().__init__(task, *arguments, **options)
        self._in_flight: _InFlight | None = None
        self._ended = 0.0  # clock at the end of the last step
        self._save_ready = False  # the ranks have agreed on it, and have not acted on it yet

    @property
    def drained(self) -> bool:
        """True if all steps that have begun are reported, and nothing is in flight."""
        return self._in_flight is None

    def step(self, stop: StopRequest | None = None) -> list[StepResult]:
        """Run to this rank's last action of the step, with later steps in flight; see `Trainer.step`."""
        task, progress = self.task, self.progress
        model, step = task.model, progress.step
        pipeline = model.pipeline
        if self._in_flight is None:
            self._ended = time.perf_counter()
            until = step + 1 if pipeline.drains_each_step else self.next_drain(step)
            self._in_flight = _InFlight(first=step, samples=progress.samples, until=until)
            if model.loss_scale is not None:
                self._in_flight.loss_scales.append(model.loss_scale.value)
        window = self._in_flight
        task.begin_step(step, progress.samples)
        BUSY.begin()

        # Batch: the pipeline asks for those of this step and of later ones when it has room for them.
        def load(number: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
            PROGRESS.mark(_LOADING)
            loaded = task.load(window.samples + number * task.global_batch, number)
            window.targets[window.first + number] = loaded.targets_counted
            # each update is by the mean over its own tokens
            return loaded.inputs, loaded.targets, loss_weights(model.update_numbers, loaded.targets_counted)

        # Forward, backward and updates, to this rank's last action of the step.
        def loss_scale(number: int) -> float:
            # every rank has these reports by the time that the first rank needs the batch
            return window.loss_scales[max(0, number - pipeline.ahead - pipeline.late)]

        scale_of = loss_scale if window.loss_scales else None
        model.set_rate(task.rate(step), step, scale_of and scale_of(step - window.first))
        model.optimizer.overflowed, model.optimizer.refused = False, None
        losses = model.advance(load, window.until - window.first, scale_of, task.recorder)

        # Agreement: begun for this step, waited for of steps that every rank has finished.
        bad_weight = model.first_bad_weight()  # no gradient norm follows that would show it
        refused = model.optimizer.refused
        window.bad_gradients[step] = refused or (None if bad_weight is None else (0, bad_weight))
        local = replace(
            model.loss_report(losses),
            bad_weights=bad_weight is not None,
            overflow=model.optimizer.overflowed,
        )
        statistics = {"targets": window.targets.pop(step).sum()[None], **task.expert_statistics()}
        window.agreements.append((step, Agreement(self.report(local, stop), task.device, statistics)))
        results = list[StepResult]()
        while len(window.agreements) > (0 if pipeline.drained else pipeline.late):
            results.append(task.timed(trace.AGREEMENT, lambda: self._finish_step(window)))
        if pipeline.drained:
            self._in_flight = None
            task.update_expert_bias()
        elif any(r.agreed.stop or r.agreed.end or r.agreed.save_failed for r in results):
            window.until = min(window.until, step + 1 + pipeline.ahead)
        BUSY.end()

        # Report. Times are from the end of one step on this rank to the end of the next.
        progress.step, progress.samples = step + 1, progress.samples + task.global_batch
        ended = time.perf_counter()
        window.seconds.append(ended - self._ended)
        self._ended = ended
        for result in results:
            self.report_step(result, window.seconds.popleft())
        self._save_ready = self._save_ready or any(result.agreed.save_ready for result in results)
        if self._save_ready and self.drained and self.checkpointer is not None:
            self._save_ready = False
            # when the pipeline drains is part of what it computes: it is not drained for a commit
            self.checkpointer.finish()
        return results

    def _finish_step(self, window: _InFlight) -> StepResult:
        """Wait for the agreement on the oldest step that is not reported yet. Collective.

        Raises:
            TrainingFailed: as `Trainer.step`.
        """
        step, agreement = window.agreements.popleft()
        PROGRESS.mark(_AGREEING)
        agreed, size = agreement.wait(), self.task.global_batch
        first = window.samples + (step - window.first) * size
        self.task.bad_gradient = window.bad_gradients.pop(step)
        if agreed.bad_weights and not (agreed.memory_changed or agreed.bad_microbatches):
            name = name_on_ranks(self.task.bad_gradient) or "on no rank"
            raise TrainingFailed(
                f"step {step + 1}: its updates left weights that are not finite; first {name}"
            )
        bad = self.verdict(step, range(first, first + size), agreed, norm=None, partial=True)
        if (scale := self.task.model.loss_scale) is not None:
            scale.update(agreed.overflow)
            if scale.exhausted:
                raise TrainingFailed(f"step {step + 1}: gradients overflow at the smallest loss scale")
            if agreed.overflow:
                self.log(
                    f"step {step + 1}: gradients overflow, no update; the loss scale will be "
                    f"{scale.value:.10g}"
                )
            window.loss_scales.append(scale.value)
        return StepResult(
            step=step + 1, samples=first + size, loss=mean_loss(agreed), norm=None, agreed=agreed, bad=bad
        )

    def next_drain(self, step: int) -> int:
        """As `Trainer.next_drain`; a traced step is drained before and after."""
        traced = self.task.traced_step
        return min([super().next_drain(step), *(end for end in (traced - 1, traced) if end > step)])
