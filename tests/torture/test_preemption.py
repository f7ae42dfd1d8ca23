"""Jobs that are asked to stop at random moments: saved in time or the last checkpoint named, exit code 75,
resumed bitwise.

pytest -m slow tests/torture/test_preemption.py    # the whole campaign, with counts in counts.json
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import counts
import pytest
from test_restarts import running_ranks

import train_runs
from stretto.run.config import TrainConfig
from stretto.run.launch.stop import StopRequest
from stretto.run.train import launch as launch_module
from stretto.run.train.language_job import LANGUAGE
from stretto.run.train.launch import Result, exit_code, run_job
from stretto.run.train.restarts import newest_checkpoint
from tiny_job import job
from train_runs import Hook, at_step, keep_notes, linger, losses, same, send_self, tensors

pytestmark = pytest.mark.apart

STEPS = 60
LAYOUTS = (("layout.dp=2",), ("layout.tp=2",), ("layout.pp=2",), ("layout.dp=2", "dp.mode=zero3"))
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preemption")


def long_job(folder: Path, name: str, *overrides: str) -> TrainConfig:
    defaults = (f"train.steps={STEPS}", "checkpoint.every=7", "eval.every=5", "metrics.every=100")
    return job(folder, *defaults, f"run.name={name}", "checkpoint.resume=auto", *overrides)


@contextmanager
def signals(config: TrainConfig, draw: random.Random) -> Iterator[None]:
    """Within some steps, or while ranks start: one signal or two, to the launcher, a rank, or all of them."""
    over, records = threading.Event(), config.run.folder / "metrics.jsonl"
    number, target = draw.choice(SIGNALS), draw.choice(["launcher", "rank", "all"])
    begin = records.read_text().count("\n") if records.is_file() else 0
    step, pause = begin + draw.randint(0, 14), draw.uniform(0, 0.2)
    times = draw.randint(1, 2)

    def send() -> None:
        while not over.wait(0.01):
            if len(running_ranks()) == 2:
                break
        while records.is_file() and records.read_text().count("\n") < step and not over.wait(0.01):
            pass
        for _ in range(times):
            over.wait(pause)
            ranks = [pid for _, pid in sorted(running_ranks().items())]
            chosen = {"launcher": [os.getpid()], "rank": ranks[:1], "all": [os.getpid(), *ranks]}[target]
            for process in [] if over.is_set() else chosen:
                with suppress(ProcessLookupError):
                    os.kill(process, number)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        with StopRequest():  # what comes before the job listens is lost, and kills nothing
            yield
    finally:
        over.set()
        sender.join()


def preempted(folder: Path, seed: int) -> int:
    """How often a job was stopped until it was done; its end must be that of a job that never was."""
    layout = LAYOUTS[seed % len(LAYOUTS)]
    uninterrupted = long_job(folder, f"whole-{seed % len(LAYOUTS)}", *layout)
    if not uninterrupted.run.folder.exists():
        run_job(LANGUAGE, uninterrupted, quiet=True)
    parts, draw, stops = long_job(folder, f"stopped-{seed}", *layout), random.Random(seed), 0
    while True:
        with signals(parts, draw):
            result = run_job(LANGUAGE, parts, quiet=True)
        if not result.stopped:
            break
        stops += 1
        assert exit_code(result) == 75
        assert result.outcome is not None
        newest = newest_checkpoint(parts.run.folder)
        assert result.outcome["checkpoint"] == (None if newest is None else str(newest))
        assert newest is None or newest.name == f"step-{result.outcome['step']:08d}"
    assert same(tensors(uninterrupted, STEPS), tensors(parts, STEPS))
    assert losses(uninterrupted) == losses(parts)
    return stops


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_fifty_signals_at_random_moments(folder: Path) -> None:
    stops = jobs = 0
    while stops < 50:
        jobs += 1
        stops += preempted(folder, jobs)
    counts.record(
        "SIGTERM, SIGUSR1 or SIGUSR2, once or twice, to launcher, one rank or all, at a random moment",
        tried=stops,
        passed=stops,
        command="pytest -m slow tests/torture/test_preemption.py",
        note=f"{jobs} jobs; every stop with 75 and a checkpoint of its step; resumed bitwise",
    )


def test_a_stop_without_time_for_a_save_names_the_last_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("layout.dp=2", "train.steps=8", "checkpoint.every=4", "eval.every=null")
    uninterrupted = long_job(folder, "whole-grace", *overrides)
    if not uninterrupted.run.folder.exists():
        run_job(LANGUAGE, uninterrupted, quiet=True)
    parts = long_job(folder, "grace", *overrides, "train.grace_s=0.5")
    notes = folder / "notes"
    hooks = ((save_slowly, (0.7,)), keep_notes(str(notes)), at_step(6, 1, send_self, signal.SIGUSR1))
    result = with_hooks(monkeypatch, parts, *hooks)
    assert (result.stopped, exit_code(result)) == (True, 75)
    assert result.outcome is not None
    assert (result.outcome["step"], Path(result.outcome["checkpoint"]).name) == (6, "step-00000004")
    assert "s of train.grace_s are left; none is begun, the last is" in notes.read_text()
    monkeypatch.undo()
    assert not run_job(LANGUAGE, parts, quiet=True).stopped
    assert same(tensors(uninterrupted, 8), tensors(parts, 8))


def test_ranks_that_do_not_stop_in_time_are_ended_with_75(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = long_job(folder, "hanging", "layout.dp=2", "checkpoint.every=2", "train.grace_s=1")
    hooks = (at_step(3, 0, interrupt_launcher), at_step(3, 1, linger, 600.0))
    result = with_hooks(monkeypatch, config, *hooks)
    assert (result.outcome, result.signal, exit_code(result)) == (None, signal.SIGUSR1, 75)
    newest = newest_checkpoint(config.run.folder)
    assert newest is not None
    assert newest.name == "step-00000002"


def with_hooks(monkeypatch: pytest.MonkeyPatch, config: TrainConfig, *hooks: Hook) -> Result:
    planted = train_runs.with_hooks(launch_module.run_ranks, hooks)
    monkeypatch.setattr(launch_module, "run_ranks", planted)
    monkeypatch.setenv("LAUNCHER", str(os.getpid()))
    return run_job(LANGUAGE, config, quiet=True)


def interrupt_launcher(_: Any) -> None:
    os.kill(int(os.environ["LAUNCHER"]), signal.SIGUSR1)


def save_slowly(seconds: float) -> None:
    from stretto.run.train.checkpointing import Checkpointer

    inner = Checkpointer._write

    def slow(self: Checkpointer, write: Any) -> Path:
        time.sleep(seconds)
        return inner(self, write)

    Checkpointer._write = slow
