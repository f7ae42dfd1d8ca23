"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and Trackio, each through its own client.

One rank of a job opens them. Each has a thread: a slow network delays no step, and a failure is reported once
while training continues. A resumed run keeps its identity, which is in `trackers.json` in its folder.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, Protocol, cast
from uuid import uuid4

from stretto.errors import StrettoError
from stretto.versions import __version__

IDENTITY = "trackers.json"
_STEP = "train/global_step"
_OPEN_S, _CLOSE_S = 60.0, 60.0  # how long a start and an end wait for a tracker
_MOST_RANKS = 64  # whose memory is logged rank by rank
_BACKLOG = 1000  # records that wait for a slow tracker; later ones are dropped


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The description of a run with which a tracker is opened.

    Attributes:
        identity: of the run, the same after every resume.
        project: W&B's and Trackio's project, MLflow's experiment; None for that of the client's environment.
        config: of the job, section by section.
        versions: of the code (`code_version`), and the number of ranks.
        start: step after which this session continues.
        resumed: an earlier session has the same identity.
        board: folder of TensorBoard's files.
    """

    identity: str
    name: str
    folder: Path
    project: str | None
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    start: int
    resumed: bool
    board: Path

    def project_or(self, variable: str) -> str:
        """Return the project, by default that of an environment variable, else `stretto`."""
        return self.project or os.environ.get(variable) or "stretto"


class Tracker(Protocol):
    """Where numbers and texts of a run go; `close` ends it."""

    def log(self, numbers: Mapping[str, float], step: int) -> object: ...

    def text(self, name: str, text: str, step: int) -> object: ...

    def close(self, failed: bool) -> object: ...


class TensorBoard:
    """Files of TensorBoard, which hides what an earlier session has written from the first step on."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = lambda start: SummaryWriter(str(run.board), purge_step=start + 1)
        self._writer = self._open(run.start)
        for name, values in (("config", run.config), ("versions", run.versions)):
            self.text(name, f"```json\n{json.dumps(values, indent=1, default=str)}\n```", run.start + 1)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        if any(name.startswith("eval/") for name in numbers):
            self._writer.flush()

    def text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, text, step)

    def rewind(self, start: int) -> None:
        self._writer.close()
        self._writer = self._open(start)

    def close(self, failed: bool) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; offline files (`WANDB_MODE=offline`) are in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        wandb = import_module("wandb")

        os.environ.setdefault("WANDB_CONSOLE", "off")  # the launcher reads this rank's output
        self._wandb = wandb
        self._run = wandb.init(
            project=run.project_or("WANDB_PROJECT"),
            id=run.identity,
            name=run.name,
            dir=run.folder,
            resume="allow",
            settings=wandb.Settings(init_timeout=_OPEN_S / 2),
        )
        self._run.config.update({**run.config, "versions": run.versions}, allow_val_change=True)
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP, step_sync=True)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log({**numbers, _STEP: step})

    def text(self, name: str, text: str, step: int) -> None:
        table = self._wandb.Table(columns=["step", "text"], data=[[step, text]])
        self._run.log({name: table, _STEP: step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow at `MLFLOW_TRACKING_URI`; fields of the config are its parameters."""

    def __init__(self, run: TrackedRun) -> None:
        entities = import_module("mlflow.entities")
        self._metric, self._client = entities.Metric, import_module("mlflow").MlflowClient()
        client, tag = self._client, "stretto.run"
        experiment = run.project_or("MLFLOW_EXPERIMENT_NAME")
        existing = client.get_experiment_by_name(experiment)
        place = client.create_experiment(experiment) if existing is None else existing.experiment_id
        earlier = client.search_runs([place], f"tags.`{tag}` = '{run.identity}'") if run.resumed else []
        opened = (
            earlier[0] if earlier else client.create_run(place, tags={tag: run.identity}, run_name=run.name)
        )
        self._id = opened.info.run_id
        client.update_run(self._id, status="RUNNING")
        for name, value in run.versions.items():
            source = "mlflow.source.git.commit" if name == "git_commit" else f"stretto.{name}"
            client.set_tag(self._id, source, str(value))
        if not earlier:  # MLflow never changes a parameter; the file below is of each session
            parameters = [entities.Param(name, str(value)[:500]) for name, value in _flat(run.config, ".")]
            for first in range(0, len(parameters), 100):
                client.log_batch(self._id, params=parameters[first : first + 100])
        client.log_dict(self._id, dict(run.config), f"config-from-step-{run.start}.json")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        values = [self._metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=values)

    def text(self, name: str, text: str, step: int) -> None:
        self._client.log_text(self._id, text, f"{name}/step-{step}.txt")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class Trackio:
    """A run of Trackio, in its folder of this machine (`TRACKIO_DIR`) or where its environment says."""

    def __init__(self, run: TrackedRun) -> None:
        trackio = import_module("trackio")

        self._trackio = trackio
        self._run = trackio.init(
            project=run.project_or("TRACKIO_PROJECT"),
            name=f"{run.name}-{run.identity}",
            config={**run.config, "versions": dict(run.versions)},
            resume="allow",
            embed=False,
        )

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._run.log({name: self._trackio.Markdown(text)}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}
_INSTEAD = {  # what a user without a network or a login does
    "wandb": "WANDB_MODE=offline keeps the run's files in its folder, or `wandb login`",
    "mlflow": "MLFLOW_TRACKING_URI=sqlite:///mlflow.db needs no server",
}


class _Worker:
    """Makes one tracker's calls on a thread of its own, in order."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name, self.failures = name, queue.SimpleQueue[str]()
        self._run, self._failed = run, False
        self._calls = queue.Queue[Callable[[Tracker], object]](_BACKLOG)
        self._opened, self._ended = threading.Event(), threading.Event()
        self.error: str | None = "no answer"
        threading.Thread(target=self._work, name=f"tracker {name}", daemon=True).start()

    def opened(self) -> str | None:
        """Wait until the tracker is open; return why it is not, or None."""
        if not self._opened.wait(_OPEN_S):
            self._ended.set()
            return f"no answer within {_OPEN_S:.0f} s"
        return self.error

    def _work(self) -> None:
        try:
            tracker = TRACKERS[self.name](self._run)
            self.error = None
        except Exception as error:  # of any class: the clients have many
            self.error = f"{type(error).__name__}: {error}"
            self._ended.set()
            return
        finally:
            self._opened.set()
        while not self._ended.is_set():
            call = self._calls.get()
            try:
                call(tracker)
            except Exception as error:
                self.fail(f"{type(error).__name__}: {error}")

    def fail(self, reason: str) -> None:
        """Note the first failure, for the main thread to print."""
        if not self._failed:
            self._failed = True
            self.failures.put(f"warning: {self.name} does not take records; training continues ({reason})")

    def call(self, call: Callable[[Tracker], object]) -> None:
        """Have a call made, unless too many wait."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self.fail(f"{_BACKLOG} records wait; later ones are dropped")

    def close(self, failed: bool) -> None:
        """Make the calls that wait, and close the tracker, if it does not take too long."""

        def end(tracker: Tracker) -> None:
            try:
                tracker.close(failed)
            finally:
                self._ended.set()

        self.call(end)
        if not self._ended.wait(_CLOSE_S):
            self.fail(f"it did not end within {_CLOSE_S:.0f} s")


class Trackers:
    """All trackers of a run. What an earlier session has logged, or this one before it went back to a
    checkpoint, is not logged again, but in TensorBoard's files, where later steps replace earlier ones.

    Args:
        names: of `TRACKERS`.
        run: what they are told.
        recorded: the last step that the run's records have before this session, of `train` and of `eval`.
        required: fail if one cannot be opened; otherwise, as in a restart, report it and train without.

    Raises:
        StrettoError: one cannot be opened.
    """

    def __init__(
        self, names: list[str], run: TrackedRun, recorded: Mapping[str, int], required: bool = True
    ) -> None:
        self._newest = {"train": run.start, "eval": run.start}
        logged = _logged_steps(names, run, recorded)
        with redirect_stdout(sys.stderr):  # clients greet on stdout, which `--json` keeps clean
            workers = [_Worker(name, run) for name in names]
            errors = {worker.name: error for worker in workers if (error := worker.opened()) is not None}
        self._notes = list[str]()
        for name, error in errors.items():
            if required:
                instead = f"{_INSTEAD[name]}; or " if name in _INSTEAD else ""
                raise StrettoError(
                    f"{name}, of metrics.to, cannot be opened: {error}",
                    hint=f"{instead}leave it out of metrics.to",
                )
            self._notes.append(f"warning: {name} cannot be opened; training continues without ({error})")
        self._workers = [worker for worker in workers if worker.name not in errors]
        self._logged = {worker.name: logged[worker.name] for worker in self._workers}
        for name, steps in self._logged.items():
            if steps["train"] > run.start:
                self._notes.append(f"{name} keeps its steps up to {steps['train']}, which are trained again")

    def log(self, numbers: Mapping[str, float], step: int, group: str = "train") -> None:
        """Log numbers of a step, among those of `train` or of `eval`."""
        self._newest[group] = max(self._newest[group], step)
        for worker in self._workers:
            if step > self._logged[worker.name][group]:
                worker.call(lambda tracker: tracker.log(numbers, step))

    def text(self, name: str, text: str, step: int) -> None:
        """Log a text, such as a sample of what the model writes."""
        for worker in self._workers:
            if step > self._logged[worker.name]["train"]:
                worker.call(lambda tracker: tracker.text(name, text, step))

    def rewind(self, start: int) -> None:
        """Continue after step `start`, from a checkpoint."""
        for worker in self._workers:
            if worker.name == "tensorboard":
                worker.call(lambda tracker: cast("TensorBoard", tracker).rewind(start))
            else:
                logged = self._logged[worker.name]
                logged.update({group: max(logged[group], step) for group, step in self._newest.items()})

    def notes(self) -> Iterator[str]:
        """Yield what is to be printed of the trackers since the last call."""
        while self._notes:
            yield self._notes.pop(0)
        for worker in self._workers:
            while not worker.failures.empty():
                yield worker.failures.get()

    def close(self, failed: bool) -> None:
        """Close all; records that wait are still sent."""
        with redirect_stdout(sys.stderr):
            for worker in self._workers:
                worker.close(failed)


def numbers_of(group: str, record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record as `group/name`, by the names that trackers' users search for."""
    return {
        f"{group}/{name.removesuffix('_per_s')}{'_per_second' if name.endswith('_per_s') else ''}": value
        for name, value in _flat(record, "/")
        if name != "step" and isinstance(value, int | float)
    }


def memory_numbers(device: Sequence[float], host: Sequence[float]) -> dict[str, float]:
    """Return the peaks of the ranks, GiB, for the trackers: of the fullest and the emptiest rank with their
    numbers, and of each rank of a job of up to 64.
    """
    numbers = dict[str, float]()
    for kind, peaks in (("device", device), ("host", host)):
        if not any(peaks):  # none is measured
            continue
        for name, peak in (("max", max(peaks)), ("min", min(peaks))):
            numbers |= {f"memory/{kind}_{name}_gib": peak, f"memory/{kind}_{name}_rank": peaks.index(peak)}
        if len(peaks) <= _MOST_RANKS:
            numbers |= {f"memory/{kind}_gib/rank_{rank}": peak for rank, peak in enumerate(peaks)}
    return numbers


def code_version() -> dict[str, str | bool]:
    """Return the versions of stretto, torch and Python and, in a git work tree, its commit and whether
    tracked files differ from it.
    """
    versions: dict[str, str | bool] = {"stretto": __version__, "python": python_version()}
    versions["torch"] = version("torch")
    try:
        commit, changes = (
            subprocess.run(["git", *command], capture_output=True, text=True, timeout=10, check=True).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):  # no git, or no work tree
        return versions
    return {**versions, "git_commit": commit.strip(), "git_dirty": bool(changes.strip())}


def run_identity(folder: Path, resumed: bool) -> str:
    """Return the identity of the run in a folder: that of its earlier sessions, or a new one."""
    earlier = _read_identity(folder) if resumed else {}
    return str(earlier.get("id") or uuid4().hex[:12])


def _logged_steps(
    names: Sequence[str], run: TrackedRun, recorded: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Return the last steps that each tracker has from earlier sessions, and note them in the run's folder:
    its records will be cut to the step that it continues from.
    """
    earlier: dict[str, dict[str, int]] = _read_identity(run.folder).get("steps", {}) if run.resumed else {}
    steps = {
        name: {group: max(step, recorded[group]) for group, step in earlier[name].items()}
        if name in earlier and name != "tensorboard"
        else {"train": 0, "eval": 0}
        for name in names
    }
    written = run.folder / f"{IDENTITY}.new"
    written.write_text(json.dumps({"id": run.identity, "steps": {**earlier, **steps}}), encoding="utf-8")
    written.replace(run.folder / IDENTITY)
    return steps


def _read_identity(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _flat(values: Mapping[str, Any], separator: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by their paths."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = _flat(cast("Mapping[str, Any]", value), separator)
            yield from ((f"{name}{separator}{path}", each) for path, each in inner)
        else:
            yield name, value
