"""Ranks that come and go: 4, then 3, then 2, then 4. Every step trains the samples that it trains in a run
that nothing disturbs, and the weights are that run's but for rounding.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import counts
import pytest
import torch

import train_runs
from recommender_job import config_of
from stretto.engine.checkpoint.read import read_whole
from stretto.engine.parallel.control import this_rank
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.train.job import RECOMMENDER
from stretto.run.config import TrainConfig
from stretto.run.launch import restart
from stretto.run.train import launch as launch_module
from stretto.run.train.language_job import LANGUAGE
from stretto.run.train.launch import run_job
from stretto.run.train.replan import for_ranks
from tiny_job import LLAMA, job
from train_runs import Hook, around_step, at_step, keep_samples, losses, send_self, tensors, train

STEPS = 8
LISTED = "elastic.layouts=[{dp: 3}, {pp: 2, micro_size: 2, schedule: gpipe}, {}]"
PLANNED = "elastic.layouts=auto"
EXACT = ("train.dtype=float64", "batch.global_size=12", f"train.steps={STEPS}", "layout.dp=4")
NAMES = range(12 * STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


def ledger(path: Path) -> dict[int, list[int]]:
    """The samples of every step, over all ranks; a step that was made again counts once, the last time."""
    steps = dict[int, list[int]]()
    for line in path.read_text().splitlines():
        step, samples = json.loads(line)
        steps.setdefault(step, []).extend(samples)
    return {step: sorted(samples) for step, samples in steps.items()}


def undisturbed(folder: Path) -> TrainConfig:
    config = job(folder, *EXACT, "run.name=whole", model=LLAMA)
    if not config.run.folder.exists():
        train(config, keep_samples(str(folder / "whole.samples")))
    return config


def equal_weights(config: TrainConfig, other: TrainConfig) -> float:
    """The largest difference of two weights, over the largest weight of the tensor."""
    resized, reference = tensors(config, STEPS), tensors(other, STEPS)
    assert resized.keys() == reference.keys()
    names = [name for name in reference if name.startswith("model.")]
    assert names
    return max(float((resized[n] - reference[n]).abs().max() / reference[n].abs().max()) for n in names)


@pytest.mark.parametrize("layouts", [LISTED, pytest.param(PLANNED, marks=pytest.mark.slow)])
def test_ranks_that_come_and_go_lose_and_repeat_no_sample(folder: Path, tmp_path: Path, layouts: str) -> None:
    uninterrupted, samples, how = (
        undisturbed(folder),
        tmp_path / "samples",
        "listed" if layouts is LISTED else "planned",
    )
    changes = [(4, 2), (3, 4), (2, 6), (4, STEPS)]
    for ranks, until in changes:
        overrides = (layouts, f"run.name={how}", "checkpoint.resume=auto")
        config = for_ranks(job(folder, *EXACT, *overrides, model=LLAMA), ranks, print)
        stop = [at_step(until, ranks - 1, send_self, signal.SIGUSR1)] if until < STEPS else []
        assert train(config, keep_samples(str(samples)), *stop)["step"] == until
    assert ledger(samples) == ledger(folder / "whole.samples")
    assert [sample for step in ledger(samples).values() for sample in step] == list(NAMES)
    assert list(losses(config)) == list(range(1, STEPS + 1))
    assert equal_weights(config, uninterrupted) < 1e-12
    if os.environ.get("STRETTO_RECORD"):
        counts.record(
            f"ranks 4-3-2-4, layouts {how}: samples of a step that an undisturbed run trains in it",
            tried=len(NAMES),
            passed=len(NAMES),
            command="STRETTO_RECORD=1 pytest -m 'slow or not slow' tests/torture/test_elastic.py",
            note=f"weights within {equal_weights(config, uninterrupted):.1e} of the largest, in float64",
        )


def dies(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_again_is_done_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The third of three ranks is on a part of the machine that breaks in step 3."""
    monkeypatch.setattr(restart, "FIRST_DELAY_S", 0.01)
    overrides = (PLANNED, "run.name=broken", "checkpoint.every=2", "train.restarts=5")
    config = for_ranks(job(folder, *EXACT, *overrides, model=LLAMA), 3, print)
    hooks: list[Hook] = [at_step(3, 2, dies)]
    broken = train_runs.with_hooks(launch_module.run_ranks, hooks)
    monkeypatch.setattr(launch_module, "run_ranks", broken)
    result = run_job(LANGUAGE, config, quiet=True)
    assert (result.restarts, result.stopped) == (2, False)
    lines = capfd.readouterr().err.splitlines()
    messages = [line for line in lines if line.startswith(("restart ", "elastic", "continuing"))]
    assert messages[0].startswith(
        "restart 1 of 5: rank 2 was killed by SIGKILL in step 3; continuing from the"
    )
    assert messages[1].startswith("elastic: 2 ranks take ")
    assert messages[2] == "continuing with 2 of 3 ranks, for one was lost twice in a row"
    assert messages[3].startswith("restart 2 of 5")
    assert equal_weights(config, undisturbed(folder)) < 1e-12


def clicks(folder: Path, *overrides: str) -> RecommenderConfig:
    defaults = ("train.steps=8", "checkpoint.every=2", "layout.ranks=3", "elastic.ranks=[2]")
    return config_of(folder, *defaults, *overrides)


@pytest.mark.slow
def test_a_recommender_goes_on_with_a_rank_less(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The third rank dies whenever it is there."""
    monkeypatch.setattr(restart, "FIRST_DELAY_S", 0.01)
    uninterrupted, parts = (
        clicks(folder, f"run.name={name}", "train.restarts=3") for name in ("all", "less")
    )
    expected = run_job(RECOMMENDER, uninterrupted, quiet=True)
    inner = launch_module.run_ranks

    def broken(ranks: int, function: Any, *arguments: Any, **options: Any) -> list[Any]:
        return inner(ranks, dies_as_third, function, arguments, **options)

    monkeypatch.setattr(launch_module, "run_ranks", broken)
    result = run_job(RECOMMENDER, parts, quiet=True)
    assert result.restarts == 2
    assert "continuing with 2 of 3 ranks" in capfd.readouterr().err
    assert result.outcome is not None
    assert expected.outcome is not None
    assert result.outcome["step"] == 8
    assert result.outcome["loss"] == pytest.approx(expected.outcome["loss"], rel=1e-12)
    resized, reference = (
        read_whole(config.run.folder / "checkpoints" / "step-00000008", prefix="")[0]
        for config in (parts, uninterrupted)
    )
    for name, tensor in reference.items():
        if not name.startswith(("tables.", "per_rank")):  # tables are held in other pieces
            torch.testing.assert_close(resized[name], tensor, rtol=1e-10, atol=1e-14, msg=name)


def dies_as_third(function: Any, arguments: tuple[Any, ...]) -> Any:
    def wrapped(inner: Any, self: Any, stop: Any) -> Any:
        if this_rank() == 2 and self.progress.step + 1 == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, stop)

    around_step(wrapped)
    return function(*arguments)
