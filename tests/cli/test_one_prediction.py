"""One job has one prediction: `plan`, `predict`, `memory`, the line before a run and its metrics agree to the
last digit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import main
from stretto.planner.machines import catalogue
from stretto.run.config.job import job_of
from stretto.run.config.load import load
from stretto.run.train.prediction import StepTimePrediction, prediction_line

CONFIGS = Path(__file__).parents[2] / "configs"
CLUSTER = "dgx-h100:16"


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main.run([*arguments, "--json"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def measures(report: dict[str, Any]) -> dict[str, Any]:
    names = (
        "step_time_s low high tokens_per_s tflops_per_gpu mfu bubble parts dominant memory_gib memory verdict"
    )
    return {name: report[name] for name in names.split()}


@pytest.fixture(autouse=True)
def no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs that was never measured."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(catalogue, "_DRIVER", tmp_path / "no-driver")


@pytest.mark.parametrize(
    ("model", "cluster", "fixed"),
    [
        ("gpt2-xl", "dgx-a100-80gb:8", ("tp=1", "pp=2", "micro_batch=4", "schedule=1f1b,zb-v")),
        ("llama3-8b", CLUSTER, ("tp=4", "pp=2", "cp=1", "micro_batch=1", "schedule=interleaved")),
        ("llama3-8b", CLUSTER, ("pp=1", "cp=1", "micro_batch=1", "zero=zero3", "recompute=full")),
        ("mixtral-8x7b", "dgx-h100:32", ("pp=4", "cp=1", "tp=1", "ep=8", "micro_batch=1", "schedule=1f1b")),
        ("gpt2-xl", "v100-32gb:16", ("tp=1", "cp=1", "pp=4", "micro_batch=1", "schedule=1f1b")),
    ],
)
def test_what_a_plan_predicts_is_predicted_of_the_config_that_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, cluster: str, fixed: tuple[str, ...]
) -> None:
    path = str(tmp_path / "planned.yaml")
    options = [word for choice in fixed for word in ("--fix", choice)]
    plan = run_json(
        capsys,
        *("plan", "--model", model, "--cluster", cluster, "--batch", "64", "--top", "1", "--write", path),
        *options,
    )
    (row,) = run_json(capsys, "predict", path, "--cluster", cluster)["rows"]
    assert measures(row) == measures(plan["ranking"][0])
    ranks = run_json(capsys, "memory", path)["ranks"]
    assert max(rank["total"] for rank in ranks) / 2**30 == row["memory_gib"]


def words_of(row: dict[str, Any]) -> list[str]:
    """A plan's row as the arguments of `predict`."""
    sizes, dp = row["sizes"], row["dp"]
    arguments = [f"{axis}={sizes[axis]}" for axis in ("tp", "cp", "ep", "dp", "pp")]
    arguments += [f"{name}={value}" for name, value in row["options"].items()]
    arguments += [f"micro={row['micro_batch']}", "batch=64", f"sp={int(row['sequence_parallel'])}"]
    arguments += [f"schedule={row['schedule']}", f"recompute={row['recompute']['mode']}"]
    return [*arguments, f"zero={['ddp', 'zero1', 'zero2', 'zero3'].index(dp['mode'])}"]


@pytest.mark.parametrize(
    ("model", "cluster", "fixed"),
    [
        ("gpt2-xl", "dgx-a100-80gb:8", ("tp=1", "pp=2", "cp=1", "schedule=1f1b,zb-v", "recompute=none")),
        ("gpt3-175b", "dgx-a100-80gb:512", ("tp=8", "pp=8", "cp=1", "schedule=interleaved", "chunks=6")),
        ("llama3-8b", CLUSTER, ("pp=1", "cp=1", "zero=zero3", "shard_gradients=16", "recompute=none")),
        ("llama3-8b", CLUSTER, ("tp=2", "pp=2", "sp=false", "schedule=1f1b", "recompute=none,selective")),
        ("mixtral-8x7b", "dgx-h100:64", ("tp=8", "ep=8", "pp=2", "cp=1", "recompute=none", "schedule=1f1b")),
        ("gpt2-xl", "v100-32gb:16", ("tp=1", "cp=1", "pp=4", "schedule=1f1b", "recompute=none,selective")),
    ],
)
def test_what_a_plan_predicts_is_predicted_of_its_layout_in_words(
    capsys: pytest.CaptureFixture[str], model: str, cluster: str, fixed: tuple[str, ...]
) -> None:
    on = ("--model", model, "--cluster", cluster)
    choices = [word for choice in (*fixed, "offload=none") for word in ("--fix", choice)]
    (first,) = run_json(capsys, "plan", *on, "--batch", "64", "--top", "1", *choices)["ranking"]
    (row,) = run_json(capsys, "predict", *on, *words_of(first))["rows"]
    assert measures(row) == measures(first)
    assert row["defaults"]["framework"] == "stretto"
    (megatron,) = run_json(capsys, "predict", *on, *words_of(first), "framework=megatron")["rows"]
    assert "framework" not in megatron["defaults"]


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("quickstart", "cpu:4"),
        ("long-context", "cpu:2"),
        ("gpt2-124m", "dgx-a100-80gb:8"),
        ("pipedream-2bw", "dgx-a100-80gb:4"),
    ],
)
def test_a_config_s_layout_has_the_same_prediction_among_plans(
    capsys: pytest.CaptureFixture[str], name: str, cluster: str
) -> None:
    path = str(CONFIGS / f"{name}.yaml")
    job = job_of(load(path))
    choices = [f"{axis}={size}" for axis, size in job.layout.sizes.items() if axis != "dp"]
    choices += [f"micro={job.micro_batch}", f"schedule={job.schedule}", f"zero={job.dp.mode}"]
    choices += [f"recompute={job.recompute.mode}", f"sp={str(job.sequence_parallel).lower()}"]
    choices += [f"{name}={value}" for name, value in job.options.items()]
    fixed = [word for choice in choices for word in ("--fix", choice)]
    (first,) = run_json(capsys, "plan", path, "--cluster", cluster, "--top", "1", *fixed)["ranking"]
    (row,) = run_json(capsys, "predict", path, "--cluster", cluster)["rows"]
    assert measures(row) == measures(first)


@pytest.mark.parametrize("name", ["quickstart", "zero-bubble", "pipedream-2bw", "llama-tiny-tp2", "moe-tiny"])
def test_a_run_begins_with_what_predict_says_of_its_config(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = str(CONFIGS / f"{name}.yaml")
    (row,) = run_json(capsys, "predict", path, "--cluster", "here")["rows"]
    config = load(path)
    forecast = StepTimePrediction(
        job_of(config), config.run.folder, config.train.device, config.train.threads
    ).estimate
    assert forecast is not None
    assert (forecast.seconds, forecast.low, forecast.high) == (row["step_time_s"], row["low"], row["high"])
    assert (forecast.bubble, dict(forecast.parts)) == (row["bubble"], row["parts"])
    assert forecast.memory is not None
    assert forecast.memory.allocated.mid / 2**30 == row["memory_gib"]
    line = prediction_line(job_of(config), config.train.device, config.train.threads)
    assert f"predicted: {row['step_time_s']:.3g} s a step ({row['low']:.2g} to {row['high']:.2g})" in line
    assert f"bubble {row['bubble']:.1%}" in line
    assert f"{row['memory']['device']['gib']:.2g} of" in line
    ranks = run_json(capsys, "memory", path)["ranks"]
    assert max(rank["total"] for rank in ranks) / 2**30 == row["memory_gib"]
