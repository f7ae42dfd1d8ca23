"""Training, from the first step to the last: one step of all ranks, and the loop around it.

`Trainer.step` reads from top to bottom: batch, forward and backward, agreement, verdict, update, report.
`Trainer.train` repeats it, evaluates, saves, and goes back to a checkpoint if a step was bad. What depends on
the model is a `Task`. Schedules that update the weights within the step have a step of their own
(`async_step.py`).
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from math import isfinite
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stretto.engine.checkpoint.manifest import read_manifest
from stretto.engine.device import on_accelerator, peak_host_memory, peak_memory
from stretto.engine.parallel.control import gather_json, this_rank
from stretto.engine.parallel.memory_check import MemoryCheck
from stretto.engine.parallel.replica_check import ReplicaConsistencyCheck, report
from stretto.engine.progress import PROGRESS, label
from stretto.layout.layout import Layout
from stretto.run.config import dump
from stretto.run.config.run_checks import rate_notes
from stretto.run.config.schema import GuardConfig, JobConfig, LoopConfig
from stretto.run.config.section import plain_section
from stretto.run.launch.failure import TrainingFailed, error_context
from stretto.run.launch.lease import share_folder
from stretto.run.launch.restart import restart_count
from stretto.run.launch.stop import StopRequest
from stretto.run.train import trace
from stretto.run.train.agreement import StepAgreement, StepReport, agree
from stretto.run.train.checkpointing import Checkpointer
from stretto.run.train.guard import BadStep, Guard, add_range
from stretto.run.train.hooks import HookedRun, Hooks
from stretto.run.train.metrics import EVALUATIONS, Metrics, recorded_steps
from stretto.run.train.profiler import StepProfiler
from stretto.run.train.resume import is_fresh_run
from stretto.run.train.spans import Spans
from stretto.run.train.start import aborted_on_error, new_run_folder, process_group
from stretto.run.train.task import (
    Evaluate,
    Fault,
    Log,
    OpenedRun,
    StepResult,
    Task,
    TrainProgress,
    TrainResult,
    mean_loss,
)
from stretto.run.train.trackers import TrackedRun, Trackers, code_version, memory_numbers, run_identity
from stretto.run.train.trend import LossTrend
from stretto.run.watch.hang import HANG
from stretto.run.watch.joint import watched_together
from stretto.run.watch.limit import StepLimit
from stretto.run.watch.record import hang_record, record_environment
from stretto.run.watch.slow import BUSY, SlowRanks, slow_rank_changes

D = TypeVar("D")
_LOADING, _NORM = label("loading data"), label("gradient norm")
_AGREEING, _UPDATING = label("agreement on the step"), label("optimizer step")


class Trainer:
    """Trains one rank's part of a model, together with all other ranks.

    Args:
        progress: how far the run is; every step advances it.
        steps: number of steps after which the run ends.
        limit: how long a step may take; None for no limit.
        evaluate: returns the held-out loss after a step and its record; called every `eval_every` steps and
            after the last one.
        guard: `guard` of the config; by default a bad step raises.
        checkpointer: saves the run; None if nothing is saved.
        metrics: on rank 0 only.
    """

    def __init__(
        self,
        task: Task,
        progress: TrainProgress | None = None,
        *,
        steps: int = LoopConfig.steps,
        limit: StepLimit | None = None,
        evaluate: Evaluate | None = None,
        eval_every: int | None = None,
        guard: GuardConfig | None = None,
        checkpointer: Checkpointer | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.task, self.progress = task, TrainProgress() if progress is None else progress
        self.steps, self._limit = steps, limit or StepLimit(None, LoopConfig.timeout_s)
        self._evaluate, self._eval_every = evaluate, eval_every
        self.checkpointer, self.metrics = checkpointer, metrics
        self.guard = Guard(guard or GuardConfig(), self.progress.history)
        self._memory = MemoryCheck()
        self._copies, self._compared_step = ReplicaConsistencyCheck(), self.progress.step
        self._rollback: BadStep | None = None  # to undo at the end of this step
        self._trend = LossTrend()
        self.hooks: Hooks | None = None
        self.observers = list[StepProfiler | Spans]()
        self._hosts: list[str] = []
        self._slow_ranks: SlowRanks | None = None  # on rank 0
        task.log = self.log

    @property
    def drained(self) -> bool:
        """True if no later step has begun; always between the steps of a synchronous schedule."""
        return True

    def step(self, stop: StopRequest | None = None) -> list[StepResult]:
        """Train on one global batch. Collective over all ranks.

        Args:
            stop: set if this rank was asked to stop; `StepAgreement.stop` is True if any was.

        Returns:
            The steps whose results are known now: this one. An asynchronous schedule returns those of earlier
            steps, in order, and none is missing once it has drained.

        Raises:
            TrainingFailed: on all ranks, if a loss, a gradient or a weight is not finite, or copies of a
                tensor differ, and the guard stops there.
        """
        task, progress = self.task, self.progress
        started, step = time.perf_counter(), progress.step
        samples = range(progress.samples, progress.samples + task.global_batch)
        BUSY.begin()

        # Batch: this rank's microbatches, on its device.
        PROGRESS.mark(_LOADING)
        batch = task.batch(step, samples.start)

        # Forward and backward of all microbatches; gradients are reduced on the way.
        with ExitStack() as observed:
            for observer in self.observers:
                observed.enter_context(observer.program())
            losses = task.forward_backward(batch, step)

        # Agreement: one all-reduce, which the host reads in one copy, so that all ranks take the same branch.
        def agree_on_step() -> StepAgreement:
            local = self.report(losses, stop)
            PROGRESS.mark(_NORM)
            statistics = task.statistics()
            PROGRESS.mark(_AGREEING)
            return agree(local, task.device, statistics)

        agreed = task.timed(trace.AGREEMENT, agree_on_step)
        loss, norm = mean_loss(agreed), agreed.statistic("norm")

        # Verdict: is this a step to apply?
        bad = self.verdict(step, samples, agreed, norm)

        # Update: clip, and apply the gradients; or drop them.
        PROGRESS.mark(_UPDATING)
        if bad is None:
            self.call_hooks("before_update", step + 1)
        task.update(step, norm, apply=bad is None)
        BUSY.end()

        # Report.
        progress.step, progress.samples = step + 1, samples.stop
        result = StepResult(step=step + 1, samples=samples.stop, loss=loss, norm=norm, agreed=agreed, bad=bad)
        self.report_step(result, time.perf_counter() - started)
        if self.checkpointer is not None and agreed.save_ready:
            self.checkpointer.advance()
        return [result]

    def train(self, stop: StopRequest) -> TrainResult:
        """Train to the last step, or to the step at which a rank was asked to stop; then save, unless too
        little of `train.grace_s` is left for it. Collective over all ranks.
        """
        if self.metrics is not None:
            self.metrics.on_loss = stop.ask  # all ranks end, and save elsewhere
        try:
            self.call_hooks("on_start", self.progress.step)
            stopped = self._train(stop)
            self.call_hooks("on_end", self.progress.step)
        finally:
            if self.checkpointer is not None:
                self.checkpointer.background.close()
        newest = None if self.checkpointer is None else self.checkpointer.newest
        return TrainResult(
            step=self.progress.step,
            loss=self.progress.loss,
            stopped=stopped,
            checkpoint=None if newest is None else str(newest),
            warning=self._trend.warning,
            details=self.task.details(),
        )

    def _train(self, stop: StopRequest) -> bool:
        """Train and save; return True if training was stopped before the last step."""
        progress, checkpointer = self.progress, self.checkpointer
        if progress.step < self.steps and any(gather_json(stop.signal is not None)):
            self.log(f"asked to stop before step {progress.step + 1}")
            return True
        self._hosts = gather_json(socket.gethostname())
        if len(self._hosts) > 1 and this_rank() == 0:
            self._slow_ranks = SlowRanks(self.task.peer_ranks)
        if progress.step >= self.steps:
            self.log(f"nothing to do: {progress.step} of train.steps={self.steps} steps are done")
        elif checkpointer is not None and checkpointer.newest is None and self.guard.config.rolls_back:
            checkpointer.save()  # what the first rollback goes back to
        ending = stopping = stopped = False
        while progress.step < self.steps and not stopped:
            for observer in self.observers:
                observer.begin(progress.step + 1)
            with error_context(f"in step {progress.step + 1}"), self._limit.step(progress.step + 1):
                progress.held_out_loss = None
                results = self.step(stop)
                stopping = stopping or any(result.agreed.stop for result in results)
                ending = ending or any(result.agreed.end for result in results)
                if ending and self.drained and self._rollback is None:
                    self._end_early()
                stopped = stopping and self.drained and progress.step < self.steps
                self._check_copies(stopped)
                self._watch_memory()
            for observer in self.observers:
                observer.end(ending=stopped or progress.step >= self.steps)
            if self.drained:
                stopping = False
            self._trend.add(progress.loss)
            if self._rollback is not None:
                with error_context(f"going back before step {progress.step}"):
                    self._roll_back(self._rollback)
                stopped = False  # a rank that was asked to stop reports it again in the next step
            elif stopped:
                if checkpointer is None:
                    return True
                checkpointer.check_folder()
                if not checkpointer.can_save(stop):
                    checkpointer.finish()
                    return True
                self.log(f"asked to stop: saving after step {progress.step}")
            else:
                with error_context(f"after step {progress.step}"):
                    every = self._eval_every
                    if every and (progress.step % every == 0 or progress.step == self.steps):
                        self.evaluate()
                    if checkpointer is not None:
                        checkpointer.save_if_due()
        if checkpointer is not None:
            checkpointer.finish()
            if not checkpointer.is_saved:
                with error_context(f"saving after step {progress.step}"):
                    checkpointer.save()
        return stopped

    def _end_early(self) -> None:
        """Make this step the last, since a hook has asked for it. Collective."""
        assert self.hooks is not None
        reason = next(text for text in gather_json(self.hooks.run.ending) if text)
        self.log(f"the run ends after step {self.progress.step} of {self.steps}: {reason}")
        self.steps = self.progress.step

    def call_hooks(self, name: str, step: int, *arguments: Any) -> None:
        """Call the user's hooks of this name about a step, if there are any."""
        if self.hooks is not None:
            self.hooks.call(name, step, *arguments)

    def evaluate(self) -> None:
        """Evaluate on held-out samples and report it. Collective."""
        assert self._evaluate is not None, "eval_every comes with evaluate"
        with PROGRESS.long("evaluation"):
            loss, record = self._evaluate(self.progress.step)
        self.progress.held_out_loss = loss if isfinite(loss) else None
        if self.metrics is not None:
            self.metrics.evaluation(record)
        self.call_hooks("on_evaluation", record.step, record.as_dict())

    def report(self, losses: StepReport, stop: StopRequest | None) -> StepReport:
        """Return what this rank reports of a step: its losses, and flags that all ranks have to know."""
        device = self.task.device
        saving = None if self.checkpointer is None else self.checkpointer.background
        return replace(
            losses,
            memory_changed=self._memory.changed(device),
            stop=stop is not None and stop.signal is not None,
            end=self.hooks is not None and self.hooks.run.ending is not None,
            memory_gib=peak_memory(device),
            host_gib=peak_host_memory(),
            busy_s=0.0 if on_accelerator(device) else BUSY.report(),
            written=saving is not None and saving.written,
            write_failed=saving is not None and saving.failed,
        )

    def verdict(
        self, step: int, samples: range, agreed: StepAgreement, norm: float | None, partial: bool = False
    ) -> BadStep | None:
        """Return why the update of a step is not to be applied, or None if it is. Collective, and the same on
        every rank.

        Args:
            step: index of the step, from 0.
            samples: samples of the step.
            norm: gradient norm; if it is not finite, and there is no fault, gradients overflowed in float16.
            partial: updates with finite gradients have been applied within the step.

        Raises:
            TrainingFailed: the guard stops here.
        """
        if agreed.memory_changed:
            names = gather_json(self._memory.first())
            changed = next((f"{name} on rank {rank}" for rank, name in enumerate(names) if name), None)
            return self.guard.changed(step, changed, samples.start)
        fault, spike = self.task.fault(agreed, norm, samples), False
        if fault is None and (norm is None or isfinite(norm)):
            loss = mean_loss(agreed)
            if (reason := self.guard.spike(loss, norm)) is not None:
                fault, spike = Fault(reason, [samples]), True
            else:
                self.guard.record_good_step(step + 1, loss, norm)
        if fault is None:
            return None
        bad = self.guard.handle_bad_step(
            step + 1,
            fault.reason,
            spike=spike,
            samples=samples,
            suspects=fault.suspects,
            complete=not partial,
        )
        # weights that are not finite make every later step a bad one
        if bad.action == "skip" and (name := self.task.bad_weight()) is not None:
            raise TrainingFailed(
                f"step {step + 1}: {fault.reason}; nor are weights, which skipping does not mend "
                f"(guard.on_nonfinite=rollback does); first {name}"
            )
        return bad

    def report_step(self, result: StepResult, seconds: float) -> None:
        """Count and record a finished step that took `seconds`."""
        progress, bad = self.progress, result.bad
        if bad is None:
            progress.loss = result.loss
        slow: dict[str, float] | None = None
        if self._slow_ranks is not None:
            before, factors = self._slow_ranks.slow, self._slow_ranks.add(result.agreed.busy_s, seconds)
            for line in slow_rank_changes(before, factors, self._hosts):
                self.log(line)
            slow = {str(rank): factor for rank, factor in factors.items()} or None
        record = self.task.record(result, progress, seconds, slow)
        if self.metrics is not None:
            self.metrics.step(record, memory_numbers(**result.agreed.memory))
        self.call_hooks("on_step_end", result.step, record.as_dict())
        if bad is None:
            return
        consequence = "its update is skipped" if bad.action == "skip" else "going back to a checkpoint"
        if not bad.complete:
            consequence = "updates with such gradients were skipped"
        self.log(f"{bad}; {consequence}")
        if self.metrics is not None:
            self.metrics.event(bad.as_dict())
        if bad.action == "rollback":
            self._rollback = bad
        elif bad.complete:
            progress.skipped = add_range(progress.skipped, bad.samples)

    def _check_copies(self, stopped: bool) -> None:
        """Every `guard.check_replicas` steps, before every checkpoint, and before a rollback, compare what
        several ranks hold of the same tensors. If these differ, no samples are to blame. Collective.

        Raises:
            TrainingFailed: they differ, and the guard stops there.
        """
        step, every = self.progress.step, self.guard.config.check_replicas
        if every is None or not self.drained:
            return
        due = self.checkpointer is not None and self.checkpointer.is_due(step)
        saved = stopped or due or step == self.steps
        if not saved and self._rollback is None and step - self._compared_step < every:
            return
        self._compared_step = step
        if differences := self._copies.differences(self.task.tensors("replicas")):
            bad = self.guard.differ(step, f"copies differ: {report(differences)}", self.progress.samples)
            self.log(f"{bad}; going back to a checkpoint")
            if self.metrics is not None:
                self.metrics.event(bad.as_dict())
            self._rollback = bad

    def _watch_memory(self) -> None:
        """Every `guard.check_memory` steps, checksum weights and optimiser states; the next update verifies
        them.
        """
        every = self.guard.config.check_memory
        if every is None or self._rollback is not None or self.progress.step % every:
            self._memory.end()
        else:
            tensors = self.task.tensors("memory")
            self._memory.begin({name: tensor for name, (tensor, _) in tensors.items()})

    def _roll_back(self, bad: BadStep) -> None:
        """Continue from the newest intact checkpoint of this run, behind the samples of the bad step.
        Collective.

        Raises:
            TrainingFailed: there is none.
        """
        if self.checkpointer is None:
            raise TrainingFailed(f"{bad}; nothing is saved to go back to")
        progress, self._rollback = self.progress, None
        vars(progress).update(vars(self.checkpointer.roll_back(bad)))
        if len(bad.samples):  # otherwise the samples are not to blame, and come again
            progress.skipped = add_range(progress.skipped, range(progress.samples, bad.samples.stop))
            progress.samples = bad.samples.stop
            progress.counted_from = {"step": progress.step, "samples": progress.samples}
        self.guard.history = progress.history
        self._compared_step = progress.step
        if self.metrics is not None:
            self.metrics.rewind(progress.step)

    def next_drain(self, step: int) -> int:
        """Return the first later step after which nothing may be in flight: it is followed by an evaluation
        or a checkpoint, or is the last.
        """
        periods = [self._eval_every, None if self.checkpointer is None else self.checkpointer.every]
        return min([self.steps, *(step + each - step % each for each in periods if each)])

    def log(self, text: str) -> None:
        """Print a line, on rank 0."""
        if self.metrics is not None:
            self.metrics.note(text)


def _open_trackers(config: JobConfig, start: int) -> Trackers | None:
    """Open the trackers of `metrics.to`, for a session that continues after step `start`. A restart trains on
    without one that cannot be opened any more.
    """
    metrics, folder = config.metrics, config.run.folder
    if not metrics.trackers:
        return None
    resumed = not is_fresh_run(config.checkpoint.resume, folder)
    tracked = TrackedRun(
        identity=run_identity(folder, resumed),
        name=config.run.name,
        folder=folder,
        project=metrics.project,
        config=plain_section(config),
        versions={**code_version(), "ranks": dist.get_world_size()},
        start=start,
        resumed=resumed,
        board=metrics.board(folder),
    )
    recorded = {"train": recorded_steps(folder), "eval": recorded_steps(folder, EVALUATIONS)}
    with PROGRESS.long("opening the trackers"):
        return Trackers([*metrics.trackers], tracked, recorded, required=not restart_count())


def _attach_hooks(trainer: Trainer, config: JobConfig, run: OpenedRun) -> None:
    """Give a trainer the hooks of `train.hooks`, with their states of the checkpoint that it resumes from."""
    hooked = HookedRun(trainer.task, trainer.progress, config, trainer.metrics, trainer.log)
    hooks = Hooks(config.train.hooks, hooked)
    if run.checkpoint is not None and run.progress.step:
        hooks.load_state(read_manifest(run.checkpoint).meta.get("hooks", {}))
    trainer.hooks = hooks
    if trainer.checkpointer is not None:
        trainer.checkpointer.hooks = hooks


def train_rank(
    config: JobConfig,
    *,
    layout: Layout | None,
    open_data: Callable[[], D],
    open_run: Callable[[D, torch.device, ExitStack, Log], OpenedRun],
    stop: StopRequest,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train as one rank of the job that RANK and WORLD_SIZE describe; returns `TrainResult.as_dict`.

    Args:
        layout: of the ranks, if some form pipelines.
        open_data: opens the data, after the ranks have met.
        open_run: builds this rank's model and fills it from a checkpoint, if one is named. It gets the data,
            the device, what is to be closed at the end, and where to log.
        stop: set if this rank was asked to stop.
        quiet: write nothing to stdout (`--json`); the progress goes to stderr.

    Raises:
        StrettoError: bad data or checkpoints, or a folder that cannot be written to.
    """
    train = config.train
    folder, notes = config.run.folder, list[str]()
    hang = folder / HANG
    with ExitStack() as cleanup:
        record_environment(hang)
        device = cleanup.enter_context(process_group(train))
        spans = cleanup.enter_context(Spans(config.run.name, layout)) if config.metrics.spans else None
        data = open_data()
        pipeline = () if layout is None else layout.group(dist.get_rank(), "pp")
        cleanup.enter_context(hang_record(hang, pipeline))
        cleanup.enter_context(watched_together(hang, train.hang_s))
        run = open_run(data, device, cleanup, notes.append)
        cleanup.enter_context(aborted_on_error(device))  # before the run is closed
        cleanup.enter_context(share_folder(folder))
        metrics = None
        if dist.get_rank() == 0:
            with new_run_folder(config.run, dump(config)):
                run.write_files(folder)
                metrics = Metrics(
                    folder,
                    steps=train.steps,
                    start=run.progress.step,
                    every=config.metrics.every,
                    trackers=_open_trackers(config, run.progress.step),
                    out=sys.stderr if quiet else None,
                    log_format=run.log_format,
                    write_files=run.write_files,
                )
            cleanup.enter_context(metrics)
            for note in [*rate_notes(config.optim.rate, train.steps), *notes]:
                metrics.note(note)
        trainer: Trainer = run.trainer(
            run.task,
            run.progress,
            steps=train.steps,
            limit=StepLimit(train.hang_s, train.timeout_s),
            evaluate=run.task.evaluate,
            eval_every=config.eval.every,
            guard=config.guard,
            checkpointer=Checkpointer(config, run.task, run.progress, run.checkpoint, metrics),
            metrics=metrics,
        )
        if train.hooks:
            _attach_hooks(trainer, config, run)
        if config.metrics.profile is not None:
            profiler = StepProfiler(config, run.task, layout, run.progress.step, trainer.log)
            trainer.observers.append(profiler)
        if spans is not None:
            spans.observe(run.task)
            trainer.observers.append(spans)
        result = trainer.train(stop)
        if spans is not None:
            spans.finish()
        dist.barrier()
        return result.as_dict()
