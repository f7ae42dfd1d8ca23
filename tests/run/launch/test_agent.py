"""The agent's exit code; and a preemption: the printed command, a signal, the save, the same bits."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from stretto.run.launch.cluster import ClusterJob, node_commands
from stretto.run.launch.stop import SAVED
from tiny_job import job, job_file
from train_runs import losses, same, tensors, train

PATIENCE = 90.0  # seconds; a loaded machine is slow to import torch
STEPS = 60


@pytest.fixture
def started() -> Generator[list[subprocess.Popen[str]]]:
    """Processes that must not outlive the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()


def test_the_exit_code_is_that_of_the_rank_that_ended_first() -> None:
    run = """
import sys
from stretto.run.launch.agent import run
for line in ("exit 75", "exit 69", "kill -9 $$$$", "exit 0", '[ "$RANK" = 0 ] && sleep 9; exit 75'):
    print(run(["--standalone", "--nproc-per-node=2", "--no-python", "bash", "-c", line]))
"""
    done = subprocess.run(
        [sys.executable, "-c", run], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout.split() == ["75", "69", "137", "0", "75"]
    assert "exitcode  : 69" in done.stderr
    assert "exitcode  : 75" not in done.stderr


@pytest.mark.parametrize("again", ["ranks", pytest.param("command", marks=pytest.mark.slow)])
def test_a_preempted_job_started_again_reaches_the_same_bits(
    tmp_path: Path, started: list[subprocess.Popen[str]], again: str
) -> None:
    """Started again by the same command, or on ranks of this process, which costs half the time."""
    path = job_file(tmp_path)
    settings = ["layout.dp=2", f"train.steps={STEPS}"]
    whole, preempted = (job(tmp_path, *settings, f"run.name={name}") for name in ("whole", "preempted"))
    train(whole)
    text = node_commands(
        ClusterJob(
            name="preempted",
            config=str(path),
            overrides=[*settings, "run.name=preempted"],
            layout="dp=2",
            nodes=1,
            ranks_per_node=2,
            port=free_port(),
        ),
        None,
    )

    def start() -> subprocess.Popen[str]:
        agent = subprocess.Popen(
            ["bash", "-c", text.replace("\npython ", f"\nexec {sys.executable} ")],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        started.append(agent)
        return agent

    agent = start()
    metrics = preempted.run.folder / "metrics.jsonl"
    end = time.monotonic() + PATIENCE
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    agent.send_signal(signal.SIGTERM)
    said = agent.communicate(timeout=PATIENCE)[0]
    assert agent.returncode == SAVED, said
    assert "asked to stop: saving after step" in said
    assert 2 <= len(losses(preempted)) < STEPS
    if again == "command":
        agent = start()
        said = agent.communicate(timeout=PATIENCE)[0]
        assert agent.returncode == 0, said
        assert "resumed from" in said
    else:
        train(job(tmp_path, *settings, "run.name=preempted", "checkpoint.resume=auto"))
    assert losses(preempted) == losses(whole)
    assert same(tensors(preempted, STEPS), tensors(whole, STEPS))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
