"""Run the combinations of a comparison in rounds, each as `stretto train` in a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from stretto.run.compare.combinations import file_name
from stretto.run.compare.result import CombinationResult, load_all, measured, save
from stretto.run.watch.machine import BUSY, OtherProcesses, busy_text

_STRETTO = (sys.executable, "-c", "from stretto.cli.main import main; main()")
_GRACE_S = 60.0  # for a run that was asked to stop


@dataclass(frozen=True, kw_only=True)
class PendingRun:
    """A combination to run.

    Attributes:
        pending: its result, without any figure yet.
        overrides: those that `stretto train` takes, without the run's folder.
    """

    pending: CombinationResult
    overrides: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs combinations with the same settings.

    Attributes:
        path: the config.
        folder: the folder of the results.
        warmup, steps: number of steps of each run that do not count, and of those that do.
        repeats: number of rounds; each runs every combination once.
        memory: measure memory and traffic too.
        again: run what has a result already.
    """

    path: str
    folder: Path
    warmup: int
    steps: int
    repeats: int
    memory: bool
    again: bool

    def run_all(
        self, runs: Sequence[PendingRun], log: Callable[[str], None]
    ) -> tuple[list[CombinationResult], bool]:
        """Return the result of every run, and whether Ctrl-C ended them early; what has not run at all is
        then marked as stopped.

        Every other round is in reverse order, so that a machine that becomes slower or faster with time is so
        for all alike. What has a result of a round in the folder is not run again.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        previous = {} if self.again else load_all(self.folder)
        results = list[CombinationResult]()
        for index, run in enumerate(runs, 1):
            done = previous.get(run.pending.fingerprint)
            if done is None or not done.repeats:
                results.append(run.pending)
                continue
            changed = {"name": run.pending.name, "overrides": run.pending.overrides}
            results.append(replace(done, status="done", error=None, **changed))
            rounds = f"{len(done.repeats)} round{'s' * (len(done.repeats) > 1)}"
            log(f"{index}/{len(runs)} {run.pending.name}: {rounds} done before")
        order = range(len(runs))
        to_do = [
            (number, index)
            for number in range(1, self.repeats + 1)
            for index in (order if number % 2 else reversed(order))
            if number not in {each.round for each in results[index].repeats}
        ]
        if to_do and (busy := busy_text()) is not None:
            log(f"warning: {busy}")
        failed = set[int]()
        for at, (number, index) in enumerate(to_do):
            if index in failed:
                continue
            name = results[index].name
            head = f"round {number}/{self.repeats}, {index + 1}/{len(runs)} {name}"
            remaining = self._seconds_left(results, [each for _, each in to_do[at:] if each not in failed])
            log(f"{head}: {self.warmup + self.steps} steps{remaining}")
            try:
                result = results[index] = self._run(runs[index], results[index], number)
            except KeyboardInterrupt:
                return [self._stopped(each) for each in results], True
            save(result, self.folder / f"{file_name(name, result.fingerprint)}.json")
            if result.status == "failed":
                failed.add(index)
                log(f"{head}: failed: {result.error}")
                continue
            run = next(each for each in result.repeats if each.round == number)
            loss = "" if result.loss is None else f", loss {result.loss:.4f}"
            busy = run.others is not None and run.others >= BUSY
            warning = f"; warning: other processes used {run.others:.0%} of the cores" if busy else ""
            log(f"{head}: {run.median:.3g} s a step, {run.speed:,.0f} {result.unit}{loss}{warning}")
        return results, False

    def _seconds_left(self, results: Sequence[CombinationResult], to_do: Sequence[int]) -> str:
        """Text about the time that the runs of these combinations take, if any run has been timed."""
        times = [[each.wall for each in result.repeats] for result in results]
        if not (timed := [fmean(each) for each in times if each]):
            return ""
        seconds = sum(fmean(times[index]) if times[index] else fmean(timed) for index in to_do)
        about = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        return f"; about {about} left, {len(to_do)} run{'s' * (len(to_do) > 1)}"

    def _stopped(self, result: CombinationResult) -> CombinationResult:
        if result.repeats or result.status == "failed":
            return result
        return replace(result, status="stopped", error="not run; the same command runs it")

    def _run(self, run: PendingRun, result: CombinationResult, number: int) -> CombinationResult:
        name = f"{file_name(run.pending.name, run.pending.fingerprint)}.{number}"
        folder, errors = self.folder / name, self.folder / f"{name}.log"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was not finished
        overrides = [*run.overrides, f"run.dir={self.folder}", f"run.name={name}"]
        began, started = time.time(), time.monotonic()
        with OtherProcesses() as others:
            code, _ = _stretto(["train", self.path, *overrides], errors)
        if code != 0:
            return replace(result, status="failed", error=_error(errors, code))
        result = measured(
            result,
            folder,
            self.warmup,
            number=number,
            began=began,
            wall=time.monotonic() - started,
            others=others.share,
        )
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        if self.memory and result.sent is None and result.unmeasured is None:
            result = self._with_memory(result, overrides)
        return result

    def _with_memory(self, result: CombinationResult, overrides: Sequence[str]) -> CombinationResult:
        log = self.folder / f"{file_name(result.name, result.fingerprint)}.memory.log"
        code, record = _stretto(["memory", self.path, *overrides, "--measure"], log)
        if code != 0 or record is None:
            return replace(result, unmeasured=_error(log, code))
        fullest = max(record["measured"], key=lambda rank: rank["peak"])
        result = replace(result, sent=max(rank["sent"] for rank in record["measured"]))
        if (predicted := record.get("predicted")) is not None:  # of a recommender, whose run predicts nothing
            result = replace(result, predicted=predicted["seconds"], traffic=predicted["sent"])
        if result.memory is not None:  # the device's allocator has measured the run itself
            return result
        return replace(result, memory=fullest["peak"], predicted_memory=fullest.get("predicted_peak"))


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
