"""The predicted time of a step, and how measured times are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.planner.estimate import Estimate
from stretto.planner.machines import catalogue as here
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.describe import save_cluster
from stretto.run.config import TrainConfig
from stretto.run.config.job import job_of
from stretto.run.train import prediction
from stretto.run.train.prediction import FEWEST_STEPS, WARM_UP, StepTimePrediction, predict, prediction_line
from tiny_job import job


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of configurations, on a machine without GPUs; where its profile goes."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(here, "_DRIVER", tmp_path / "no-driver")
    here.profile_path().parent.mkdir(parents=True)
    return here.profile_path()


def keep_profile(path: Path, correction: float = 1.0) -> None:
    cpu = find_cluster("cpu")
    device = replace(cpu.device, name="mine", kernels={"launch": 1e-6})
    save_cluster(replace(cpu, name="mine", device=device, nodes=1, correction=correction), path)


def line(config: TrainConfig) -> str:
    return prediction_line(job_of(config), config.train.device, config.train.threads)


def predicted(config: TrainConfig) -> Estimate:
    return predict(job_of(config), config.train.device, config.train.threads)


def run(config: TrainConfig, seconds: list[float]) -> str | None:
    config.run.folder.mkdir(parents=True, exist_ok=True)
    forecast = StepTimePrediction(
        job_of(config), config.run.folder, config.train.device, config.train.threads
    )
    for step_seconds in seconds:
        forecast.add(step_seconds)
    return forecast.end()


def test_a_prediction_without_a_profile_says_that_it_is_rough(place: Path, tmp_path: Path) -> None:
    config = job(tmp_path)
    assert line(config).startswith("predicted: ")
    assert "rough, for `stretto calibrate` has not measured this machine" in line(config)
    prediction = predicted(config)
    assert prediction.low < prediction.seconds / 2 < 2 * prediction.seconds < prediction.high
    assert prediction.memory is not None
    assert f"bubble {prediction.bubble:.1%}" in line(config)
    assert f"GiB a rank ({prediction.memory.verdict})" in line(config)


def test_what_a_node_offloads_is_beside_the_memory_of_a_rank(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tmp_path)
    expected = predicted(config)
    assert expected.memory is not None
    short = replace(expected.memory, host=3.0 * 2**30, host_capacity=2.0 * 2**30)
    monkeypatch.setattr(prediction, "predict", lambda *_: replace(expected, memory=short))
    assert "GiB a rank, 3 of 2 GiB of a node's host memory (does not fit)" in line(config)


def test_a_prediction_with_a_profile_names_it(place: Path, tmp_path: Path) -> None:
    keep_profile(place)
    config = job(tmp_path)
    assert line(config).endswith("from profile mine")
    prediction = predicted(config)
    assert prediction.low < prediction.seconds < prediction.high
    assert prediction.tokens_per_s == pytest.approx(4 * 16 / prediction.seconds)


def test_the_run_ends_with_predicted_and_measured_times(place: Path, tmp_path: Path) -> None:
    config = job(tmp_path)
    expected = predicted(config).seconds
    summary = run(config, [9.0] * WARM_UP + [0.5, 0.4, 7.0]) or ""
    assert summary.startswith("predicted ")
    assert "measured 0.5 (median of 3)" in summary
    record = json.loads((config.run.folder / "prediction.json").read_text())
    assert record["measured_s"] == 0.5
    assert record["predicted_s"] == pytest.approx(expected)
    assert record["ratio"] == pytest.approx(0.5 / expected)
    assert not here.history_path(place).exists()  # there is no profile to correct


def test_runs_on_a_profile_correct_the_next_prediction(place: Path, tmp_path: Path) -> None:
    keep_profile(place)
    config = job(tmp_path)
    first = predicted(config).seconds
    enough = WARM_UP + FEWEST_STEPS
    run(config, [2 * first] * (enough - 1))
    assert here.history(place, "mine") == []  # too short to learn from
    for _ in range(here.FEWEST):
        run(config, [2 * first] * enough)
    assert predicted(config).seconds == pytest.approx(2 * first)
    assert "corrected by 2.00 from earlier runs" in line(config)
    run(config, [2 * first] * enough)  # does not correct the correction
    assert predicted(config).seconds == pytest.approx(2 * first)


def test_no_steps_no_word(place: Path, tmp_path: Path) -> None:
    config = job(tmp_path)
    assert run(config, []) is None
    assert run(config, [1.0]) is None  # the first alone is no measurement
    assert not (config.run.folder / "prediction.json").exists()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [(["train.threads=2"], "one thread"), (["train.dtype=float64"], "not of float64")],
)
def test_unknown_costs_are_listed(place: Path, tmp_path: Path, overrides: list[str], says: str) -> None:
    config = job(tmp_path, *overrides)
    assert line(config).startswith("no prediction: ")
    assert says in line(config)
    assert run(config, [1.0] * 9) is None


def test_nothing_that_goes_wrong_stops_a_training(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tmp_path)
    place.write_text("device: [")
    assert "no prediction: " in line(config)
    assert run(config, [1.0] * 9) is None
    place.unlink()
    forecast = StepTimePrediction(
        job_of(config), config.run.folder, config.train.device, config.train.threads
    )
    for _ in range(9):
        forecast.add(1.0)
    monkeypatch.setattr(prediction, "FILE", "no/such/folder.json")
    assert (forecast.end() or "").startswith("prediction not kept: ")

    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of a planner")

    monkeypatch.setattr(prediction, "estimate", fails)
    assert line(config) == "no prediction: of a planner"
    assert (
        StepTimePrediction(job_of(config), config.run.folder, config.train.device, config.train.threads).end()
        is None
    )
