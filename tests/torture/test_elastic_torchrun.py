"""Nodes under torchrun that are lost and that join: two agents of two ranks each, of which one is killed with
its ranks and started again later. The job shrinks and grows, and comes to what an undisturbed run computes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import counts
import pytest
from test_restarts_torchrun import children

from stretto.run.config import TrainConfig
from stretto.run.launch.local import _listen
from stretto.run.train.job import run_job
from tiny_job import LLAMA, job, job_file
from train_runs import losses, tensors

pytestmark = [pytest.mark.apart, pytest.mark.slow, pytest.mark.timeout(3000)]

STEPS = 600
WORDS = (
    *("train.dtype=float64", "batch.global_size=12", "layout.dp=4", f"train.steps={STEPS}"),
    *("checkpoint.every=10", "metrics.every=100", "sample.tokens=0", "checkpoint.resume=auto"),
)
LISTED, PLANNED = "elastic.layouts=[{pp: 2, schedule: gpipe}]", "elastic.layouts=auto"
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


class Nodes:
    """Agents of torchrun, each with a session of its own, as if each were alone on a host."""

    def __init__(self, folder: Path, words: tuple[str, ...], out: Path) -> None:
        listener = _listen(0)
        port = listener.getsockname()[1]
        listener.close()
        self._words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2"]
        self._words += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=nodes"]
        self._words += ["--rdzv-conf=last_call_timeout=5", "--max-restarts=9", "-m", "stretto.cli.main"]
        self._words += ["train", str(job_file(folder, model=LLAMA)), *words]
        self.out, self._agents = out, list[subprocess.Popen[bytes]]()

    def start(self) -> subprocess.Popen[bytes]:
        """One more node."""
        with self.out.open("ab") as log:
            agent = subprocess.Popen(self._words, stdout=log, stderr=log, start_new_session=True)
        self._agents.append(agent)
        return agent

    def lose(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill an agent and its ranks at once."""
        for process in (*children(agent.pid).values(), agent.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        agent.wait()

    def close(self) -> None:
        """Leave none behind."""
        for agent in self._agents:
            if agent.poll() is None:
                self.lose(agent)


@contextmanager
def nodes(folder: Path, words: tuple[str, ...], name: str) -> Iterator[Nodes]:
    started = Nodes(folder, words, folder / f"{name}.log")
    try:
        yield started
    finally:
        started.close()


def reach(config: TrainConfig, step: int, world: int, agent: subprocess.Popen[bytes], out: Path) -> None:
    """Wait until so many steps are recorded, and so many ranks run."""
    path, end = config.run.folder / "metrics.jsonl", time.monotonic() + LIMIT_S
    while True:
        made = path.read_bytes().count(b"\n") if path.is_file() else 0
        assert made < STEPS, "the job was over before; more steps are needed"
        running = [pid for pid in children(agent.pid).values() if world_of(pid) == world]
        if made >= step and running:
            return
        assert agent.poll() is None, out.read_text()
        assert time.monotonic() < end, out.read_text()
        time.sleep(0.05)


def world_of(process: int) -> int:
    """The number of ranks of the job that a process belongs to; 0 where it has ended."""
    with suppress(OSError):
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        return next(int(one[11:]) for one in variables if one.startswith(b"WORLD_SIZE="))
    return 0


@pytest.mark.parametrize(("layouts", "how"), [(LISTED, "listed"), (PLANNED, "planned")])
def test_a_job_goes_on_when_a_node_is_lost_and_another_joins(folder: Path, layouts: str, how: str) -> None:
    whole = job(folder, *WORDS, "run.name=whole", model=LLAMA)
    if not whole.run.folder.exists():
        run_job(whole, quiet=True)
    words = (*WORDS, layouts, f"run.name={how}")
    parts = job(folder, *words, model=LLAMA)
    with nodes(folder, words, how) as started:
        stays, leaves = started.start(), started.start()
        reach(parts, 20, 4, stays, started.out)
        started.lose(leaves)
        reach(parts, 60, 2, stays, started.out)
        joins = started.start()
        reach(parts, 100, 4, stays, started.out)
        assert stays.wait(LIMIT_S) == 0, started.out.read_text()
        assert joins.wait(LIMIT_S) == 0, started.out.read_text()
    here, there = losses(parts), losses(whole)
    assert here.keys() == there.keys()
    assert max(abs(here[step] - there[step]) for step in there) < 1e-9
    ours, theirs = tensors(parts, STEPS), tensors(whole, STEPS)
    off = max(
        float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max())
        for n in theirs
        if n.startswith("model.")
    )
    assert off < 1e-9
    counts.record(
        f"a node of torchrun is lost with its ranks, and another joins (c10d, 2 nodes of 2, layouts {how})",
        tried=2,
        passed=2,
        command="pytest -m slow tests/torture/test_elastic_torchrun.py",
        note=f"4, 2 and 4 ranks; the loss of each step is the undisturbed run's; weights within {off:.1e}",
    )
