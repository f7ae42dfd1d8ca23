"""What every rank of a training job does, whatever the model: it joins the other ranks, opens the run's
folder, steps to the end, agrees with the other ranks on each step, evaluates, and saves.
"""

from __future__ import annotations

import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.checkpoint.background import BackgroundSave
from stretto.engine.checkpoint.load import latest
from stretto.engine.checkpoint.save import save
from stretto.engine.device import backend_for, rank_device
from stretto.engine.parallel.control import CollectiveError, gather_json, run_on_first, this_rank
from stretto.engine.parallel.memory_check import MemoryCheck
from stretto.engine.parallel.replica_check import RankTensors, ReplicaConsistencyCheck, report
from stretto.engine.progress import PROGRESS
from stretto.errors import StrettoError
from stretto.run.config import dump
from stretto.run.config.run_checks import rate_notes
from stretto.run.config.schema import JobConfig, LoopConfig
from stretto.run.launch.failure import TrainingFailed, doing
from stretto.run.launch.lease import (
    RunFolderLost,
    check_folder,
    check_lease,
    leave_folder,
    lost_folder,
    share,
)
from stretto.run.launch.rendezvous import attempt_store
from stretto.run.launch.stop import StopRequest
from stretto.run.train.guard import BadStep, Guard, Judged, with_range
from stretto.run.train.metrics import TOKENS, Metrics, Words
from stretto.run.train.trend import LossTrend
from stretto.run.watch.limit import StepLimit
from stretto.run.watch.slow import SlowRanks, news

C = TypeVar("C", bound=JobConfig)
P = TypeVar("P", bound="Position")
Save = Callable[..., Path]
"""`engine.checkpoint.save.save`, or what begins to do the same in the background."""


@dataclass(kw_only=True)
class Position:
    """How far a run is; with the seed it says which samples come next."""

    step: int = 0  # steps made, those included whose update was skipped
    samples: int = 0  # up to which the run has come in their order
    counted_from: dict[str, int] = field(default_factory=lambda: {"step": 0, "samples": 0})
    """The step and the samples since which every step has taken a batch of the config's size."""
    loss: float | None = None  # of the last step that had one
    held_out_loss: float | None = None  # of an evaluation after the last step
    skipped: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Of these samples, the ranges [first, end) that no update was made by."""
    history: list[Judged] = field(default_factory=list[Judged])
    """What spikes are judged by (`Guard`); empty where none are looked for."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a session ended."""

    step: int
    loss: float | None  # of the last step; None where the run has made none
    stopped: bool  # by a signal, before the last step
    checkpoint: str | None  # the newest; None where it was stopped before there was one
    warning: str | None = None  # what is wrong with the run, though it came to its end


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one rank reports of a step or an evaluation. Tensors are on the ranks' devices, and stay there."""

    loss: float | Tensor = 0.0  # its part of the sum of all losses
    # one more than the number of the first microbatch whose loss is not finite; 0: all are
    bad_microbatch: float | Tensor = 0.0
    bad_weights: bool = False  # the step left weights that are not finite
    overflow: bool = False  # an update within the step was skipped
    memory_changed: float | Tensor = 0.0  # tensors that are not as the last update left them
    stop: bool = False  # it was asked to stop
    memory_gib: float = 0.0  # its peak so far
    busy_s: float = 0.0  # time since its last report in which it waited for no other rank; 0: not measured
    written: bool = False  # it has done its part of a checkpoint that is saved in the background
    write_failed: bool = False


# over all ranks
_SUMMED = ("loss", "bad_weights", "overflow", "memory_changed", "stop", "written", "write_failed")
_OF_EACH = ("bad_microbatch", "memory_gib", "busy_s")  # every rank learns those of each rank


@dataclass(frozen=True, kw_only=True)
class StepAgreement:
    """The reports of all ranks together, the same on every one of them."""

    loss: float  # sum over the ranks
    bad_microbatches: Mapping[int, int]  # the first on each rank that has one
    bad_weights: bool
    overflow: bool
    memory_changed: bool
    stop: bool
    memory_gib: float | None  # of the fullest rank; None where no rank measures it
    busy_s: tuple[float, ...]  # of each rank
    save_ready: bool  # all have done their part of a checkpoint, or one has failed: `BackgroundSave.advance`
    save_failed: bool
    known: tuple[float, ...] = ()  # numbers that every rank knew before, now on the host


class Agreement:
    """The reports of all ranks, on their way to each of them: one all-reduce, started here and waited for
    later. Without a process group this rank is alone.

    Of all that a step computes, the host reads nothing but this, in one copy from the device.

    Args:
        known: numbers that are the same on every rank, [n], to be read with it.
    """

    def __init__(self, report: StepReport, device: torch.device, known: Sequence[Tensor] = ()) -> None:
        rank, self._world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        places = {name: place for place, name in enumerate(_SUMMED)}
        places |= {name: len(_SUMMED) + i * self._world + rank for i, name in enumerate(_OF_EACH)}
        values = {name: getattr(report, name) for name in places}
        facts = torch.zeros(len(_SUMMED) + len(_OF_EACH) * self._world, dtype=torch.float64)
        for name, value in values.items():
            if not isinstance(value, Tensor):
                facts[places[name]] = value
        self._facts, self._work = facts.to(device, non_blocking=True), None
        for name, value in values.items():
            if isinstance(value, Tensor):
                self._facts[places[name]] = value
        self._known = [one.to(device, torch.float64, non_blocking=True) for one in known]
        if self._world > 1:
            self._work = dist.all_reduce(self._facts, async_op=True)

    def wait(self) -> StepAgreement:
        """What all ranks report."""
        if self._work is not None:
            self._work.wait()
        facts: list[float] = torch.cat([self._facts, *self._known]).tolist()
        numbers = iter(facts)
        summed = dict(zip(_SUMMED, numbers, strict=False))
        each = {name: list(islice(numbers, self._world)) for name in _OF_EACH}
        return StepAgreement(
            loss=summed["loss"],
            bad_microbatches={at: int(n) - 1 for at, n in enumerate(each["bad_microbatch"]) if n},
            bad_weights=summed["bad_weights"] > 0,
            overflow=summed["overflow"] > 0,
            memory_changed=summed["memory_changed"] > 0,
            stop=summed["stop"] > 0,
            memory_gib=max(each["memory_gib"]) or None,
            busy_s=tuple(each["busy_s"]),
            save_ready=summed["written"] == self._world or summed["write_failed"] > 0,
            save_failed=summed["write_failed"] > 0,
            known=tuple(numbers),
        )


def agree(report: StepReport, device: torch.device, known: Sequence[Tensor] = ()) -> StepAgreement:
    """Combine the reports of all ranks; see `Agreement`."""
    return Agreement(report, device, known).wait()


class TrainingLoop(ABC, Generic[C, P]):
    """The step loop of one rank, for any kind of model.

    Args:
        position: where the run is; `_step` moves it on.
        saved: the checkpoint that the run was resumed from.
        metrics: on rank 0 only.
    """

    def __init__(self, config: C, position: P, saved: Path | None, metrics: Metrics | None) -> None:
        self.config, self.position = config, position
        self.saved, self.metrics = saved, metrics
        self._saved_at = position.step if saved is not None else -1
        self.guard = Guard(config.guard, position.history)
        self._bad: BadStep | None = None  # a step that is to be rolled back
        self._copies, self._compared_at = ReplicaConsistencyCheck(), position.step
        self._memory = MemoryCheck()
        self._limit = StepLimit(config.train.hang_s, config.train.timeout_s)
        self._slow: SlowRanks | None = None  # on rank 0
        self._hosts: list[str] = []
        self.background = BackgroundSave(rank_device(config.train.device))
        self.trend = LossTrend()
        self._save_began = 0.0
        self._longest_save_s: float | None = None  # of this session

    @abstractmethod
    def _step(self, stop: StopRequest) -> bool:
        """One global batch; returns whether any rank was asked to stop."""

    @abstractmethod
    def evaluate(self) -> float:
        """Evaluate on held-out samples and report it; returns the loss there."""

    @abstractmethod
    def _write_checkpoint(self, save: Save) -> Path:
        """Write a checkpoint of this step with `save`, or begin to. Collective over all ranks."""

    @abstractmethod
    def _held(self) -> RankTensors:
        """Weights and optimiser states of this rank, of which other ranks may have copies."""

    @abstractmethod
    def _updated(self) -> Mapping[str, Tensor]:
        """Weights and optimiser states of this rank, in memory, that nothing but an update changes."""

    @property
    def _drained(self) -> bool:
        """Whether no later step has begun."""
        return True

    @abstractmethod
    def _restore(self, path: Path) -> P:
        """Fill the model and its optimisers from a checkpoint of this run; returns its position. Collective
        over all ranks.
        """

    def train(self, stop: StopRequest) -> bool:
        """Train to the last step, or to the step at which a rank was asked to stop; then save, unless what is
        left of `train.grace_s` is too short for it.

        Returns:
            Whether it was stopped before the last step.
        """
        if self.metrics is not None:
            self.metrics.on_loss = stop.ask  # all ranks end, and save elsewhere
        try:
            return self._train(stop)
        finally:
            self.background.close()

    def _train(self, stop: StopRequest) -> bool:
        steps, position = self.config.train.steps, self.position
        stopped = position.step < steps and any(gather_json(stop.signal is not None))
        if stopped:
            self.note(f"asked to stop before step {position.step + 1}")
            return True
        self._hosts = gather_json(socket.gethostname())
        if len(self._hosts) > 1 and this_rank() == 0:
            self._slow = SlowRanks(self._same_work())
        if position.step >= steps:
            self.note(f"nothing to do: {position.step} of train.steps={steps} steps are done")
        elif self.saved is None and self.config.guard.rolls_back:
            self.save()  # what the first rollback goes back to
        while position.step < steps and not stopped:
            with doing(f"in step {position.step + 1}"), self._limit.step(position.step + 1):
                position.held_out_loss = None
                stopped = self._step(stop) and position.step < steps
                self._compare_copies(stopped)
                self._check_memory()
            self.trend.add(position.loss)
            if self._bad is not None:
                with doing(f"going back before step {position.step}"):
                    self._roll_back(self._bad)
                stopped = False  # a rank that was asked to stop says so again in the next step
            elif stopped:
                self._check_folder()
                if not self._can_save(stop):
                    self.finish_save()
                    return True
                self.note(f"asked to stop: saving after step {position.step}")
            else:
                with doing(f"after step {position.step}"):
                    self._after(position.step)
        self.finish_save()
        if self._saved_at != position.step:
            with doing(f"saving after step {position.step}"):
                self.save()
        return stopped

    def _drain_after(self, step: int) -> int:
        """The first step after this one that leaves nothing under way, for it is followed by an evaluation or
        a checkpoint, or is the last.
        """
        every = (self.config.eval.every, self.config.checkpoint.every)
        return min([self.config.train.steps, *(step + each - step % each for each in every if each)])

    def _after(self, step: int) -> None:
        """What the config asks for between two steps."""
        every, save_every = self.config.eval.every, self.config.checkpoint.every
        if every and (step % every == 0 or step == self.config.train.steps):
            with PROGRESS.long("evaluation"):
                loss = self.evaluate()
            self.position.held_out_loss = loss if isfinite(loss) else None
        if save_every and step % save_every == 0 and step < self.config.train.steps:
            self.save(background=self.config.checkpoint.async_save)

    def _compare_copies(self, stopped: bool) -> None:
        """Where it is time to, compare what several ranks hold of the same: every so many steps, before every
        checkpoint, and before a rollback, whose samples are not to blame where copies differ. Collective.

        Raises:
            TrainingFailed: copies differ, and the guard stops there.
        """
        step, every = self.position.step, self.config.guard.check_replicas
        if every is None or not self._drained:
            return
        save_every = self.config.checkpoint.every or self.config.train.steps
        saved = stopped or step % save_every == 0 or step == self.config.train.steps
        if not saved and self._bad is None and step - self._compared_at < every:
            return
        self._compared_at = step
        differences = self._copies.differences(self._held())
        if differences:
            reason = f"copies differ: {report(differences)}"
            self._bad = self.guard.differ(step, reason, self.position.samples)
            self._pass_over(self._bad)

    def _check_memory(self) -> None:
        """Where it is time to, begin to watch what the step has left, until the update of the next."""
        every, step = self.config.guard.check_memory, self.position.step
        if every is None or self._bad is not None or step % every:
            self._memory.end()
        else:
            self._memory.begin(self._updated())

    def _pass_over(self, bad: BadStep) -> None:
        """Keep and tell what was wrong with a step, and take its samples as skipped or prepare to go back."""
        then = "its update is skipped" if bad.action == "skip" else "going back to a checkpoint"
        if not bad.whole:
            then = "updates with such gradients were skipped"
        self.note(f"{bad}; {then}")
        if self.metrics is not None:
            self.metrics.event(bad.facts())
        if bad.action == "rollback":
            self._bad = bad
        elif bad.whole:
            self.position.skipped = with_range(self.position.skipped, bad.samples)

    def _roll_back(self, bad: BadStep) -> None:
        """Go on from the newest whole checkpoint of this run, behind the samples of the bad step.

        Raises:
            TrainingFailed: there is none.
        """
        self._bad, position = None, self.position
        if (lost := self._lost_folder()) is not None:
            if len(bad.samples):
                position.skipped = with_range(position.skipped, bad.samples)
            self._rescue(lost, weights=len(bad.samples) > 0)  # where copies differ, some are wrong
        self.finish_save()
        with self._rescuing(weights=False):
            path = latest(self.config.run.folder / "checkpoints", self.note, bad.before)
            if path is None:
                raise TrainingFailed(f"{bad}; there is no whole checkpoint to go back to")
            restored = self._restore(path)
        vars(position).update(vars(restored))
        if len(bad.samples):  # else the samples are not to blame
            position.skipped = with_range(position.skipped, range(position.samples, bad.samples.stop))
            position.samples = bad.samples.stop
            position.counted_from = {"step": position.step, "samples": position.samples}
        self.guard.history = position.history
        self.saved = path
        self._saved_at = self._compared_at = position.step
        if self.metrics is not None:
            self.metrics.rewind(position.step)

    def _same_work(self) -> Sequence[Sequence[int]]:
        """All ranks, those together that have the same work in every step; alone where that is not known."""
        return [[rank] for rank in range(len(self._hosts))]

    def _slow_ranks(self, busy_s: Sequence[float], seconds: float) -> dict[str, float] | None:
        """The ranks that are slow after a step, for its record, and how many times longer than usual they
        take; tells people what is new. None: there are none, or this is not rank 0.

        Args:
            busy_s: of each rank; see `StepReport`.
            seconds: that the step took.
        """
        if self._slow is None:
            return None
        before, now = self._slow.slow, self._slow.add(busy_s, seconds)
        for line in news(before, now, self._hosts):
            self.note(line)
        return {str(rank): factor for rank, factor in now.items()} or None

    def save(self, background: bool = False) -> None:
        """Write a checkpoint of this step, or begin to; one that is still being written comes before."""
        if background and self.background.busy and self.config.checkpoint.if_busy == "skip":
            self.note(f"step {self.position.step}: no checkpoint, the last one is still being written")
            return
        self.finish_save()
        self._check_folder()
        check_lease(self.config.run.folder)
        self._save_began = time.monotonic()
        with PROGRESS.long("saving a checkpoint"), self._rescuing():
            path = self._write_checkpoint(self.background.start if background else save)
        self._saved_at = self.position.step
        if not background:
            self._note_saved(path)

    def advance_save(self, ready: bool) -> None:
        """Go on with the checkpoint that is saved in the background, where all ranks have agreed that it can
        (`StepAgreement.save_ready`). Only between two steps of all ranks.
        """
        if not ready:
            return
        with self._rescuing():
            path = self.background.advance()
        if path is not None:
            self._note_saved(path)

    def finish_save(self) -> None:
        """Wait for the checkpoint that is saved in the background."""
        if self.background.busy:
            with PROGRESS.long("waiting for a checkpoint to be written"), self._rescuing():
                path = self.background.finish()
            self._note_saved(path)

    def _note_saved(self, path: Path) -> None:
        self._longest_save_s = max(self._longest_save_s or 0.0, time.monotonic() - self._save_began)
        self.saved = path
        self.note(f"saved {path}")

    def _lost_folder(self) -> str | None:
        """Why the run's folder is not its own any more; None: it is. Collective."""
        metrics, folder = self.metrics, self.config.run.folder
        return run_on_first(lambda: lost_folder(folder) if metrics is None else metrics.check_folder())

    def _check_folder(self) -> None:
        """Rescue the run and raise RunFolderLost if its folder is not its own any more. Collective."""
        if (lost := self._lost_folder()) is not None:
            self._rescue(lost)

    @contextmanager
    def _rescuing(self, weights: bool = True) -> Generator[None]:
        """Rescue the run if the block fails since its folder is gone. Its errors are those of all ranks."""
        try:
            yield
        except RunFolderLost:
            raise
        except (StrettoError, CollectiveError, TrainingFailed):
            if (lost := self._lost_folder()) is not None:
                self._rescue(lost, weights)
            raise

    def _rescue(self, lost: str, weights: bool = True) -> NoReturn:
        """Write what this job holds to a new folder beside the run's, and end it. Collective.

        Args:
            lost: what has become of the run's folder.
            weights: they are right; else config and records are all that is written.

        Raises:
            RunFolderLost: always; it names the new folder.
        """
        leave_folder()
        run = self.config.run
        try:
            name, cut = run_on_first(self._write_records)
        except (StrettoError, CollectiveError) as error:
            raise RunFolderLost(f"{lost}; nothing could be written elsewhere: {error}") from None
        self.config = replace(self.config, run=replace(run, name=name))
        text = f"{lost}; its config and records are now in {self.config.run.folder}"
        text += f" (of {', '.join(cut)} only the newest lines are left)" if cut else ""
        if not weights:
            raise RunFolderLost(f"{text}, without weights, for those of some ranks were wrong")
        try:
            path = self._write_checkpoint(save)
        except (StrettoError, CollectiveError, TrainingFailed) as error:
            raise RunFolderLost(f"{text}; its weights could not be saved: {error}") from None
        raise RunFolderLost(f"{text}, with {path.name}", hint=f"go on with run.name={name} --resume auto")

    def _write_records(self) -> tuple[str, list[str]]:
        """On rank 0, a new folder with config and records; its name, and which records are not complete."""
        run, number = self.config.run, 1
        renamed = replace(run, name=f"{run.name}-rescued")
        while renamed.folder.exists():
            number += 1
            renamed = replace(run, name=f"{run.name}-rescued-{number}")
        renamed.folder.mkdir(parents=True, mode=0o700 if run.private else 0o777)
        config = replace(self.config, run=renamed)
        (renamed.folder / "config.yaml").write_text(dump(config), encoding="utf-8")
        return renamed.name, [] if self.metrics is None else self.metrics.rescue(renamed.folder)

    def _can_save(self, stop: StopRequest) -> bool:
        """Whether the time since the signal leaves enough of `train.grace_s` for the longest save so far, on
        all ranks; without a save so far one is tried. Collective.
        """
        grace, longest = self.config.train.grace_s, self._longest_save_s
        if grace is None or longest is None:
            return True
        since = time.monotonic() - (stop.since or time.monotonic())
        ranks = gather_json([grace - since, longest])
        left, needed = min(one[0] for one in ranks), max(one[1] for one in ranks)
        if left >= needed:
            return True
        self.note(
            f"asked to stop: a save takes {needed:.1f} s and {max(left, 0):.1f} s of train.grace_s are left; "
            f"none is begun, the last is {self.saved or 'missing'}"
        )
        return False

    def note(self, text: str) -> None:
        """Tell people a line, on rank 0."""
        if self.metrics is not None:
            self.metrics.note(text)


@contextmanager
def process_group(train: LoopConfig) -> Generator[torch.device]:
    """Join the ranks of the job that RANK and WORLD_SIZE describe; yields this rank's device."""
    torch.set_num_threads(train.threads)
    device = rank_device(train.device)
    timeout = timedelta(seconds=train.timeout_s)
    attempt = attempt_store(train.start_s, timeout)
    try:
        dist.init_process_group(
            backend_for(device.type, train.backend),
            store=attempt.store,
            rank=attempt.rank,
            world_size=attempt.world,
            timeout=timeout,
        )
        try:
            yield device
        finally:
            dist.destroy_process_group()
    finally:
        attempt.ended.set()


def start_run(
    config: JobConfig,
    step: int,
    keep: Callable[[Path], object],
    cleanup: ExitStack,
    *,
    notes: Sequence[str] = (),
    quiet: bool = False,
    words: Words = TOKENS,
) -> Metrics | None:
    """Take part in the run's folder, and open it on rank 0, with the config as resolved; returns where its
    numbers go.

    Args:
        step: that the run goes on from.
        keep: writes into the folder what else belongs to the run.
        cleanup: closes the metrics at its end.
        notes: lines to tell first.
        quiet: write nothing to stdout; the progress goes to stderr.

    Raises:
        StrettoError: the folder cannot be written to.
    """
    run = config.run.folder
    cleanup.enter_context(share(run))
    if dist.get_rank() != 0:
        return None
    check_folder(run)
    try:
        run.mkdir(parents=True, exist_ok=True)
        if config.run.private:
            run.chmod(0o700)
        (run / "config.yaml").write_text(dump(config), encoding="utf-8")
        keep(run)
        metrics = Metrics(
            run,
            steps=config.train.steps,
            start=step,
            every=config.metrics.every,
            board=config.metrics.board(run),
            out=sys.stderr if quiet else None,
            words=words,
            keep=keep,
        )
    except OSError as error:
        raise StrettoError(
            f"run folder {run} cannot be written to: {error.strerror or error}", hint="give another run.dir"
        ) from None
    cleanup.enter_context(metrics)
    for note in [*rate_notes(config.optim.rate, config.train.steps), *notes]:
        metrics.note(note)
    return metrics
