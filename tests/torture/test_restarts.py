"""Jobs whose ranks, or whose launcher, are killed at random moments end as if nothing had happened.

pytest -m slow tests/torture/test_restarts.py    # the whole campaign, with counts in counts.json
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, process
from pathlib import Path
from typing import Any

import counts
import pytest

from stretto.engine.parallel.control import this_rank
from stretto.run.config import TrainConfig
from stretto.run.launch import restart
from stretto.run.train import launch as launch_module
from stretto.run.train.language_job import LANGUAGE
from stretto.run.train.launch import run_job
from tiny_job import job
from train_runs import around_step, hooked, losses, same, tensors

pytestmark = pytest.mark.apart

LONG = pytest.mark.timeout(3000)
STEPS = 40
LAYOUTS = {
    "dp": ("layout.dp=2",),
    "tp": ("layout.tp=2",),
    "pp": ("layout.pp=2",),
    "zero3": ("layout.dp=2", "dp.mode=zero3"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restarts")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart at once."""
    monkeypatch.setattr(restart, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(restart, "LONGEST_DELAY_S", 0.01)


def long_job(folder: Path, name: str, *overrides: str, steps: int = STEPS) -> TrainConfig:
    fixed = (f"train.steps={steps}", "checkpoint.every=4", "metrics.every=100", f"run.name={name}")
    return job(folder, *fixed, *overrides)


def running_ranks() -> dict[str, int]:
    """Process numbers of this process's ranks. Nothing is asked of the processes: their exit codes can be
    read only once, by the launcher.
    """
    ranks = [child for child in list(process._children) if child.name.startswith("rank ")]
    return {
        child.name: child.pid
        for child in ranks
        if child.pid is not None and Path(f"/proc/{child.pid}").exists()
    }


class Killer(threading.Thread):
    """Ends ranks of the job in this process at random moments: `kills` times, no rank twice in one step."""

    def __init__(self, config: TrainConfig, kills: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.kills, self.done = kills, 0
        self._draw = random.Random(seed)
        self._records = config.run.folder / "metrics.jsonl"
        self._over = threading.Event()

    def run(self) -> None:
        seen = set[tuple[int, str]]()
        while self.done < self.kills and not self._over.is_set():
            self._wait_for(self._steps() + self._draw.randint(0, 8))
            self._over.wait(self._draw.uniform(0, 0.3))
            step, ranks = self._steps(), running_ranks()
            chosen = [name for name in sorted(ranks) if (step, name) not in seen]
            if not chosen:
                continue
            victim = self._draw.choice(chosen)
            seen |= {(near, victim) for near in (step - 1, step, step + 1)}
            with suppress(ProcessLookupError):
                os.kill(ranks[victim], signal.SIGKILL)
                self.done += 1
            while running_ranks().get(victim) == ranks[victim] and not self._over.wait(0.02):
                pass  # until the launcher has started another

    def _steps(self) -> int:
        try:
            return self._records.read_text().count("\n")
        except FileNotFoundError:
            return 0

    def _wait_for(self, step: int) -> None:
        """Until so many steps are recorded, or the records are cut."""
        before = self._steps()
        while before <= self._steps() < step and not self._over.wait(0.02):
            pass

    def end(self) -> None:
        self._over.set()
        self.join()


@contextmanager
def killing(config: TrainConfig, kills: int, seed: int) -> Iterator[Killer]:
    killer = Killer(config, kills, seed)
    killer.start()
    try:
        yield killer
    finally:
        killer.end()


def killed_and_compared(folder: Path, layout: str, kills: int, seed: int, steps: int = STEPS) -> int:
    """Restarts of a job with so many kills, whose end must be that of the undisturbed run."""
    uninterrupted = long_job(folder, f"whole-{layout}-{steps}", *LAYOUTS[layout], steps=steps)
    if not uninterrupted.run.folder.exists():
        run_job(LANGUAGE, uninterrupted, quiet=True)
    parts = long_job(
        folder, f"killed-{layout}-{seed}", *LAYOUTS[layout], f"train.restarts={kills}", steps=steps
    )
    with killing(parts, kills, seed) as killer:
        result = run_job(LANGUAGE, parts, quiet=True)
    assert not result.stopped
    assert same(tensors(uninterrupted, steps), tensors(parts, steps))
    assert losses(uninterrupted) == losses(parts)
    told = [json.loads(line) for line in (parts.run.folder / "restarts.jsonl").read_text().splitlines()]
    assert [restart["restart"] for restart in told] == list(range(1, result.restarts + 1))
    assert all(restart["from_step"] % 4 == 0 for restart in told)
    assert all(restart["step"] is None or restart["from_step"] < restart["step"] for restart in told)
    return min(killer.done, result.restarts)


@pytest.fixture
def own_server() -> Iterator[None]:
    """Ranks are forked from a server, which writes to the stderr that it was started with."""
    server: Any = forkserver._forkserver
    server._stop()
    yield
    server._stop()


@pytest.mark.slow
@pytest.mark.usefixtures("capfd", "own_server")
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert killed_and_compared(folder, "pp", kills=2, seed=3) >= 1
    told = (folder / "runs" / "killed-pp-3" / "restarts.jsonl").read_text().splitlines()
    resumed = [line for line in capfd.readouterr().err.splitlines() if line.startswith("resumed from")]
    if step := json.loads(told[-1])["from_step"]:  # the last attempt came to its end
        assert resumed[-1].endswith(f"at step {step}")


@pytest.mark.slow
@LONG
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hundred_kills_change_nothing(folder: Path, layout: str) -> None:
    done = jobs = 0
    while done < 100:
        jobs += 1
        done += killed_and_compared(folder, layout, kills=20, seed=jobs, steps=80)
        counts.record(
            f"kill -9 of a random rank at a random moment, {layout}, restarted by itself",
            tried=done,
            passed=done,
            command=f"pytest -m slow tests/torture/test_restarts.py -k hundred_kills[{layout}]",
            note=f"restarts in {jobs} jobs, whose weights, states and losses equal the undisturbed run's",
        )


@pytest.mark.slow
@LONG
def test_fifty_restarts_in_a_row_leave_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt makes one step more than the one before, and dies: no process, port or file stays open."""
    uninterrupted = long_job(folder, "whole-fifty", *LAYOUTS["dp"], steps=52)
    run_job(LANGUAGE, uninterrupted, quiet=True)
    parts = long_job(folder, "fifty", *LAYOUTS["dp"], "checkpoint.every=1", "train.restarts=50", steps=52)
    inner, open_resources = launch_module.run_ranks, list[tuple[int, int, int]]()

    def planted(ranks: int, function: Any, *arguments: Any, **options: Any) -> list[Any]:
        open_resources.append(
            (len(os.listdir("/proc/self/fd")), threading.active_count(), len(running_ranks()))
        )
        *watched, _, _, config, source, _, _ = (function, *arguments)
        return inner(ranks, *watched, hooked, [(die_after_two_steps, ())], config, source, **options)

    monkeypatch.setattr(launch_module, "run_ranks", planted)
    result = run_job(LANGUAGE, parts, quiet=True)
    assert (result.restarts, result.stopped) == (50, False)
    assert len(set(open_resources[1:])) == 1, open_resources
    assert open_resources[-1][2] == 0
    assert same(tensors(uninterrupted, 52), tensors(parts, 52))
    assert losses(uninterrupted) == losses(parts)
    counts.record(
        "restarts in a row of one job, a rank killed in the second step of each attempt",
        tried=50,
        passed=50,
        command="pytest -m slow tests/torture/test_restarts.py -k fifty",
        note="descriptors, threads and ranks of the launcher the same before each attempt; bitwise",
    )


def die_after_two_steps() -> None:
    attempt = restart.restart_count()

    def wrapped(inner: Any, self: Any, stop: Any) -> Any:
        if attempt < 50 and self.progress.step == attempt + 1 and this_rank() == attempt % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, stop)

    around_step(wrapped)


@pytest.mark.slow
@LONG
def test_two_thousand_steps_with_saves_hold_no_more_at_their_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 2000
    config = long_job(folder, "soak", *LAYOUTS["zero3"], "eval.every=50", steps=steps)
    notes = folder / "held.jsonl"
    inner = launch_module.run_ranks

    def planted(ranks: int, function: Any, *arguments: Any, **options: Any) -> list[Any]:
        *watched, _, _, config, source, _, _ = (function, *arguments)
        hooks = [(keep_what_is_held, (str(notes),))]
        return inner(ranks, *watched, hooked, hooks, config, source, **options)

    monkeypatch.setattr(launch_module, "run_ranks", planted)
    assert not run_job(LANGUAGE, config, quiet=True).stopped
    rows = [json.loads(line) for line in notes.read_text().splitlines()]
    growth = list[float]()
    for rank in range(2):
        mine = [row for row in rows if row["rank"] == rank]
        assert [row["step"] for row in mine] == list(range(0, steps, 100))
        warm = mine[len(mine) // 4 :]
        assert len({(row["descriptors"], row["threads"]) for row in warm}) == 1, warm
        growth.append((warm[-1]["pages"] - warm[0]["pages"]) / warm[0]["pages"])
    assert max(growth) < 0.01, growth
    counts.record(
        "steps of a soak with 500 saves and 40 evaluations",
        tried=steps,
        passed=steps,
        command="pytest -m slow tests/torture/test_restarts.py -k thousand",
        note=f"descriptors and threads of ranks flat; memory {100 * max(growth):+.2f}% over 1,500 steps",
    )


def keep_what_is_held(notes: str) -> None:
    """Append what each rank holds before every hundredth step."""

    def wrapped(inner: Any, self: Any, stop: Any) -> Any:
        if self.progress.step % 100 == 0:
            record = {
                "rank": this_rank(),
                "step": self.progress.step,
                "pages": int(Path("/proc/self/statm").read_text().split()[1]),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
            }
            with open(notes, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        return inner(self, stop)

    around_step(wrapped)
