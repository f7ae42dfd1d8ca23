"""Users' hooks: functions of `train.hooks` that a run calls on every rank at points of the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from stretto.engine.parallel.control import run_on_first
from stretto.run.config.run_checks import find_hook
from stretto.run.launch.failure import TrainingFailed

if TYPE_CHECKING:
    from stretto.run.config.schema import JobConfig
    from stretto.run.train.metrics import Metrics
    from stretto.run.train.task import Log, Task, TrainProgress


class HookedRun:
    """What a hook sees of the run, and what it may ask of it. All ranks call the same hooks in the same
    order, so a hook may call collectives if it does so on every rank.

    Attributes:
        config: of the job.
        folder: of the run.
        rank, world: of this process.
        task: the model and its data on this rank: a `LanguageRun` or a `ClickRun`.
        step: number of the step that the call is about, from 1; 0 before the first.
        progress: how far the run is; to be read only.
        ending: why a hook of this rank has asked to end the run, or None.
    """

    def __init__(
        self, task: Task, progress: TrainProgress, config: JobConfig, metrics: Metrics | None, log: Log
    ) -> None:
        self.config, self.folder = config, config.run.folder
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.task, self.progress = task, progress
        self.step = progress.step
        self.ending: str | None = None
        self._metrics, self._log = metrics, log

    def log(self, numbers: Mapping[str, float]) -> None:
        """Log further numbers of the present step, by full names such as `my/number`: those of rank 0 go to
        the trackers, and to `logged.jsonl` in the run's folder.
        """
        if self._metrics is not None:
            self._metrics.extra(numbers, self.step)

    def text(self, name: str, text: str) -> None:
        """Log a text, such as a sample; rank 0's goes to the trackers and to `logged.jsonl`."""
        if self._metrics is not None:
            self._metrics.extra({name: text}, self.step)

    def print(self, text: str) -> None:
        """Print a line, on rank 0."""
        self._log(text)

    def stop(self, reason: str) -> None:
        """End the run as if its last step were reached, with an evaluation and a checkpoint: after the next
        step, in which the ranks agree on it. One rank's call is enough.
        """
        self.ending = self.ending or reason


class Hooks:
    """The hooks of a run.

    Args:
        references: `train.hooks`: each a class with methods of the names in `run_checks.HOOKS`, of which
            one object is made, or a function with such a name.
    """

    def __init__(self, references: Sequence[str], run: HookedRun) -> None:
        self.run = run
        self._hooks = dict[str, tuple[Path, Any]]()
        for reference in references:
            function = find_hook(reference)
            loaded = function.load()
            self._hooks[reference] = function.path, loaded() if isinstance(loaded, type) else loaded

    def call(self, name: str, step: int, *arguments: Any) -> None:
        """Call the hooks of this name about a step.

        Raises:
            TrainingFailed: one raises; it names the hook and the line of its file.
        """
        self.run.step = step
        for reference, (path, hook) in self._hooks.items():
            function = hook if reference.endswith(f":{name}") else getattr(hook, name, None)
            if function is None:
                continue
            try:
                function(self.run, *arguments)
            except Exception as error:
                lines = [f.lineno for f in extract_tb(error.__traceback__) if f.filename == str(path)]
                place = f", line {lines[-1]}" if lines else ""
                method = "" if function is hook else f".{name}"
                raise TrainingFailed(
                    f"hook {reference}{method}{place}, step {step}: {type(error).__name__}: {error}"
                ) from error

    def state(self) -> dict[str, Any]:
        """Return rank 0's `state_dict()` of each hook that has one: JSON values. Collective."""
        hooks = {reference: hook for reference, (_, hook) in self._hooks.items()}
        return run_on_first(
            lambda: {name: hook.state_dict() for name, hook in hooks.items() if hasattr(hook, "state_dict")}
        )

    def load_state(self, states: Mapping[str, Any]) -> None:
        """Give each hook its state from a checkpoint, if that has one."""
        for reference, (_, hook) in self._hooks.items():
            if reference in states and hasattr(hook, "load_state_dict"):
                hook.load_state_dict(states[reference])
