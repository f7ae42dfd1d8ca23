"""The checkpoints of a run: which one it resumes from, when and how new ones are saved, and what is saved
elsewhere if the run's folder is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from stretto.engine.checkpoint.background import BackgroundSave
from stretto.engine.checkpoint.folder import HELD_OUT_LOSS, Retention, checkpoints, clean, is_checkpoint
from stretto.engine.checkpoint.load import latest
from stretto.engine.checkpoint.manifest import read_manifest
from stretto.engine.checkpoint.metadata import COUNTED_FROM
from stretto.engine.checkpoint.save import save
from stretto.engine.parallel.control import CollectiveError, gather_json, run_on_first
from stretto.engine.progress import PROGRESS
from stretto.errors import StrettoError
from stretto.run.config import dump
from stretto.run.config.schema import JobConfig
from stretto.run.config.section import plain_section
from stretto.run.launch.failure import TrainingFailed
from stretto.run.launch.lease import RunFolderLost, check_lease, leave_folder, lost_folder
from stretto.run.launch.restart import restart_count
from stretto.run.launch.stop import StopRequest
from stretto.run.train.guard import BadStep, add_range
from stretto.run.train.hooks import Hooks
from stretto.run.train.metrics import Metrics
from stretto.run.train.resume import checkpoint_path, no_checkpoint_error
from stretto.run.train.task import Log, RunTask, TrainProgress


class Checkpointer:
    """Saves the checkpoints of one run. All methods are collective.

    Attributes:
        newest: the last checkpoint that was saved, at first the one that the run was resumed from, or None.
        hooks: of the run; their states are saved.
        background: the save in progress, if `checkpoint.async_save` asks for it.

    Args:
        config: of the job; saved with each checkpoint.
        metrics: on rank 0 only.
    """

    def __init__(
        self,
        config: JobConfig,
        task: RunTask,
        progress: TrainProgress,
        newest: Path | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.newest, self.background = newest, BackgroundSave(task.device)
        self._config, self._metrics = config, metrics
        self._task, self._progress = task, progress
        self._saved_step = progress.step if newest is not None else -1
        self._started = 0.0  # clock of the last save
        self._longest_s: float | None = None  # save of this session
        self.hooks: Hooks | None = None

    @property
    def is_saved(self) -> bool:
        """True if a checkpoint of the present step has been saved, or is being saved."""
        return self._saved_step == self._progress.step

    @property
    def every(self) -> int | None:
        """Steps from one checkpoint to the next, or None if only the end of the run is saved."""
        return self._config.checkpoint.every

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint is to be saved after this step, which is not the last."""
        return self.every is not None and step % self.every == 0 and step < self._config.train.steps

    def save_if_due(self) -> None:
        """Save a checkpoint of the present step if `checkpoint.every` asks for one, in the background if
        `checkpoint.async_save` does.
        """
        if not self.is_due(self._progress.step):
            return
        if not self._config.checkpoint.async_save:
            self.save()
        elif self.background.busy and self._config.checkpoint.if_busy == "skip":
            step = self._progress.step
            self._task.log(f"step {step}: no checkpoint, the last one is still being written")
        else:
            self.finish()
            with self._timed_save():
                self._write(self.background.start)

    def save(self) -> None:
        """Save a checkpoint of the present step. Waits for one that is still being written.

        Raises:
            TrainingFailed: weights are not finite; nothing is written.
            RunFolderLost: the run's folder is gone; the run has been saved elsewhere.
        """
        self.finish()
        with self._timed_save():
            path = self._write(save)
        self._report(path)

    @contextmanager
    def _timed_save(self) -> Generator[None]:
        self.check_folder()
        check_lease(self._config.run.folder)
        self._started = time.monotonic()
        with PROGRESS.long("saving a checkpoint"), self._rescuing():
            yield
        self._saved_step = self._progress.step

    def advance(self) -> None:
        """Continue the save in the background, once all ranks have agreed that it can (`save_ready`). Only
        between two steps of all ranks.
        """
        with self._rescuing():
            path = self.background.advance()
        if path is not None:
            self._report(path)

    def finish(self) -> None:
        """Wait for the save in the background."""
        if self.background.busy:
            with PROGRESS.long("waiting for a checkpoint to be written"), self._rescuing():
                path = self.background.finish()
            self._report(path)

    def _report(self, path: Path) -> None:
        self._longest_s = max(self._longest_s or 0.0, time.monotonic() - self._started)
        self.newest = path
        self._task.log(f"saved {path}")
        if self.hooks is not None:
            self.hooks.call("on_checkpoint", self._saved_step, path)

    def _write(self, write: Callable[..., Path]) -> Path:
        config, step = self._config, self._progress.step
        if (name := self._task.bad_weight()) is not None:
            raise TrainingFailed(f"after step {step}: weights are not finite; first {name}")
        content, limits = self._task.checkpoint(self._progress), config.checkpoint
        states = {} if self.hooks is None else {"hooks": self.hooks.state()}
        return write(
            folder=config.run.folder / "checkpoints",
            step=step,
            tensors=content.tensors,
            meta={**content.meta, "config": plain_section(config), **states},
            per_rank=content.per_rank,
            keep=Retention(last=limits.keep, every=limits.keep_every, best=limits.keep_best),
            before_commit=lambda: check_lease(config.run.folder),
        )

    def can_save(self, stop: StopRequest) -> bool:
        """Return True if the time since the signal leaves enough of `train.grace_s` for the longest save so
        far, on all ranks; without a save so far one is tried.
        """
        grace, longest = self._config.train.grace_s, self._longest_s
        if grace is None or longest is None:
            return True
        since = time.monotonic() - (stop.since or time.monotonic())
        ranks = gather_json([grace - since, longest])
        left, needed = min(rank[0] for rank in ranks), max(rank[1] for rank in ranks)
        if left >= needed:
            return True
        self._task.log(
            f"asked to stop: a save takes {needed:.1f} s and {max(left, 0):.1f} s of train.grace_s are left; "
            f"none is begun, the last is {self.newest or 'missing'}"
        )
        return False

    def roll_back(self, bad: BadStep) -> TrainProgress:
        """Fill the task from the newest intact checkpoint of this run from before a bad step.

        Raises:
            TrainingFailed: there is none.
        """
        if (lost := self._lost_folder()) is not None:
            progress = self._progress
            if len(bad.samples):
                progress.skipped = add_range(progress.skipped, bad.samples)
            # without samples to blame, ranks disagree, and the weights of some are wrong
            self._rescue(lost, weights=len(bad.samples) > 0)
        self.finish()
        with self._rescuing(weights=False):
            path = latest(self._config.run.folder / "checkpoints", self._task.log, bad.before)
            if path is None:
                raise TrainingFailed(f"{bad}; there is no whole checkpoint to go back to")
            restored = self._task.restore(path, check=False)
        if self.hooks is not None:
            self.hooks.load_state(read_manifest(path).meta.get("hooks", {}))
        self.newest, self._saved_step = path, restored.step
        return restored

    # The run's folder, and what is saved elsewhere if it is gone.

    def check_folder(self) -> None:
        """Save the run elsewhere and raise RunFolderLost if its folder is not its own any more."""
        if (lost := self._lost_folder()) is not None:
            self._rescue(lost)

    def _lost_folder(self) -> str | None:
        """Return why the run's folder is not its own any more, or None."""
        metrics, folder = self._metrics, self._config.run.folder
        return run_on_first(lambda: lost_folder(folder) if metrics is None else metrics.check_folder())

    @contextmanager
    def _rescuing(self, weights: bool = True) -> Generator[None]:
        """Save the run elsewhere if the block fails because its folder is gone. Its errors are those of all
        ranks.
        """
        try:
            yield
        except RunFolderLost:
            raise
        except (StrettoError, CollectiveError, TrainingFailed):
            if (lost := self._lost_folder()) is not None:
                self._rescue(lost, weights)
            raise

    def _rescue(self, lost: str, weights: bool = True) -> NoReturn:
        """Save this job's state to a new folder next to the run's, and end it.

        Args:
            lost: what happened to the run's folder.
            weights: True if they are right; otherwise only config and records are written.

        Raises:
            RunFolderLost: always; it names the new folder.
        """
        leave_folder()
        run, metrics = self._config.run, self._metrics

        def write_records() -> tuple[str, list[str]]:
            """On rank 0: make a folder with config and records; return its name and what records are cut."""
            count, renamed = 1, replace(run, name=f"{run.name}-rescued")
            while renamed.folder.exists():
                count += 1
                renamed = replace(run, name=f"{run.name}-rescued-{count}")
            renamed.folder.mkdir(parents=True, mode=0o700 if run.private else 0o777)
            config = replace(self._config, run=renamed)
            (renamed.folder / "config.yaml").write_text(dump(config), encoding="utf-8")
            return renamed.name, [] if metrics is None else metrics.rescue(renamed.folder)

        try:
            name, cut = run_on_first(write_records)
        except (StrettoError, CollectiveError) as error:
            raise RunFolderLost(f"{lost}; nothing could be written elsewhere: {error}") from None
        self._config = replace(self._config, run=replace(run, name=name))
        text = f"{lost}; its config and records are now in {self._config.run.folder}"
        text += f" (of {', '.join(cut)} only the newest lines are left)" if cut else ""
        if not weights:
            raise RunFolderLost(f"{text}, without weights, for those of some ranks were wrong")
        try:
            path = self._write(save)
        except (StrettoError, CollectiveError, TrainingFailed) as error:
            raise RunFolderLost(f"{text}; its weights could not be saved: {error}") from None
        raise RunFolderLost(f"{text}, with {path.name}", hint=f"continue with run.name={name} --resume auto")


def find_checkpoint(resume: str, run: Path, log: Log) -> Path | None:
    """Return the checkpoint that `checkpoint.resume` names: a given one, the newest intact one of a run, or
    None. A job that was started again resumes from its own newest one, if it has any. What crashed saves have
    left in the run's folder is removed first. Collective.

    Args:
        run: the run's folder.
        log: called on rank 0 with a line for each damaged checkpoint that is skipped.

    Raises:
        StrettoError: all checkpoints are damaged, or a path is named that has none.
    """
    folder = run / "checkpoints"

    def newest(path: Path) -> Path | None:
        intact = latest(path, log)
        if intact is None and checkpoints(path):
            raise StrettoError(
                f"no checkpoint in {path} is whole",
                hint="`stretto checkpoint verify` says more; a new run.name starts afresh",
            )
        return intact

    run_on_first(lambda: clean(folder))
    if restart_count() and (restarted := newest(folder)) is not None:
        return restarted
    if resume == "never":
        return None
    path = checkpoint_path(resume, run)
    if is_checkpoint(path):
        return path
    intact = newest(path)
    if intact is None and resume != "auto":
        raise no_checkpoint_error(resume)
    return intact


def common_meta(progress: TrainProgress, seed: int) -> dict[str, Any]:
    """Return the metadata of a checkpoint that all tasks have."""
    return {
        "step": progress.step,
        "samples": progress.samples,
        COUNTED_FROM: progress.counted_from,
        "loss": progress.loss,
        HELD_OUT_LOSS: progress.held_out_loss,
        "skipped": progress.skipped,
        "history": progress.history,
        "seed": seed,
    }


def restored_progress(meta: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Return the fields of `TrainProgress` from a checkpoint's metadata.

    Args:
        batch: samples per step from now on; if it differs from the checkpoint's, or that is unknown, steps
            and samples are counted from this step on.
    """
    before = meta.get("config", {}).get("batch", {}).get("global_size")
    continues = COUNTED_FROM in meta and before == batch
    counted_from = meta[COUNTED_FROM] if continues else {name: meta[name] for name in ("step", "samples")}
    return {
        "step": meta["step"],
        "samples": meta["samples"],
        "counted_from": {**counted_from},
        "loss": meta.get("loss"),
        "skipped": [(first, last) for first, last in meta.get("skipped", [])],
        "history": [(loss, norm) for loss, norm in meta.get("history", [])],
    }


def log_resumed(path: Path, meta: Mapping[str, Any], seed: int, log: Log, changed: str | None) -> None:
    """Log from which checkpoint the run resumes, and warn of what changes its samples from there on.

    Args:
        seed: the run's.
        changed: what of the data differs from the checkpoint's, or None.
    """
    log(f"resumed from {path} at step {meta['step']}")
    if changed is not None:
        log(f"warning: {changed} differ from the checkpoint's; samples continue by index in the new data")
    if meta.get("seed", seed) != seed:
        log(f"warning: train.seed is {seed}, the run began with {meta['seed']}: another order")
