"""The script for Ray, run on a stand-in for Ray with actors as threads: what each node runs, and restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stretto.run.launch.cluster import ClusterJob
from stretto.run.launch.ray import script

# of `ray`: what the script uses
RAY = """
import concurrent.futures, os, sys, types

pool = concurrent.futures.ThreadPoolExecutor(9)
bundles = []

class RayError(Exception): pass

class Method:
    def __init__(self, method): self.method = method
    def remote(self, *arguments): return pool.submit(self.method, *arguments)

class Actor:
    def __init__(self, kind): self.actor = kind()
    def __getattr__(self, name): return Method(getattr(self.actor, name))

def remote(**options):
    assert options["max_concurrency"] == 2
    def decorate(kind):
        class Handle:
            @staticmethod
            def options(scheduling_strategy): return Handle
            @staticmethod
            def remote(): return Actor(kind)
        return Handle
    return decorate

def placement_group(asked, strategy):
    bundles.append(asked)
    assert strategy == "STRICT_SPREAD"
    if len(bundles) < 2 or "WAITS" not in os.environ:
        return types.SimpleNamespace(ready=lambda: pool.submit(int))
    print("waiting for nodes", flush=True)  # for ever
    return types.SimpleNamespace(ready=concurrent.futures.Future)

def wait(futures, num_returns=1, timeout=None):
    wanted = "ALL_COMPLETED" if num_returns == len(futures) else "FIRST_COMPLETED"
    done, left = concurrent.futures.wait(futures, timeout / 10, wanted)
    return [f for f in futures if f in done], [f for f in futures if f in left]

def get(future):
    result = future.result()
    if result == 255: raise RayError("the actor died")  # stands for a node that is lost
    return result
def init(): pass

ray = sys.modules[__name__]
util = types.ModuleType("ray.util")
util.get_node_ip_address = lambda: "10.0.0.1"
for name, values in {
    "ray.util": util,
    "ray.exceptions": {"RayError": RayError},
    "ray.util.placement_group": {"placement_group": placement_group, "remove_placement_group": print},
    "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": lambda *_: None},
}.items():
    module = values if isinstance(values, types.ModuleType) else types.ModuleType(name)
    if isinstance(values, dict): module.__dict__.update(values)
    sys.modules[name] = module
"""
# of `python`: logs its words, and ends with the codes of a file, a line each
PYTHON = """#!/bin/bash
echo "$NODE_INDEX $NODE_HOST ${#STRETTO_JOB_KEY} $*" >> "$LOG"
code=$(head -n 1 "$LOG.codes.$NODE_INDEX"); sed -i 1d "$LOG.codes.$NODE_INDEX"
[ "$code" = wait ] || exit "$code"
trap 'exit 75' TERM
while :; do sleep 0.05; done
"""


def start(folder: Path, codes: list[str], **changes: Any) -> subprocess.Popen[str]:
    fields = {"name": "a", "config": "a.yaml", "layout": "dp=2", "nodes": 2, "ranks_per_node": 1, **changes}
    (folder / "ray.py").write_text(RAY)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text(PYTHON)
    (folder / "bin" / "python").chmod(0o755)
    (folder / "job.py").write_text(script(ClusterJob(**fields)))
    for node, lines in enumerate(codes):
        (folder / f"log.codes.{node}").write_text(lines.replace(" ", "\n") + "\n")
    variables = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "LOG": str(folder / "log")}
    return subprocess.Popen(
        [sys.executable, str(folder / "job.py")],
        env=os.environ | variables | {"PYTHONPATH": str(folder)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize(
    ("codes", "restarts", "code", "attempts"),
    [
        (["0", "0"], 5, 0, 1),
        (["75 69 0", "75 1 0"], 5, 0, 3),
        (["3", "1"], 5, 3, 1),
        (["255 0", "1 0"], 5, 0, 2),  # a lost node
        (["75 75", "75 75"], 1, 75, 2),
    ],
)
def test_a_job_that_saved_is_restarted(
    codes: list[str], restarts: int, code: int, attempts: int, tmp_path: Path
) -> None:
    driver = start(tmp_path, codes, restarts=restarts)
    text = driver.communicate(timeout=60)[0]
    assert driver.returncode == code, text
    assert len((tmp_path / "log").read_text().splitlines()) == 2 * attempts


def test_stopping_the_driver_stops_all_nodes(tmp_path: Path) -> None:
    driver = start(tmp_path, ["wait", "wait"], devices_per_node=4, cpus_per_rank=3)
    log = tmp_path / "log"
    end = time.monotonic() + 60
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    driver.send_signal(signal.SIGTERM)
    text = driver.communicate(timeout=60)[0]
    assert driver.returncode == 75, text
    for line in log.read_text().splitlines():
        node, host, key, *command = line.split()
        assert (host, key) == ("10.0.0.1", "64")
        assert f"--node-rank={node} --master-addr=10.0.0.1 --master-port=29400" in " ".join(command)
    assert "BUNDLE = {'CPU': 3, 'GPU': 4}" in (tmp_path / "job.py").read_text()


def test_a_driver_that_waits_for_nodes_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAITS", "1")
    driver = start(tmp_path, ["75", "75"])
    assert driver.stdout is not None
    while "waiting for nodes" not in (line := driver.stdout.readline()):
        assert line, "it has ended"
    driver.send_signal(signal.SIGTERM)
    try:
        driver.communicate(timeout=30)
        assert driver.returncode == 75
    finally:
        driver.kill()
