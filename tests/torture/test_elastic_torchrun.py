"""Agents of torchrun leave and join a job: one is killed with its ranks, one is asked to stop, and each time
another comes. Every step trains the samples that it trains in a run that nothing disturbs, and the weights
are that run's but for rounding.

pytest -m slow tests/torture/test_elastic_torchrun.py
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import counts
import pytest

from stretto.run.launch.local import _listen
from stretto.run.train.metrics import recorded_steps
from tiny_job import LLAMA, job, job_file
from train_runs import losses, tensors, train

pytestmark = [pytest.mark.apart, pytest.mark.slow, pytest.mark.timeout(3000)]

HERE = Path(__file__).parent
STEPS, BATCH, LIMIT_S = 400, 12, 300.0
EXACT = ("train.dtype=float64", f"batch.global_size={BATCH}", f"train.steps={STEPS}", "layout.dp=4")
RUN = ("elastic.layouts=auto", "checkpoint.every=3", "checkpoint.resume=auto", "metrics.every=100")


class Agents:
    """Agents of torchrun on this machine, two ranks each, which meet in the store of the first."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        with _listen(0) as listener:
            port = listener.getsockname()[1]
        self._place = ("127.0.0.1", port)
        self.ledger, self.log = folder / "samples", folder / "agents.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic"]
        command += ["--local-addr=127.0.0.1", "--rdzv-conf=last_call_timeout=2", "--max-restarts=9"]
        self._command = [*command, str(HERE / "ledger_main.py"), "train", str(job_file(folder, LLAMA))]
        self._command += [*EXACT, *RUN, *overrides, "sample.tokens=0"]
        self.all = list[subprocess.Popen[bytes]]()

    def start(self) -> subprocess.Popen[bytes]:
        names = {"LEDGER": str(self.ledger), "GLOO_SOCKET_IFNAME": "lo", "STRETTO_JOB_KEY": "of this job"}
        names["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else torch's agents cannot join a job under way
        with self.log.open("ab") as log:
            agent = subprocess.Popen(
                self._command, stdout=log, stderr=log, env={**os.environ, **names}, start_new_session=True
            )
        self.all.append(agent)
        return agent

    def begin(self) -> subprocess.Popen[bytes]:
        """Start the first, which holds the store: a job whose store is gone is gone; then the second."""
        self.start()
        self.wait(self._listens)
        return self.start()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(self._place) == 0

    def lines(self) -> list[tuple[list[float], int, int, list[int]]]:
        """Of all ranks and attempts: the attempt, the number of ranks, the step and its samples."""
        text = self.ledger.read_text() if self.ledger.exists() else ""
        return [tuple(json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not ready():
            assert self.all[0].poll() is None, self.log.read_text()[-8000:]
            assert time.monotonic() < end, self.log.read_text()[-8000:]
            time.sleep(0.05)

    def wait_for_ranks(self, ranks: int) -> None:
        """Until so many have trained some steps of a new attempt."""
        before = {str(line[0]) for line in self.lines()}
        new = lambda: [line for line in self.lines() if line[1] == ranks and str(line[0]) not in before]  # noqa: E731
        self.wait(lambda: len({step for _, _, step, _ in new()}) > 4)

    def end(self) -> None:
        for agent in self.all:
            lose(agent)


def family(process: int) -> list[int]:
    """A process and all that descend from it."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    processes = [process]
    for ancestor in processes:
        processes += [child for child, parent in parents.items() if parent == ancestor]
    return processes


def lose(agent: subprocess.Popen[bytes]) -> None:
    """As when the machine of an agent is gone."""
    if agent.poll() is None:
        for process in family(agent.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    agent.wait()


def trained(agents: Agents) -> dict[int, list[int]]:
    """The samples of every step, in the last attempt that has made it."""
    last = {step: attempt for attempt, _, step, _ in agents.lines()}
    steps = dict[int, list[int]]()
    for attempt, _, step, samples in agents.lines():
        if attempt == last[step]:
            steps.setdefault(step, []).extend(samples)
    return {step: sorted(samples) for step, samples in sorted(steps.items())}


def test_agents_that_leave_and_join_lose_and_repeat_no_sample(tmp_path: Path) -> None:
    uninterrupted, parts = (
        job(tmp_path, *EXACT, f"run.name={name}", model=LLAMA) for name in ("whole", "parts")
    )
    train(uninterrupted)
    agents = Agents(tmp_path, "run.name=parts")
    changes = list[str]()
    try:
        other = agents.begin()
        agents.wait_for_ranks(4)
        for _ in range(2):
            lose(other)
            agents.wait_for_ranks(2)
            other = agents.start()
            agents.wait_for_ranks(4)
            other.terminate()
            agents.wait_for_ranks(2)
            other = agents.start()
            agents.wait_for_ranks(4)
            changes += ["killed", "joined", "asked to stop", "joined"]
        agents.ledger.with_suffix(".fast").touch()
        assert [agents.all[0].wait(LIMIT_S), other.wait(LIMIT_S)] == [0, 0], agents.log.read_text()[-8000:]
    finally:
        agents.end()
    assert trained(agents) == {
        step: list(range(BATCH * (step - 1), BATCH * step)) for step in range(1, STEPS + 1)
    }
    assert recorded_steps(parts.run.folder) == STEPS
    assert list(losses(parts)) == list(range(1, STEPS + 1))
    resized, reference = tensors(parts, STEPS), tensors(uninterrupted, STEPS)
    names = [name for name in reference if name.startswith("model.")]
    apart = max(float((resized[n] - reference[n]).abs().max() / reference[n].abs().max()) for n in names)
    assert apart < 1e-9
    counts.record(
        "agents of torchrun killed, asked to stop or started while 2 or 4 ranks train, planned layouts",
        tried=len(changes),
        passed=len(changes),
        command="pytest -m slow tests/torture/test_elastic_torchrun.py",
        note=f"{STEPS * BATCH:,} samples each in their step; weights within {apart:.1e} of the largest",
    )
