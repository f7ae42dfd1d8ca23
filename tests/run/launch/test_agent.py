"""The agent's exit code; and a preemption: the printed command, a signal, the save, the same bits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from stretto.run.launch.cluster import ClusterJob, node_commands
from stretto.run.launch.slurm import script
from stretto.run.launch.stop import SAVED
from tiny_job import job, job_file
from train_runs import losses, same, tensors, train

PATIENCE = 90.0  # seconds; a loaded machine is slow to import torch
STEPS = 12
# a signal comes in time
SLOWLY = "import time\n\ndef on_step_end(run, record):\n    time.sleep(0.2)\n"


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


# of SLURM, on one machine: srun runs its command here, scontrol names the host and notes the requeue
SLURM = {
    "python": f'exec {sys.executable} "$@"',
    "srun": 'while [[ $1 == -* ]]; do shift; done\nexec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$0.log"; fi',
}


@pytest.mark.parametrize(
    "again",
    ["ranks", *(pytest.param(command, marks=pytest.mark.slow) for command in ("command", "slurm"))],
)
def test_a_preempted_job_started_again_reaches_the_same_bits(
    tmp_path: Path, started: list[subprocess.Popen[str]], again: str
) -> None:
    """Started again by the same command, by SLURM's requeue of the batch script, or on a rank of this
    process, which costs a third of the time.
    """
    path = job_file(tmp_path)
    ranks = 1 if again == "ranks" else 2
    settings = [f"layout.dp={ranks}", f"train.steps={STEPS}"]
    uninterrupted, preempted = (
        job(tmp_path, *settings, f"run.name={name}") for name in ("whole", "preempted")
    )
    train(uninterrupted)
    (tmp_path / "slowly.py").write_text(SLOWLY)
    cluster_job = ClusterJob(
        name="preempted",
        config=str(path),
        overrides=[*settings, "run.name=preempted", f"train.hooks=[{tmp_path}/slowly.py:on_step_end]"],
        layout=f"dp={ranks}",
        nodes=1,
        ranks_per_node=ranks,
        port=free_port(),
    )
    slurm = again == "slurm"
    text = (
        script(cluster_job)
        if slurm
        else node_commands(cluster_job, None).replace("\npython", "\nexec python")
    )
    for name, body in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def start(requeues: int = 0) -> subprocess.Popen[str]:
        agent = subprocess.Popen(
            ["bash", "-c", text],
            env={
                **os.environ,
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "77",
                "SLURM_JOB_NODELIST": "node1",
                "SLURM_RESTART_COUNT": str(requeues),
            },
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
    printed = agent.communicate(timeout=PATIENCE)[0]
    assert agent.returncode == (0 if slurm else SAVED), printed
    assert "asked to stop: saving after step" in printed
    assert 2 <= len(losses(preempted)) < STEPS
    if slurm:
        assert (tmp_path / "scontrol.log").read_text() == "requeue 77\n"
    if again != "ranks":
        agent = start(requeues=1)
        printed = agent.communicate(timeout=PATIENCE)[0]
        assert agent.returncode == 0, printed
        assert "resumed from" in printed
    else:
        train(job(tmp_path, *settings, "run.name=preempted", "checkpoint.resume=auto"))
    assert losses(preempted) == losses(uninterrupted)
    assert same(tensors(preempted, STEPS), tensors(uninterrupted, STEPS))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
