"""The launcher is killed, and started again by hand with --resume auto: no process of it is left, and the run
ends as if nothing had happened.

pytest -m slow tests/torture/test_restarts_launcher.py
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import counts
import pytest

from stretto.run.config import TrainConfig
from stretto.run.train.language_job import LANGUAGE
from stretto.run.train.launch import run_job
from stretto.run.train.metrics import recorded_steps
from tiny_job import job, job_file
from train_runs import losses, same, tensors

pytestmark = [pytest.mark.apart, pytest.mark.slow, pytest.mark.timeout(3000)]

STEPS, FEWEST_KILLS, ENDS_S = 300, 8, 60.0
LAYOUTS = {"dp": ("layout.dp=2",), "pp": ("layout.pp=2",), "zero3": ("layout.dp=2", "dp.mode=zero3")}
# what happens to a rank, right before its launcher is killed
BEFORE = {"alone": None, "with a rank": signal.SIGKILL, "beside a stopped rank": signal.SIGSTOP}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launcher")


def parents_in(session: int) -> dict[int, int]:
    """The parents of the processes of a session that still run."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            state, parent, _, its_session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                parents[int(path.name)] = int(parent)
    return parents


def ranks_of(launcher: int) -> list[int]:
    """A launcher's ranks: the children of its fork server."""
    parents = parents_in(launcher)
    return [process for process, parent in parents.items() if parent in parents and parent != launcher]


def wait_for_steps(config: TrainConfig, step: int, launcher: subprocess.Popen[bytes]) -> None:
    while recorded_steps(config.run.folder) < step and launcher.poll() is None:
        time.sleep(0.02)


def killed(launcher: subprocess.Popen[bytes], how: str, draw: random.Random) -> bool:
    """Kill the launcher in this way; whether it was still there, and the rank too."""
    number, done = BEFORE[how], True
    if number is not None:
        ranks = ranks_of(launcher.pid)
        done = bool(ranks)
        for rank in ranks[:1] if draw.random() < 0.5 else ranks[1:]:
            os.kill(rank, number)
    done = done and launcher.poll() is None
    launcher.kill()
    launcher.wait()
    return done


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_launcher_leaves_no_process_and_the_next_one_goes_on(folder: Path, layout: str) -> None:
    overrides = ("checkpoint.every=4", "metrics.every=100", f"train.steps={STEPS}", *LAYOUTS[layout])
    uninterrupted, parts = (
        job(folder, *overrides, f"run.name={name}-{layout}") for name in ("whole", "parts")
    )
    run_job(LANGUAGE, uninterrupted, quiet=True)
    command = [sys.executable, "-m", "stretto.cli.main", "train", str(job_file(folder)), *overrides]
    command += [f"run.name=parts-{layout}", "sample.tokens=0", "--resume", "auto", "--restarts", "3"]
    kills, draw, log = dict.fromkeys(BEFORE, 0), random.Random(layout), folder / f"{layout}.log"
    slowest = 0.0
    for turn in range(100):
        with log.open("ab") as out:
            launcher = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        wait_for_steps(parts, recorded_steps(parts.run.folder) + draw.randint(1, 30), launcher)
        time.sleep(draw.uniform(0, 0.1))
        if launcher.poll() is not None:
            break
        how = list(BEFORE)[turn % len(BEFORE)]
        kills[how] += killed(launcher, how, draw)
        since = time.monotonic()
        while left := parents_in(launcher.pid):
            assert time.monotonic() < since + ENDS_S, (how, left, log.read_text()[-4000:])
            time.sleep(0.05)
        slowest = max(slowest, time.monotonic() - since)
    assert launcher.returncode == 0, log.read_text()[-4000:]
    assert sum(kills.values()) >= FEWEST_KILLS
    assert same(tensors(uninterrupted, STEPS), tensors(parts, STEPS))
    assert losses(uninterrupted) == losses(parts)
    counts.record(
        f"kill -9 of the launcher at a random moment, {layout}, started again by hand",
        tried=sum(kills.values()),
        passed=sum(kills.values()),
        command="pytest -m slow tests/torture/test_restarts_launcher.py",
        note=", ".join(f"{count} {how}" for how, count in kills.items())
        + f"; the last process ended after at most {slowest:.1f} s; bitwise",
    )
