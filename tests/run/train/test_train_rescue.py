"""A run's folder is removed or replaced while its job trains: the job ends with an error, and what it held is
written to another folder, from which it goes on as if nothing had happened.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.run.config import TrainConfig
from stretto.run.launch import lease as lease_module
from stretto.run.launch.lease import LEASE
from stretto.run.launch.local import prepare
from stretto.run.train import launch as launch_module
from stretto.run.train.language_job import LANGUAGE
from stretto.run.train.launch import PRELOAD, run_job
from stretto.run.train.metrics import EVENTS, STEPS, Metrics, StepRecord, read_lines
from tiny_job import job
from train_runs import Hook, at_step, losses, same, tensors, with_hooks

pytestmark = pytest.mark.apart


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rescue")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> TrainConfig:
    """An undisturbed run."""
    config = job(folder, "layout.dp=2", "run.name=whole")
    run_job(LANGUAGE, config, quiet=True)
    return config


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a job with hooks, whose folder is lost; what it says."""

    def run(config: TrainConfig, *hooks: Hook) -> str:
        prepare(PRELOAD)
        monkeypatch.setattr(launch_module, "run_ranks", with_hooks(launch_module.run_ranks, hooks))
        with pytest.raises(StrettoError) as caught:
            run_job(LANGUAGE, config, quiet=True)
        monkeypatch.undo()
        return str(caught.value)

    return run


def lose(trainer: Any, how: str) -> None:
    run = trainer.checkpointer._config.run.folder
    if how == "lease":
        lease_module._RETRY_S = 0.1
        (run / LEASE).unlink()
    else:
        run.rename(run.with_name(f"{run.name}-moved"))
        shutil.rmtree(run.with_name(f"{run.name}-moved")) if how == "removed" else None
    if how == "replaced":
        shutil.copytree(run.with_name(f"{run.name}-moved"), run)


def rescued(config: TrainConfig, **changes: Any) -> TrainConfig:
    """The config of the rescued run, to go on with."""
    run = replace(config.run, name=f"{config.run.name}-rescued")
    return replace(config, run=run, checkpoint=replace(config.checkpoint, resume="auto"), **changes)


CASES = [
    pytest.param("removed", 3, (), marks=pytest.mark.slow),
    pytest.param("replaced", 3, (), marks=pytest.mark.slow),
    ("lease", 6, ("checkpoint.every=2",)),
    pytest.param("removed", 6, (), marks=pytest.mark.slow),
    ("removed", 4, ("checkpoint.every=2", "checkpoint.async_save=true", "metrics.to=[]")),
]


@pytest.mark.parametrize(("how", "step", "overrides"), CASES)
def test_a_lost_folder_ends_the_job_and_what_it_held_goes_on_elsewhere(
    folder: Path,
    undisturbed: TrainConfig,
    lost: Callable[..., str],
    how: str,
    step: int,
    overrides: tuple[str, ...],
) -> None:
    config = job(folder, "layout.dp=2", f"run.name={how}-{step}", *overrides)
    text = lost(config, at_step(step, 0, lose, how))
    again = rescued(config)
    says = {"lease": f"{LEASE}, by which"}.get(how, f"run folder {config.run.folder} was {how}")
    assert says in text
    assert f"its config and records are now in {again.run.folder}, with step-" in text
    assert f"hint: continue with run.name={again.run.name} --resume auto" in text
    assert config.run.folder.exists() == (how != "removed")
    assert f"name: {again.run.name}" in (again.run.folder / "config.yaml").read_text()
    assert (again.run.folder / "tokenizer.json").is_file()
    done = [record["step"] for record in read_lines(again.run.folder / STEPS)]
    assert done == list(range(1, len(done) + 1))
    assert step <= len(done)
    assert not (again.run.folder / EVENTS).exists()
    run_job(LANGUAGE, again, quiet=True)
    assert same(tensors(undisturbed, 6), tensors(again, 6))
    assert losses(undisturbed) == losses(again)


def test_a_rollback_that_finds_no_folder_rescues_the_run(folder: Path, lost: Callable[..., str]) -> None:
    config = job(folder, "layout.dp=2", "run.name=back", "guard.on_nonfinite=rollback", "checkpoint.every=2")
    text = lost(config, at_step(4, 0, lose, "removed"), at_step(4, None, nan_once))
    assert "was removed while the job wrote to it" in text
    again = rescued(config)
    assert [path.name for path in (again.run.folder / "checkpoints").iterdir()] == ["step-00000004"]
    assert [record["step"] for record in read_lines(again.run.folder / EVENTS)] == [4]
    assert not config.run.folder.exists()
    run_job(LANGUAGE, again, quiet=True)
    assert len(losses(again)) == 6


def nan_once(trainer: Any) -> None:
    """The next step's loss is not a number."""
    inner = trainer.task.model.step

    def step(*arguments: Any, **named: Any) -> Any:
        trainer.task.model.step = inner
        return inner(*arguments, **named) * float("nan")

    trainer.task.model.step = step


def test_weights_that_cannot_be_saved_are_named(folder: Path, lost: Callable[..., str]) -> None:
    config = job(folder, "layout.dp=2", "run.name=spoilt")
    text = lost(config, at_step(6, 0, lose, "removed"), at_step(6, None, block_saves))
    assert "its weights could not be saved: rank 0: planted" in text
    assert len(list(read_lines(rescued(config).run.folder / STEPS))) == 6


def block_saves(trainer: Any) -> None:
    from stretto.engine.parallel.control import CollectiveError

    def refuse(save: Any) -> Path:
        raise CollectiveError("rank 0: planted")

    trainer.checkpointer._write = refuse


def written(folder: Path) -> Metrics:
    metrics = Metrics(folder, steps=9, out=io.StringIO())
    for step in (1, 2):
        metrics.step(record(step))
    return metrics


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=1.0, grad_norm=None, lr=0.1, tokens=step, tokens_per_s=1.0, step_time_s=1.0
    )


def test_a_file_server_that_has_forgotten_the_file_is_a_loss_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: Any) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with written(tmp_path / "run") as metrics:
        calls = list[int]()
        metrics.on_loss = lambda: calls.append(1)
        shutil.rmtree(tmp_path / "run")
        monkeypatch.setattr(os, "pread", stale)
        monkeypatch.setattr(os, "fstat", stale)
        metrics.step(record(3))
        metrics.step(record(4))
        metrics.event({"step": 4})
        monkeypatch.undo()
        monkeypatch.setattr(os, "pread", stale)
        assert calls == [1]
        assert metrics.lost == f"run folder {tmp_path / 'run'} was removed while the job wrote to it"
        (tmp_path / "other").mkdir()
        assert metrics.rescue(tmp_path / "other") == []  # of so few records all are in memory
    assert [record["step"] for record in read_lines(tmp_path / "other" / STEPS)] == [1, 2, 3, 4]
    assert [record["step"] for record in read_lines(tmp_path / "other" / EVENTS)] == [4]
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_replaced_alone_is_written_anew(tmp_path: Path) -> None:
    with written(tmp_path) as metrics:
        (tmp_path / STEPS).unlink()
        metrics.step(record(3))
        (tmp_path / "edited").write_text("")
        (tmp_path / "edited").replace(tmp_path / STEPS)
        metrics.step(record(4))
        assert metrics.lost is None
    assert [record["step"] for record in read_lines(tmp_path / STEPS)] == [1, 2, 3, 4]
