"""A rank of torchrun that is killed: `--max-restarts` starts all of them again, on the store that the dead
ones have left, and they go on from the last checkpoint, though the config says to start afresh.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import counts
import pytest

from stretto.run.launch.local import _listen
from stretto.run.train.language_job import LANGUAGE
from stretto.run.train.launch import run_job
from tiny_job import job, job_file
from train_runs import losses, same, tensors

pytestmark = [pytest.mark.apart, pytest.mark.slow, pytest.mark.timeout(3000)]

STEPS = 40
EVERY = ("checkpoint.every=4", "metrics.every=100", f"train.steps={STEPS}")
RENDEZVOUS = ("standalone", "c10d", "static")
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchrun")


def options(rendezvous: str) -> list[str]:
    listener = _listen(0)
    port = listener.getsockname()[1]
    listener.close()
    return {
        "standalone": ["--standalone"],
        "c10d": ["--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"],
        "static": ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={port}"],
    }[rendezvous]


def children(process: int) -> dict[int, int]:
    """Process numbers of torchrun's ranks, by rank."""
    ranks = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) != process:
                continue
            variables = (path / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        ranks |= {
            int(variable[5:]): int(path.name) for variable in variables if variable.startswith(b"RANK=")
        }
    return ranks


def killed_under_torchrun(folder: Path, rendezvous: str, layout: str, rank: int) -> None:
    ranks = int(layout[-1])
    uninterrupted = job(folder, *EVERY, layout, f"run.name=whole-{layout}")
    if not uninterrupted.run.folder.exists():
        run_job(LANGUAGE, uninterrupted, quiet=True)
    parts = job(folder, *EVERY, layout, f"run.name={rendezvous}-{layout}-{rank}")
    command = [sys.executable, "-m", "torch.distributed.run", *options(rendezvous)]
    command += [f"--nproc-per-node={ranks}", "--max-restarts=2", "-m", "stretto.cli.main", "train"]
    command += [str(job_file(folder)), *EVERY, layout, f"run.name={parts.run.name}", "sample.tokens=0"]
    out = folder / f"{parts.run.name}.log"
    with out.open("wb") as log:
        torchrun = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            end = time.monotonic() + LIMIT_S
            while not (parts.run.folder / "checkpoints" / "step-00000008").exists():
                assert torchrun.poll() is None, out.read_text()
                assert time.monotonic() < end
                time.sleep(0.02)
            os.kill(children(torchrun.pid)[rank], signal.SIGKILL)
            assert torchrun.wait(LIMIT_S) == 0, out.read_text()
        finally:
            torchrun.kill()
    assert "resumed from" in out.read_text()
    assert same(tensors(uninterrupted, STEPS), tensors(parts, STEPS))
    assert losses(uninterrupted) == losses(parts)


@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
def test_torchrun_starts_a_killed_job_again(folder: Path, rendezvous: str) -> None:
    cases = [("layout.dp=2", 0), ("layout.dp=2", 1), ("layout.pp=4", 0), ("layout.pp=4", 2)]
    for layout, rank in cases:
        killed_under_torchrun(folder, rendezvous, layout, rank)
    counts.record(
        f"kill -9 of a rank of torchrun ({rendezvous}), --max-restarts, torch's shared store",
        tried=len(cases),
        passed=len(cases),
        command="pytest -m slow tests/torture/test_restarts_torchrun.py",
        note="2 and 4 ranks, rank 0 and another; the end equals the undisturbed run's bitwise",
    )
