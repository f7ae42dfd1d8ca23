"""Profiles of steps by torch's profiler: a file for every rank, with the wanted steps and no others."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stretto.run.config.check import find_problems
from stretto.run.train.profiler import StepProfiler, name_processes
from tiny_job import LLAMA, job
from train_runs import train

PHASES = {"the batch", "the agreement", "the update", "the forwards and backwards"}


def profiles(run: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of each file in a run's profile folder, by its name."""
    return {
        path.name: json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        for path in sorted((run / "profile").iterdir())
    }


def marks(events: list[dict[str, Any]]) -> set[str]:
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def steps(events: list[dict[str, Any]]) -> list[str]:
    return sorted(name for name in marks(events) if re.fullmatch(r"step \d+", name))


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_each_rank_writes_the_wanted_steps_with_their_phases_and_actions(tmp_path: Path):
    overrides = ("layout.pp=2", "schedule.name=1f1b", "train.steps=4", "sample.tokens=0")
    plain = job(tmp_path, *overrides, "run.name=plain", model=LLAMA)
    train(plain)
    assert not (plain.run.folder / "profile").exists()
    chosen = ("metrics.profile=[2, 3]", "metrics.profile_memory=[1]", "run.name=profiled")
    config = job(tmp_path, *overrides, *chosen, model=LLAMA)
    train(config)
    assert losses(config.run.folder) == losses(plain.run.folder)
    files = profiles(config.run.folder)
    assert list(files) == [f"rank-{rank:05}.steps-2-3.json.gz" for rank in (0, 1)]
    numbers = list[set[int]]()
    for rank, events in enumerate(files.values()):
        assert steps(events) == ["step 2", "step 3"]
        assert marks(events) >= PHASES | {f"{rank}F0", f"{rank}B0"}
        within = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == "step 3"}
        first, end = within["step 3"]
        phases = [e for e in events if e.get("name") in PHASES and e["ts"] >= first]
        assert {e["name"] for e in phases} == PHASES
        assert all(e["ts"] + e["dur"] <= end for e in phases)
        names = [e["args"]["name"] for e in events if e.get("name") == "process_name"]
        assert names == [f"rank {rank} (pp{rank})"]
        assert ("[memory]" in {e["name"] for e in events}) is (rank == 1)
        numbers.append({event["pid"] for event in events})
    assert not numbers[0] & numbers[1], "files that are opened together share no process"


def test_an_asynchronous_schedule_is_profiled(tmp_path: Path):
    overrides = ("layout.pp=2", "schedule.name=pipedream", "optim.clip=null", "train.steps=5")
    config = job(tmp_path, *overrides, "sample.tokens=0", "metrics.profile=[2, 3]", model=LLAMA)
    train(config)
    for events in profiles(config.run.folder).values():
        assert steps(events) == ["step 2", "step 3"]
        assert marks(events) >= {"the batch", "the agreement"}


def test_a_resumed_run_profiles_the_steps_that_it_makes(tmp_path: Path):
    overrides = ("train.steps=4", "sample.tokens=0", "checkpoint.every=2", "metrics.profile=[2, 3]")
    uninterrupted = job(tmp_path, *overrides, model=LLAMA)
    train(uninterrupted)
    (old,) = (uninterrupted.run.folder / "profile").iterdir()
    old.unlink()
    checkpoint = uninterrupted.run.folder / "checkpoints" / "step-00000002"
    resumed = job(tmp_path, *overrides, f"checkpoint.resume={checkpoint}", "run.name=resumed", model=LLAMA)
    train(resumed)
    assert list(profiles(resumed.run.folder)) == ["rank-00000.steps-3-3.json.gz"]
    task: Any = SimpleNamespace(device=torch.device("cpu"))
    lines = list[str]()
    for done in (0, 1, 2, 3):
        StepProfiler(resumed, task, None, done, lines.append)
    assert [line.split(":")[0] for line in lines] == [
        "profiles steps 3 to 3 of steps 2 to 3 (metrics.profile)",
        "nothing to profile",
    ]


def test_devices_are_named_by_their_rank():
    events: list[dict[str, Any]] = []
    for process, label in ((77, "CPU"), (0, "GPU 0")):
        events.append({"name": "process_name", "pid": process, "args": {"name": "python"}})
        events.append({"name": "process_labels", "pid": process, "args": {"labels": label}})
    name_processes(events, 3, "rank 3 (dp1)")
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "rank 3 (dp1)",
        "rank 3 (dp1) GPU 0",
    ]
    assert [e["pid"] for e in events] == [3000, 3000, 3001, 3001]


@pytest.mark.parametrize(
    ("overrides", "rule", "fix"),
    [
        (["metrics.profile=[7, 9]"], "the run ends after step 8", "metrics.profile=[6,8]"),
        (["metrics.profile=[3, 2]"], "a step from 1 on", "metrics.profile=[10,13]"),
        (["metrics.profile=[0]"], "a step from 1 on", "metrics.profile=[10,13]"),
        (["metrics.profile_memory=[0]"], "no steps are profiled", "metrics.profile=[10,13]"),
        (["metrics.profile=[2]", "metrics.profile_memory=[1]"], "there is no rank 1", "profile_memory=[0]"),
    ],
)
def test_steps_and_ranks_that_do_not_exist_are_refused(
    tmp_path: Path, overrides: list[str], rule: str, fix: str
):
    config = job(tmp_path, "train.steps=8", *overrides, model=LLAMA)
    (problem,) = find_problems(config)
    assert rule in problem.message
    assert problem.fix is not None
    assert fix in problem.fix
