"""The start of a job whose ranks are described by environment variables alone, as mpirun, srun or a pod set
them: a rank that never comes, and one that is started twice, before and while the job trains.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from counts import record

from stretto.run.launch.local import _listen
from stretto.run.train.metrics import read_lines
from tiny_job import job_file

pytestmark = [pytest.mark.apart, pytest.mark.slow, pytest.mark.timeout(2400)]

START_S = 20
PATIENCE_S = 300.0
STEPS = 400
WORLD = 2


def free_port() -> int:
    listener = _listen(0)
    port = listener.getsockname()[1]
    listener.close()
    return port


class Job:
    """Its processes are started one by one."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.port = folder, name, free_port()
        self.started = list[tuple[subprocess.Popen[bytes], Path]]()

    def start(self, rank: int) -> int:
        """Start a process as a rank; returns its place among all."""
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "stretto.cli.main", "train", str(self.folder / "tiny.yaml")]
        command += [
            f"layout.dp={WORLD}",
            f"train.steps={STEPS}",
            f"train.start_s={START_S}",
            "sample.tokens=0",
        ]
        out = self.folder / f"{self.name}-{len(self.started)}.log"
        with out.open("wb") as log:
            process = subprocess.Popen(
                [*command, f"run.name={self.name}", "checkpoint.every=null"],
                env=environment,
                stdout=log,
                stderr=log,
            )
        self.started.append((process, out))
        return len(self.started) - 1

    def wait(self, at: int) -> tuple[int, str]:
        """The exit code and the output of a process."""
        process, out = self.started[at]
        return process.wait(PATIENCE_S), out.read_text()

    def wait_for_steps(self, steps: int) -> None:
        path, end = self.folder / "runs" / self.name / "metrics.jsonl", time.monotonic() + PATIENCE_S
        while not path.is_file() or len(list(read_lines(path))) < steps:
            assert time.monotonic() < end, [out.read_text() for _, out in self.started]
            time.sleep(0.05)

    def end(self) -> None:
        for process, _ in self.started:
            process.kill()
            process.wait()


def wrong_with_missing(folder: Path, missing: int) -> str:
    """A job of which one rank never comes."""
    job = Job(folder, f"missing{missing}")
    try:
        code, text = job.wait(job.start(1 - missing))
    finally:
        job.end()
    named = f"rank {missing} of {WORLD} has not come within {START_S} s"
    noted = "waiting for rank 1 of 2; here: 0 on " if missing else "waits for rank 0 to open 127.0.0.1:"
    return "" if code == 2 and named in text and noted in text else f"missing {missing}: {code} {text}"


def wrong_with_two(folder: Path, rank: int, steps: int) -> tuple[str, float]:
    """A job of which a rank is started again after so many steps; what is wrong, and how long the one too
    many lived.
    """
    job = Job(folder, f"twice{rank}-{steps}")
    try:
        every = [job.start(rank) for rank in range(WORLD)]
        if steps:
            job.wait_for_steps(steps)
        began = time.monotonic()
        every.append(job.start(rank))
        while all(process.poll() is None for process, _ in job.started):
            time.sleep(0.02)
        lived = time.monotonic() - began
        ends = [job.wait(at) for at in every]
    finally:
        job.end()
    refused = [text for code, text in ends if code == 2]
    good = [code for code, _ in ends].count(0) == WORLD and len(refused) == 1
    if good and f"rank {rank} was started twice: it runs already on host " in refused[0]:
        return "", lived
    return f"twice {rank} after {steps}: {ends}", lived


def test_a_rank_that_is_missing_or_started_twice(tmp_path: Path) -> None:
    job_file(tmp_path)
    training = [
        sys.executable,
        "-m",
        "stretto.cli.main",
        "train",
        str(tmp_path / "tiny.yaml"),
        "train.steps=1",
    ]
    subprocess.run(training, check=True, capture_output=True)  # the text is tokenised
    missing = [wrong_with_missing(tmp_path, rank) for rank in range(WORLD)]
    twice = [wrong_with_two(tmp_path, rank, steps) for rank, steps in itertools.product((0, 1), (0, 5))]
    wrong = [fault for fault in (*missing, *(fault for fault, _ in twice)) if fault]
    print("\n".join(wrong), [round(lived, 1) for _, lived in twice], flush=True)
    command = "pytest -m slow tests/torture/test_start.py"
    record(
        "a rank never comes (no torchrun; it is named on the ranks that wait)",
        tried=len(missing),
        passed=missing.count(""),
        command=command,
        note=f"at train.start_s={START_S}; a line says who is missing after 5 s",
    )
    record(
        "a rank is started twice (no torchrun; one is refused, the job trains on)",
        tried=len(twice),
        passed=sum(not fault for fault, _ in twice),
        command=command,
        note=f"ranks 0 and 1, at the start and while training; at most "
        f"{max(lived for _, lived in twice):.0f} s from the start of its process, imports included",
    )
    assert not wrong
