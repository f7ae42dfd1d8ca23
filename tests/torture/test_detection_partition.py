"""A job on two hosts, 2x2 ranks, whose network is cut: both sides stop, and neither writes a checkpoint. The
hosts are two network namespaces, for which this needs root and `ip`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from counts import record

from stretto.engine.checkpoint.folder import checkpoints
from stretto.engine.checkpoint.load import verify
from stretto.run.train.metrics import read_lines
from stretto.run.watch.joint import HUNG
from tiny_job import job_file

SIDES = ("a", "b")
CUTS = 5
HEAL_S = 20.0
PATIENCE_S = 240.0


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Generator[str]:
    """Two namespaces, joined by a pair of virtual cards; yields their common name."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")
    name = f"st{os.getpid() % 10000}"
    try:
        for side in SIDES:
            ip("netns", "add", name + side)
        ip("link", "add", f"{name}va", "type", "veth", "peer", "name", f"{name}vb")
        for number, side in enumerate(SIDES):
            ip("link", "set", f"{name}v{side}", "netns", name + side)
            inside = ("-n", name + side)
            ip(*inside, "addr", "add", f"10.99.0.{number + 1}/24", "dev", f"{name}v{side}")
            ip(*inside, "link", "set", f"{name}v{side}", "up")
            ip(*inside, "link", "set", "lo", "up")
        yield name
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no namespaces here: {error.stderr}")
    finally:
        for side in SIDES:
            subprocess.run(["ip", "netns", "del", name + side], check=False, capture_output=True)


def start(hosts: str, folder: Path, name: str, port: int) -> list[subprocess.Popen[bytes]]:
    """Ranks 0 and 1 on one host, 2 and 3 on the other."""
    ranks = list[subprocess.Popen[bytes]]()
    for rank in range(4):
        side = SIDES[rank // 2]
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "10.99.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": f"{hosts}v{side}",
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            "-m",
            "stretto.cli.main",
            "train",
            str(folder / "tiny.yaml"),
            "layout.dp=2",
        ]
        command += ["layout.pp=2", "train.steps=100000", "checkpoint.every=25", "train.timeout_s=600"]
        with (folder / f"{name}-{rank}.log").open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", hosts + side, *command, f"run.name={name}"],
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            )
    return ranks


def steps_of(folder: Path, name: str) -> int:
    with contextlib.suppress(OSError):
        return sum(1 for _ in read_lines(folder / "runs" / name / "metrics.jsonl"))
    return 0


def cut_once(hosts: str, folder: Path, number: int) -> tuple[float, str]:
    """Cut the network of a job, and heal it; the seconds until its last rank ended, and what was wrong."""
    name = f"cut{number}"
    ranks = start(hosts, folder, name, 29600 + number)
    try:
        end = time.monotonic() + PATIENCE_S
        while steps_of(folder, name) < 30 + 7 * number:
            if time.monotonic() > end or any(rank.poll() is not None for rank in ranks):
                return 0.0, "it does not train: " + (folder / f"{name}-0.log").read_text()[-2000:]
            time.sleep(0.05)
        ip("-n", hosts + "a", "link", "set", f"{hosts}va", "down")
        began, longest, saved = time.monotonic(), 0.0, -1
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < began + HEAL_S:
            time.sleep(0.05)
            if saved < 0 and time.monotonic() > began + 1:  # a save that was under way has come to its end
                saved = len(checkpoints(folder / "runs" / name / "checkpoints"))
        longest = time.monotonic() - began
        codes = [rank.poll() for rank in ranks]
        ip("-n", hosts + "a", "link", "set", f"{hosts}va", "up")
        time.sleep(1.0)
        folders = checkpoints(folder / "runs" / name / "checkpoints")
        logs = "".join((folder / f"{name}-{rank}.log").read_text()[-1500:] for rank in range(4))
        if codes != [HUNG] * 4:
            return longest, f"exit codes {codes}: {logs}"
        if len(folders) != saved or any(verify(checkpoint) for checkpoint in folders):
            return longest, f"{saved} checkpoints before, {len(folders)} after: {logs}"
        return longest, ""
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
            rank.wait()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_partition_stops_both_sides_and_commits_nothing(hosts: str, tmp_path: Path) -> None:
    job_file(tmp_path)
    subprocess.run(
        [sys.executable, "-m", "stretto.cli.main", "train", str(tmp_path / "tiny.yaml"), "train.steps=1"],
        check=True,
        capture_output=True,
    )  # the text is tokenised
    done = list[tuple[float, str]]()
    for number in range(CUTS):
        done.append(cut_once(hosts, tmp_path, number))
        print(number, *done[-1], flush=True)
    longest = max(seconds for seconds, _ in done)
    passed = sum(not wrong and seconds <= 15 for seconds, wrong in done)
    record(
        "the network between two hosts of 2x2 ranks is cut for 20 s (detect in 15 s)",
        tried=CUTS,
        passed=passed,
        command="pytest -m slow tests/torture/test_detection_partition.py",
        note=f"both sides end with exit code {HUNG}, no checkpoint after; at most {longest:.1f} s",
    )
    assert passed == CUTS
