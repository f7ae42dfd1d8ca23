"""The lease of a run's folder: who holds it, who is refused, and when it is taken over."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pages import ROOT, run_here
from stretto.errors import StrettoError
from stretto.run.config.schema import TrainConfig
from stretto.run.launch import lease as module
from stretto.run.launch.lease import LEASE, RunFolderLost, check_lease, lease, share_folder
from stretto.run.launch.local import run_ranks
from stretto.run.train.imported import import_model
from stretto.run.train.language_job import LANGUAGE
from stretto.run.train.launch import run_job
from tiny_job import job
from train_runs import at_step, train

HOLD = """
import sys, time
from pathlib import Path
from stretto.run.launch.lease import lease, share_folder
with {how}(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def held_by() -> Generator[Hold]:
    """Starts processes that hold or share a folder."""
    started = list[subprocess.Popen[str]]()

    def hold(folder: Path, how: str = "lease") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD.format(how=how), str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def record(folder: Path, **changes: Any) -> dict[str, Any]:
    """Writes what a job of another machine has left, with the given changes."""
    written = {
        "machine": "elsewhere/1",
        "process": 7,
        "since": "today",
        "job": None,
        "starts": 0,
        "token": "theirs",
        **changes,
    }
    folder.mkdir(exist_ok=True)
    (folder / LEASE).write_text(json.dumps(written))
    return written


def refused(folder: Path) -> str:
    with pytest.raises(StrettoError) as caught, lease(folder):
        pass
    return str(caught.value)


def test_one_job_holds_a_folder_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with lease(folder):
        assert json.loads((folder / LEASE).read_bytes())["process"] == os.getpid()
        check_lease(folder)
        assert "in use by a job" in refused(folder)
        check_lease(folder)
    assert list(tmp_path.iterdir()) == []
    with lease(folder):
        (folder / "config.yaml").touch()
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


def test_the_second_job_names_the_first_until_that_has_died(tmp_path: Path, held_by: Hold) -> None:
    first = held_by(tmp_path)
    assert f"process {first.pid}" in refused(tmp_path)
    first.send_signal(signal.SIGSTOP)  # it may go on
    assert f"process {first.pid}" in refused(tmp_path)
    first.kill()
    first.wait()
    with lease(tmp_path):
        check_lease(tmp_path)


def test_ranks_that_outlive_their_launcher_are_waited_for(
    tmp_path: Path, held_by: Hold, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = held_by(tmp_path, "share_folder")
    with share_folder(tmp_path):  # ranks do not hinder each other
        pass
    monkeypatch.setattr(module, "STALE_S", 1.5)
    assert "ranks of an earlier job" in refused(tmp_path)
    assert "waiting until they have ended" in capsys.readouterr().err
    monkeypatch.setattr(module, "STALE_S", 60)
    rank.kill()
    with lease(tmp_path):
        pass


@contextmanager
def renewing(folder: Path, clock_s: float) -> Generator[None]:
    """Another machine, whose clock is so far ahead of this one's, renews its lease every 50 ms."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.05):
            now = time.time() + clock_s
            os.utime(folder / LEASE, (now, now))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


CLOCKS = [0, 3 * 3600, -3 * 3600]


@pytest.mark.parametrize("clock_s", CLOCKS)
def test_a_job_of_another_machine_is_watched_by_no_clock_but_one_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "STALE_S", 1.5)
    monkeypatch.setattr(module, "_SETTLE_S", 0.05)
    record(tmp_path)
    with renewing(tmp_path, clock_s):
        message = refused(tmp_path)
    assert "in use by a job on host elsewhere, process 7, since today; it has just renewed" in message
    assert " ago" not in message
    assert json.loads((tmp_path / LEASE).read_bytes())["token"] == "theirs"
    began = time.monotonic()
    with lease(tmp_path):  # its last sign of life is of 3 hours ago, or ahead
        assert 1.5 <= time.monotonic() - began < 15
        assert json.loads((tmp_path / LEASE).read_bytes())["process"] == os.getpid()
        monkeypatch.setenv("STRETTO_LEASE", "theirs")  # the other comes back
        with pytest.raises(StrettoError, match="was taken over by a job on host"):
            check_lease(tmp_path)
        monkeypatch.undo()
    assert "in use by a job on host elsewhere" in capsys.readouterr().err


def test_of_two_machines_that_take_a_lease_over_at_once_one_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALE_S", 0.3)
    record(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: record(tmp_path, token="a third", machine="third/1"))
    assert "in use by a job on host third" in refused(tmp_path)


def test_a_lease_that_cannot_be_read_for_a_moment_is_renewed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    inner, answers = module.read_lease, iter([None, None])
    with lease(tmp_path):
        monkeypatch.setattr(module, "read_lease", lambda folder: next(answers, inner(folder)))
        time.sleep(0.2)
        os.utime(tmp_path / LEASE, (0, 0))
        time.sleep(0.2)
        assert (tmp_path / LEASE).stat().st_mtime


@pytest.mark.parametrize("how", ["removed", "replaced", "lease"])
def test_a_folder_that_is_gone_is_not_held(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.1)
    folder = tmp_path / "run"
    says = {
        "removed": "run was removed",
        "replaced": "run was replaced by another",
        "lease": "lease.json, by",
    }

    def lose() -> None:
        (folder / "config.yaml").touch()
        check_lease(folder)
        if how == "lease":
            (folder / LEASE).unlink()
        else:
            folder.rename(tmp_path / "moved")
        if how == "replaced":
            shutil.copytree(tmp_path / "moved", folder)

    with pytest.raises(RunFolderLost, match=says[how]), lease(folder):
        lose()


@pytest.mark.parametrize(
    ("recorded", "environment", "goes"),
    [
        ({"job": "SLURM_JOB_ID 3"}, {"SLURM_JOB_ID": "3"}, False),  # two steps of one job
        ({"job": "SLURM_JOB_ID 3"}, {"SLURM_JOB_ID": "3", "SLURM_RESTART_COUNT": "1"}, True),
        ({"job": "SLURM_JOB_ID 3"}, {"SLURM_JOB_ID": "4", "SLURM_RESTART_COUNT": "1"}, False),
        ({"job": "TORCHELASTIC_RUN_ID a"}, {"TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "3"}, True),
        ({"job": "TORCHELASTIC_RUN_ID a"}, {"TORCHELASTIC_RUN_ID": "b"}, False),
        ({}, {"TORCHELASTIC_RUN_ID": "none"}, False),
    ],
)
def test_a_job_that_is_started_again_elsewhere_goes_on_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded: dict[str, str],
    environment: dict[str, str],
    goes: bool,
) -> None:
    record(tmp_path, **recorded)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if goes:
        with lease(tmp_path):
            check_lease(tmp_path)
    else:
        with renewing(tmp_path, 0):
            assert "host elsewhere" in refused(tmp_path)


def test_without_locks_the_process_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", unable)
    with lease(tmp_path):
        assert f"process {os.getpid()}" in refused(tmp_path)
        recorded = json.loads((tmp_path / LEASE).read_bytes())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    record(tmp_path, machine=recorded["machine"], process=ended.pid)
    with lease(tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "[]", "{", '{"machine": 1}', "[" * 5000, '{"process": 1e999}'])
def test_a_damaged_lease_is_nobody_s(tmp_path: Path, text: str) -> None:
    (tmp_path / LEASE).write_text(text)
    with lease(tmp_path):
        check_lease(tmp_path)
    assert not (tmp_path / LEASE).exists()


@pytest.mark.timeout(20)
def test_a_pipe_is_no_lease(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LEASE)
    with pytest.raises(StrettoError, match=r"lease\.json is not a plain file"), lease(tmp_path):
        pass
    check_lease(tmp_path)


def test_signs_of_life_end_when_another_has_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    path = tmp_path / LEASE
    with lease(tmp_path):
        os.utime(path, (0, 0))
        while not path.stat().st_mtime:
            time.sleep(0.01)
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "token": "theirs"}))
        time.sleep(0.1)
        os.utime(path, (0, 0))
        time.sleep(0.1)
        assert not path.stat().st_mtime
    assert path.exists()


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written to" in refused(tmp_path / "file")
    assert "cannot be written to" in refused(tmp_path / "file" / "run")
    (tmp_path / "run" / LEASE).mkdir(parents=True)
    assert "cannot be written to" in refused(tmp_path / "run")


def refusal(config: TrainConfig) -> str:
    """What a rank is told that another launcher has started."""
    with pytest.raises(StrettoError) as caught:
        run_job(LANGUAGE, config, quiet=True)
    return str(caught.value)


def test_all_ranks_are_refused_as_rank_0_is(tmp_path: Path) -> None:
    config = job(tmp_path, "layout.dp=2")
    with lease(config.run.folder):
        first, second = run_ranks(2, refusal, config)
    assert first == second
    assert f"{config.run.folder} is in use by a job on host" in first
    assert "hint: wait until it has ended, or give another run.name" in first


def lose_the_lease(trainer: Any) -> None:
    record(trainer.checkpointer._config.run.folder)
    os.environ["STRETTO_LEASE"] = "ours"


@pytest.mark.apart
def test_a_job_that_lost_its_lease_saves_no_more(tmp_path: Path) -> None:
    config = job(tmp_path, "checkpoint.every=2")
    with pytest.raises(StrettoError, match="taken over by a job on host elsewhere"):
        train(config, at_step(3, 0, lose_the_lease))
    assert [path.name for path in (config.run.folder / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_folder_that_is_missing_is_no_cause_of_what_fails_later(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught, share_folder(tmp_path / "missing"):
        raise RuntimeError("later")
    assert caught.value.__context__ is None


def test_imports_and_exports_write_into_no_folder_of_a_running_job(tmp_path: Path, held_by: Hold) -> None:
    """The job there has written neither a checkpoint nor a record of a step so far."""
    runpy.run_path(str(ROOT / "examples" / "tiny_llama.py"))["main"](str(tmp_path / "published"))
    import_model(tmp_path / "published", tmp_path / "other")
    assert not (tmp_path / "other" / LEASE).exists()
    export = ["checkpoint", "export", "other", "--out"]
    run_here(["stretto", *export, "dcp", "--format", "dcp"], tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "tokenizer.json").write_text("the job's own")
    held_by(run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    into = ["checkpoint", "import", "--out", "run"]
    for arguments, says in (
        ([*into, "published"], "run is in use by a job on host"),
        ([*into, "dcp", "--format", "dcp", "--model", "other/config.yaml"], "run is in use by a job on host"),
        ([*export, "run"], "run is in use by a job on host"),
        ([*export, "run", "--format", "dcp"], "run is not empty"),
    ):
        assert says in run_here(["stretto", *arguments], tmp_path, code=2)
        assert {path.name: path.read_bytes() for path in run.iterdir()} == before, arguments
