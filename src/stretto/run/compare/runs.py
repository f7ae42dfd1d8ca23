"""Run the combinations of a comparison in turn, each as `stretto train` in a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.run.compare.combinations import file_name
from stretto.run.compare.result import CombinationResult, load_all, measured, save

_STRETTO = (sys.executable, "-c", "from stretto.cli.main import main; main()")
_GRACE_S = 60.0  # for a run that was asked to stop


@dataclass(frozen=True, kw_only=True)
class PendingRun:
    """A combination to run.

    Attributes:
        pending: its result, without any figure yet.
        overrides: those that `stretto train` takes, without the run's folder.
        language: it trains a language model, whose memory can be measured on the CPU.
    """

    pending: CombinationResult
    overrides: Sequence[str]
    language: bool


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs combinations with the same settings.

    Attributes:
        path: the config.
        folder: the folder of the results.
        warmup, steps: number of steps of each run that do not count, and of those that do.
        memory: measure memory too, if the run itself cannot.
        again: run what has a result already.
    """

    path: str
    folder: Path
    warmup: int
    steps: int
    memory: bool
    again: bool

    def run_all(
        self, runs: Sequence[PendingRun], log: Callable[[str], None]
    ) -> tuple[list[CombinationResult], bool]:
        """Return the result of every run, and whether Ctrl-C ended them early; later ones are then marked as
        stopped.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        previous = {} if self.again else load_all(self.folder)
        results, stopped = list[CombinationResult](), False
        for index, run in enumerate(runs, 1):
            pending, head = run.pending, f"{index}/{len(runs)} {run.pending.name}"
            done = previous.get(pending.fingerprint)
            if done is not None and done.status == "done":
                log(f"{head}: done before")
                results.append(replace(done, name=pending.name, overrides=pending.overrides))
                continue
            if stopped:
                results.append(replace(pending, status="stopped", error="not run; the same command runs it"))
                continue
            log(f"{head}: {self.warmup + self.steps} steps")
            try:
                result = self._run(run)
            except KeyboardInterrupt:
                stopped = True
                result = replace(pending, status="stopped", error="interrupted; the same command runs it")
            else:
                save(result, self.folder / f"{file_name(pending.name, pending.fingerprint)}.json")
            if result.median is None or result.speed is None:
                log(f"{head}: {result.status}: {result.error}")
            else:
                loss = "" if result.loss is None else f", loss {result.loss:.4f}"
                speed = f"{result.speed:,.0f} {result.unit}"
                log(f"{head}: {result.median:.3g} s a step, {speed}{loss}")
            results.append(result)
        return results, stopped

    def _run(self, run: PendingRun) -> CombinationResult:
        name = file_name(run.pending.name, run.pending.fingerprint)
        folder, errors = self.folder / name, self.folder / f"{name}.log"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was not finished
        overrides = [*run.overrides, f"run.dir={self.folder}", f"run.name={name}"]
        code, _ = _stretto(["train", self.path, *overrides], errors)
        if code != 0:
            return replace(run.pending, status="failed", error=_error(errors, code))
        result = measured(run.pending, folder, self.warmup)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        if result.memory is None and self.memory and run.language:
            result = self._with_memory(result, overrides, self.folder / f"{name}.memory.log")
        return result

    def _with_memory(
        self, result: CombinationResult, overrides: Sequence[str], log: Path
    ) -> CombinationResult:
        code, record = _stretto(["memory", self.path, *overrides, "--measure"], log)
        if code != 0 or record is None:
            return result
        fullest = max(record["measured"], key=lambda rank: rank["peak"])
        return replace(result, memory=fullest["peak"], predicted_memory=fullest["predicted_peak"])


def _stretto(arguments: Sequence[str], log: Path) -> tuple[int, Any]:
    """Run one command to its end; return its exit code and the JSON that it printed, if any.

    Raises:
        KeyboardInterrupt: Ctrl-C, once the command has stopped too.
    """
    with log.open("w", encoding="utf-8") as errors:
        child = subprocess.Popen(
            [*_STRETTO, *arguments, "--json"], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            printed, _ = child.communicate()
        except BaseException:
            child.terminate()
            try:
                child.wait(_GRACE_S)
            except (KeyboardInterrupt, subprocess.TimeoutExpired):  # Ctrl-C again, or it does not stop
                child.kill()
                child.wait()
            raise
    try:
        return child.returncode, json.loads(printed)
    except ValueError:
        return child.returncode, None


def _error(log: Path, code: int) -> str:
    """Return the last `error:` line that a failed run printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else f"exit code {code}, see {log}"
