"""Profiles of whole steps by torch's profiler (Kineto), a file for every rank, which Perfetto opens.

The marks in a profile are the step, its phases, and the actions of the pipeline's program in their notation.
Files are rewritten so that those of several ranks can be opened together: every process and device has a
number and a name of its own. Times need nothing of this kind, since Kineto counts all from one date.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from torch.profiler import profile, record_function

from stretto.engine.device import memory_history, profiler_activities
from stretto.engine.parallel.control import gather_json, this_rank
from stretto.engine.pipeline import Recorder
from stretto.engine.pipeline.rank_buffers import Call
from stretto.engine.progress import PROGRESS
from stretto.layout.layout import Layout
from stretto.run.config.schema import JobConfig
from stretto.run.launch.lease import lost_folder
from stretto.run.train.task import Task

T = TypeVar("T")
FOLDER = "profile"
_PROCESSES = 1000  # process numbers of a rank in its file, more than it has devices
_HISTORY_ENTRIES = 1_000_000  # allocations and frees


class _Marks(Recorder):
    """Marks every call in the profile instead of timing it."""

    def record(self, label: str, call: Call, wait: Call | None) -> None:
        if wait is not None:
            self.timed(f"wait {label}", wait)
        self.timed(label, call)

    def timed(self, label: str, call: Callable[[], T]) -> T:
        with record_function(label):
            return call()


class StepProfiler:
    """Profiles the steps of `metrics.profile` on this rank; the trainer calls it around every step.

    Args:
        layout: of the ranks, or None for a recommender.
        done: steps that were done before this session.
    """

    def __init__(
        self, config: JobConfig, task: Task, layout: Layout | None, done: int, log: Callable[[str], object]
    ) -> None:
        assert config.metrics.profile is not None
        self._first, self._last = config.metrics.profile[0], config.metrics.profile[-1]
        self._run = config.run.folder
        self._task, self._log = task, log
        rank = this_rank()
        self._memory = rank in config.metrics.profile_memory
        self._history = memory_history(task.device) if self._memory else None
        places = {} if layout is None else layout.coordinates(rank)
        place = " ".join(f"{axis}{at}" for axis, at in places.items() if layout and layout.size(axis) > 1)
        self._process = f"rank {rank} ({place})" if place else f"rank {rank}"
        # a captured step makes no separate calls
        captured = getattr(config.train, "graphs", "off") != "off"
        self._marks = None if captured else _Marks(task.device)
        self._profile: profile | None = None
        self._step: record_function | None = None
        self._steps = list[int]()
        wanted = f"of steps {self._first} to {self._last} (metrics.profile)"
        if done >= self._last:
            log(f"nothing to profile: the run continues after step {done}, and {wanted} none comes")
        elif done >= self._first:
            log(f"profiles steps {done + 1} to {self._last} {wanted}: the run continues after step {done}")

    def begin(self, step: int) -> None:
        """Mark the beginning of a step, and start with the first one of the range."""
        if self._profile is not None and step != self._steps[-1] + 1:
            self._write()  # a rollback went to another step
        if not self._first <= step <= self._last or (self._steps and self._profile is None):
            return
        if self._profile is None:
            with PROGRESS.long("starting the profiler"):
                self._profile = profile(
                    activities=profiler_activities(self._task.device),
                    profile_memory=self._memory and self._history is None,
                )
                if self._history is not None:
                    self._history._record_memory_history(max_entries=_HISTORY_ENTRIES)
                self._profile.start()
        self._steps.append(step)
        if self._task.recorder is None:
            self._task.recorder = self._marks
        self._step = record_function(f"step {step}")
        self._step.__enter__()

    def program(self) -> AbstractContextManager[object]:
        """Return a mark of the forwards and backwards of a step."""
        return record_function("the forwards and backwards")

    def end(self, ending: bool) -> None:
        """Mark the end of a step; write the profile after the last one. Collective.

        Args:
            ending: no further step follows in this session.
        """
        if self._step is None:
            return
        self._step.__exit__(None, None, None)
        self._step = None
        if self._task.recorder is self._marks:
            self._task.recorder = None
        if ending or self._steps[-1] == self._last:
            self._write()

    def _write(self) -> None:
        """Stop, and write this rank's files; a rank that cannot is reported, and training continues."""
        assert self._profile is not None
        failure, profiled = None, self._profile
        self._profile = None
        first, last = self._steps[0], self._steps[-1]
        with PROGRESS.long("writing the profile"):
            profiled.stop()
            name = f"rank-{this_rank():05}.steps-{first}-{last}"
            try:
                if (failure := lost_folder(self._run)) is None:
                    folder = self._run / FOLDER
                    folder.mkdir(parents=True, exist_ok=True)
                    self._write_trace(profiled, folder / f"{name}.json.gz")
                    if self._history is not None:
                        self._history._dump_snapshot(str(folder / f"{name}.memory.pickle"))
            except (OSError, RuntimeError, ValueError) as error:
                failure = str(error)
            if self._history is not None:
                self._history._record_memory_history(enabled=None)
            failures = gather_json(failure)
        self._log(f"profiled steps {first} to {last}: {self._run / FOLDER}, a file per rank")
        for rank, text in enumerate(failures):
            if text is not None:
                self._log(f"warning: the profile of rank {rank} could not be written: {text}")

    def _write_trace(self, profiled: profile, path: Path) -> None:
        plain = path.with_suffix("")
        try:
            profiled.export_chrome_trace(str(plain))
            recorded: dict[str, Any] = json.loads(plain.read_bytes())
        finally:
            plain.unlink(missing_ok=True)
        name_processes(recorded["traceEvents"], this_rank(), self._process)
        with gzip.open(path, "wt", encoding="utf-8") as file:
            json.dump(recorded, file)


def name_processes(events: list[dict[str, Any]], rank: int, name: str) -> None:
    """Number the processes of a rank's profile so that no two ranks share one, and name each by its rank.

    Args:
        events: of Kineto's Chrome trace; changed in place.
        name: of the rank.
    """
    numbers = dict[str, int]()
    labels = {
        str(event["pid"]): str(event["args"]["labels"])
        for event in events
        if event.get("name") == "process_labels"
    }
    for event in events:
        process = str(event["pid"])
        event["pid"] = numbers.setdefault(process, rank * _PROCESSES + len(numbers))
        if event.get("name") == "process_name":
            label = labels.get(process, process)
            event["args"]["name"] = name if label == "CPU" else f"{name} {label}"
        elif event.get("name") == "process_sort_index":
            event["args"]["sort_index"] = event["pid"]
