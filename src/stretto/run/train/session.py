"""A training run of one rank: step after step, what is reported of each, and evaluation."""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from stretto.engine.optim.rate import LearningRate
from stretto.engine.parallel.replica_check import RankTensors
from stretto.engine.pipeline import Recorder
from stretto.run.config.schema import TrainConfig
from stretto.run.data.mixture import epochs, held_out, parts_of, training_samples
from stretto.run.data.token_source import TokenData
from stretto.run.launch.failure import TrainingFailed
from stretto.run.launch.stop import StopRequest
from stretto.run.train import trace
from stretto.run.train.batches import read_ahead
from stretto.run.train.evaluate import Evaluation
from stretto.run.train.held import held_by, updated_by
from stretto.run.train.loop import Outcome, Save, TrainingLoop
from stretto.run.train.metrics import Metrics
from stretto.run.train.position import TextPosition, go_on, save_run
from stretto.run.train.prediction import Forecast
from stretto.run.train.replica import Replica
from stretto.run.train.speed import Speed
from stretto.run.train.step import StepResult, TrainingStep
from stretto.run.watch.slow import BUSY


@dataclass(frozen=True, kw_only=True)
class TextOutcome(Outcome):
    """How a language model's session ended."""

    tokens_per_s: float | None  # median; None where this session has made no step


class Session(TrainingLoop[TrainConfig, TextPosition]):
    """One rank of a run.

    Args:
        replica: this rank's model.
        source: the tokens of the text.
        position: where the run is.
        saved: the checkpoint that it was resumed from.
        metrics: on rank 0 only.
    """

    def __init__(
        self,
        config: TrainConfig,
        replica: Replica,
        source: TokenData,
        position: TextPosition,
        saved: Path | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(config, position, saved, metrics)
        self.replica = replica
        self.mesh = replica.mesh
        self._source = source
        rate = LearningRate.of(replica.job.optimiser, config.train.steps)
        self._training = TrainingStep(replica, rate, self.note, self.guard, self._memory)
        left = config.train.steps - position.step
        self._traced = position.step + min(config.metrics.trace, left) if config.metrics.trace else 0
        self._ended, self._seconds = (
            0.0,
            deque[float](),
        )  # end of the last step; durations of those not reported
        self._stopping = False  # a rank was asked to stop
        self._save_ready = False  # the ranks have agreed on it, and not acted on it yet
        self._speed = Speed(replica, config.metrics.peak_tflops)
        self._forecast = None if metrics is None else Forecast(replica.job, config)
        self._samples = training_samples(source, config)
        self._read_ahead = read_ahead(self._samples, replica)
        self._evaluation = (
            Evaluation(self._training, held_out(source, config, "valid"), config.eval.batches)
            if config.eval.every
            else None
        )

    def run(self, stop: StopRequest) -> TextOutcome:
        """Train to the last step, or to the step at which a rank was asked to stop; then save."""
        try:
            stopped = self.train(stop)
        finally:
            self._read_ahead.close()
        if self._forecast is not None and (summary := self._forecast.end()):
            self.note(summary)
        return TextOutcome(
            step=self.position.step,
            loss=self.position.loss,
            tokens_per_s=self._speed.median,
            stopped=stopped,
            checkpoint=None if self.saved is None else str(self.saved),
            warning=self.trend.warning,
        )

    def _step(self, stop: StopRequest) -> bool:
        """One global batch, and the reports of all steps whose result is known; returns whether any rank was
        asked to stop and nothing is under way any more.
        """
        position = self.position
        recorder = trace.start(self.mesh) if position.step + 1 == self._traced else None
        self._warn_of_second_epoch()
        if self._training.drained:
            self._ended, self._stopping = time.perf_counter(), False
        BUSY.begin()
        done = self._training.run(
            self._read_ahead,
            step=position.step,
            seen=position.samples,
            until=self._drain_after(position.step),
            stop=stop,
            saving=self.background,
            recorder=recorder,
        )
        BUSY.end()
        position.step += 1
        position.samples += self.replica.job.global_batch
        # from the end of one step on this rank to the end of the next: with steps under way a mean of theirs
        ended = time.perf_counter()
        self._seconds.append(ended - self._ended)
        self._ended = ended
        if (compiler := self.replica.compiler) is not None and (news := compiler.news()):
            self.note(f"step {position.step}: {news}")
        if recorder is not None:
            self._trace(recorder)
        for result in done:
            self._report(result, self._seconds.popleft())
        self._save_ready = self._save_ready or any(result.save_ready for result in done)
        if self._save_ready and self._training.drained:
            self._save_ready = False
            # when an asynchronous schedule drains is part of what it computes: it is not drained for a commit
            if self.replica.asynchronous:
                self.finish_save()
            else:
                self.advance_save(True)
        return self._stopping and self._training.drained

    def _same_work(self) -> Sequence[Sequence[int]]:
        """The ranks of each stage; with a server of the states, which does more than others, each alone."""
        job = self.replica.job
        if job.dp.mode == "server":
            return super()._same_work()
        return [list(ranks) for ranks in zip(*job.layout.groups("pp"), strict=True)]

    def _drain_after(self, step: int) -> int:
        """As of any training; the traced step is drained before and after."""
        last = super()._drain_after(step)
        return min([last, *(one for one in (self._traced - 1, self._traced) if one > step)])

    def _warn_of_second_epoch(self) -> None:
        """Say once of each source that a step is the first to train on text that was seen before."""
        seen, parts = self.position.samples, parts_of(self._samples)
        before = epochs(self._samples, seen)
        for name, after in epochs(self._samples, seen + self.replica.job.global_batch).items():
            if before[name] <= 1 < after:
                of = f" of {name}" if len(parts) > 1 else ""
                self.note(
                    f"step {self.position.step + 1} begins a second epoch of {len(parts[name]):,} "
                    f"training samples{of}: the training loss is now of text seen before, and the held-out "
                    "loss (eval.every) tells whether the model still gets better"
                )

    def _report(self, done: StepResult, seconds: float) -> None:
        """Count and record a step."""
        self._stopping = self._stopping or done.stop
        self._speed.fullest = done.memory_gib
        position = self.position
        position.weight_updates += done.updates
        position.tokens += done.tokens
        position.targets += done.targets
        if done.bad is None:
            position.loss = done.loss
        record = self._speed.record(
            step=done.step + 1,
            loss=done.loss,
            norm=done.norm,
            rate=done.rate,
            seen=position.tokens,
            targets=position.targets,
            tokens=done.tokens,
            seconds=seconds,
        )
        done_epochs = epochs(self._samples, done.samples)
        record = replace(
            record,
            epoch=max(done_epochs.values()),
            epochs=done_epochs if len(done_epochs) > 1 else None,
        )
        record = replace(record, slow=self._slow_ranks(done.busy_s, seconds))
        if self._forecast is not None and self._forecast.estimate is not None:
            record = replace(record, bubble=self._forecast.estimate.bubble)
        if (scale := self.replica.loss_scale) is not None:
            record = replace(record, loss_scale=scale.value, skipped=scale.skipped)
        if done.bad is not None:
            record = replace(record, bad=done.bad.reason)
        if (experts := done.experts) is not None:
            record = replace(
                record,
                expert_loss=experts.loss,
                expert_dropped=experts.dropped,
                expert_busiest=experts.busiest,
            )
        if self.metrics is not None:
            self.metrics.step(record)
        if self._forecast is not None:
            self._forecast.add(seconds)
        if done.bad is not None:
            self._pass_over(done.bad)

    def _trace(self, recorder: Recorder) -> None:
        """Bring together what all ranks recorded, and report it beside the replay."""
        pipelines = trace.gather(recorder, self.mesh)
        lost = self.metrics is not None and self.metrics.check_folder() is not None
        if pipelines is not None and not lost:
            program = self.replica.pipeline.program
            forecast = self._forecast
            job, host = self.replica.job, platform.node()
            report = trace.write(
                title=f"{self.config.run.name}, {job.shape.family} on {job.layout}, {host}",
                folder=self.config.run.folder,
                step=self.position.step,
                program=program,
                pipelines=pipelines,
                expected=None if forecast is None else forecast.estimate,
            )
            why = (
                ""
                if forecast is None or forecast.estimate is not None
                else f"no prediction: {forecast.why}\n"
            )
            self.note(f"traced step {self.position.step}: {report.trace}, {report.page}\n{why}{report.text}")

    def evaluate(self) -> float:
        """Loss on the first `eval.batches` global batches of the held-out split, or all of a smaller one."""
        assert self._evaluation is not None
        record = self._evaluation.run(self.position.step)
        assert record is not None, "no stop is asked for"
        self._speed.fullest = self._evaluation.memory_gib
        if self.metrics is not None:
            self.metrics.evaluation(replace(record, text_bytes=self._evaluation.text_bytes))
        return record.loss

    @property
    def _drained(self) -> bool:
        return self._training.drained

    def _held(self) -> RankTensors:
        return held_by(self.replica)

    def _updated(self) -> Mapping[str, Tensor]:
        return updated_by(self.replica)

    def _restore(self, path: Path) -> TextPosition:
        return go_on(self.config, self.replica, self._source, path, self.note, check=False)

    def _write_checkpoint(self, save: Save) -> Path:
        """Write a checkpoint of this step.

        Raises:
            TrainingFailed: weights are not finite, on all ranks; then nothing is written.
        """
        if (place := self._training.bad_weight()) is not None:
            raise TrainingFailed(f"after step {self.position.step}: weights are not finite; first {place}")
        return save_run(self.config, self.replica, self._source, self.position, save)
