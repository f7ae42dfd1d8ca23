"""Runs combinations of a comparison, one after another, each as `stretto train` in a process of its own."""

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
from stretto.run.compare.result import Result, load_all, measured, save

_STRETTO = (sys.executable, "-c", "from stretto.cli.main import main; main()")
_PATIENCE_S = 60.0  # for a run that was asked to stop

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A combination to run.

    Attributes:
        waiting: the result, without any figure yet.
        words: overrides that `stretto train` takes, but for the run's folder.
        language: it is a language model's, whose memory can be measured on the CPU.
    """

    waiting: Result
    words: Sequence[str]
    language: bool


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The settings of all runs.

    Attributes:
        path: the config.
        folder: of the results.
        warmup, steps: of each run; the first do not count.
        memory: measure memory too, where the run cannot.
        again: run what has a result already.
    """

    path: str
    folder: Path
    warmup: int
    steps: int
    memory: bool
    again: bool

    def all(self, runs: Sequence[Run], say: Progress) -> tuple[list[Result], bool]:
        """The result of every run, and whether Ctrl-C ended them early; what is left is marked as stopped."""
        self.folder.mkdir(parents=True, exist_ok=True)
        known = {} if self.again else load_all(self.folder)
        results, stopped = list[Result](), False
        for number, run in enumerate(runs, 1):
            waiting, head = run.waiting, f"{number}/{len(runs)} {run.waiting.name}"
            done = known.get(waiting.fingerprint)
            if done is not None and done.status == "done":
                say(f"{head}: done before")
                results.append(replace(done, name=waiting.name, words=waiting.words))
                continue
            if stopped:
                results.append(replace(waiting, status="stopped", error="not run; the same command runs it"))
                continue
            say(f"{head}: {self.warmup + self.steps} steps")
            try:
                result = self._run(run)
            except KeyboardInterrupt:
                stopped = True
                result = replace(waiting, status="stopped", error="interrupted; the same command runs it")
            else:
                save(result, self.folder / f"{file_name(waiting.name, waiting.fingerprint)}.json")
            say(f"{head}: {_outcome(result)}")
            results.append(result)
        return results, stopped

    def _run(self, run: Run) -> Result:
        name = file_name(run.waiting.name, run.waiting.fingerprint)
        folder, log = self.folder / name, self.folder / f"{name}.log"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was not finished
        words = [*run.words, f"run.dir={self.folder}", f"run.name={name}"]
        code, _ = _stretto(["train", self.path, *words], log)
        if code != 0:
            return replace(run.waiting, status="failed", error=_error(log, code))
        result = measured(run.waiting, folder, self.warmup)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        if result.memory is None and self.memory and run.language:
            result = self._with_memory(result, words, self.folder / f"{name}.memory.log")
        return result

    def _with_memory(self, result: Result, words: Sequence[str], log: Path) -> Result:
        code, facts = _stretto(["memory", self.path, *words, "--measure"], log)
        if code != 0 or facts is None:
            return result
        fullest = max(facts["measured"], key=lambda rank: rank["peak"])
        return replace(result, memory=fullest["peak"], predicted_memory=fullest["predicted_peak"])


def _stretto(words: Sequence[str], log: Path) -> tuple[int, Any]:
    """Run one command to its end; its exit code, and the JSON that it printed, if any.

    Raises:
        KeyboardInterrupt: Ctrl-C, once the command has stopped too.
    """
    with log.open("w", encoding="utf-8") as errors:
        child = subprocess.Popen(
            [*_STRETTO, *words, "--json"], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            printed, _ = child.communicate()
        except BaseException:
            child.terminate()
            _wait(child)
            raise
    try:
        return child.returncode, json.loads(printed)
    except ValueError:
        return child.returncode, None


def _wait(child: subprocess.Popen[str]) -> None:
    """Wait for a command that was asked to stop; kill it where it does not, or at another Ctrl-C."""
    try:
        child.wait(_PATIENCE_S)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        child.kill()
        child.wait()


def _outcome(result: Result) -> str:
    """The result in a few words."""
    if result.median is None or result.speed is None:
        return f"{result.status}: {result.error}"
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    return f"{result.median:.3g} s a step, {result.speed:,.0f} {result.unit}{loss}"


def _error(log: Path, code: int) -> str:
    """The last `error:` line that a failed run printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else f"exit code {code}, see {log}"
