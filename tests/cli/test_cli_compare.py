"""`stretto compare`: runs and predictions of combinations, with real ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from command_line import CommandLine
from compared_here import command_here
from recommender_job import job_file as recommender_file
from stretto.cli import main
from stretto.run.compare import runs
from tiny_job import EIGHT, job_file

TP = ("layout.tp=1,2,3", "model.dropout=0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


def compare(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    assert main.run(["compare", *arguments, "--json"]) == code
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run alone is a process: this one has imported PyTorch."""
    start = [runs._stretto]

    def command(arguments: Sequence[str], log: Path) -> tuple[int, Any]:
        return (start.pop() if start else command_here)(arguments, log)

    monkeypatch.setattr(runs, "_stretto", command)


@pytest.mark.usefixtures("one_process")
def test_runs_are_measured_beside_predictions_and_not_run_twice(
    place: Path, stretto: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warm-up of the rate is longer than the run: it is shortened. Spans are sent to no collector."""
    arguments = [str(job_file(place)), *TP, "optim.rate.warmup=500", "metrics.spans=true"]
    arguments += ["--steps", "3", "--warmup", "1", "--repeats", "2"]
    report, messages = compare(capsys, *arguments)
    ran = [
        line.partition(":")[0]
        for line in messages.splitlines()
        if line.endswith("4 steps") or " left, " in line
    ]
    assert ran == ["round 1/2, 1/2 tp=1", "round 1/2, 2/2 tp=2", "round 2/2, 2/2 tp=2", "round 2/2, 1/2 tp=1"]
    first, two, three = report["results"]
    assert [r["status"] for r in report["results"]] == ["done", "done", "refused"]
    for result in (first, two):
        assert [run["round"] for run in result["repeats"]] == [1, 2]
        assert 0 < result["fastest"] <= result["median"] <= result["slowest"]
        assert 0 <= result["repeats"][0]["others"] <= 1
        assert result["sent"] == result["traffic"]
        assert result["predicted"] > 0
        assert result["memory"] == pytest.approx(result["predicted_memory"], rel=0.1)
        assert len(result["losses"]) == 4
    assert two["memory"] < first["memory"]
    assert (first["traffic"], two["traffic"] > 0) == (0, True)
    assert "must divide model.heads" in three["error"]
    (line,) = report["losses"]
    assert line.startswith("losses of 2 combinations that compute the same agree")
    assert report["baseline"] == "tp=1"
    assert first["speedup"] == 1.0
    assert two["speedup_low"] < two["speedup"] < two["speedup_high"]
    folder = place / "runs" / "compare-tiny"
    assert len([*folder.glob("*.json")]) == 2
    assert not [*folder.rglob("checkpoints")]

    html = place / "compare.html"
    again, messages = compare(capsys, *arguments, "--baseline", "tp=2", "--html", str(html))
    assert "1/2 tp=1: 2 rounds done before" in messages
    assert "2/2 tp=2: 2 rounds done before" in messages
    assert [r["median"] for r in again["results"]] == [r["median"] for r in report["results"]]
    assert again["baseline"] == "tp=2"
    page = html.read_text()
    assert "tp=2 (baseline)" in page
    assert "refused: tp=3: layout.tp is 3" in page
    shown = stretto("compare", *arguments)
    assert "1*" in shown or "2*" in shown
    assert "* baseline: tp=1" in shown


def test_a_run_that_fails_is_a_row(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_stretto", command_here)
    arguments = [str(job_file(place)), "data.sequence=100000", "--steps", "2", "--warmup", "0"]
    report, messages = compare(capsys, *arguments, "--out", str(place / "fails"), code=1)
    (bad,) = report["results"]
    assert bad["status"] == "failed"
    assert "100000" in bad["error"]
    assert f"round 1/3, 1/1 as configured: failed: {bad['error']}" in messages
    assert "round 2/3" not in messages


def test_a_recommender_s_traffic_and_memory_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of distinct ids is the expected one; beside it, lengths and flags are not predicted."""
    monkeypatch.setattr(runs, "_stretto", command_here)
    arguments = [str(recommender_file(tmp_path)), "batch.global_size=512", "--steps", "2", "--warmup", "1"]
    report, messages = compare(capsys, *arguments, "--repeats", "1")
    assert "1/1 as configured: 3 steps" in messages
    (result,) = report["results"]
    assert (result["status"], result["unit"]) == ("done", "samples/s")
    assert result["sent"] == pytest.approx(result["traffic"], rel=0.1)
    assert result["predicted"] > 0
    assert result["memory"] > 0


def test_placements_of_a_recommender_are_predicted_as_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stretto: CommandLine
) -> None:
    config, cluster = str(recommender_file(tmp_path)), ("--cluster", "dgx-a100:4")
    varied = ("tables.placement=auto,column", "layout.ranks=4")
    report, messages = compare(capsys, config, *varied, "--predict", *cluster)
    assert messages == ""
    automatic, column = report["results"]
    assert (automatic["status"], automatic["unit"], automatic["verdict"]) == (
        "predicted",
        "samples/s",
        "fits",
    )
    planned = stretto.json("plan", config, "layout.ranks=4", *cluster)
    assert automatic["predicted"] == planned["step_time_s"] < column["predicted"]
    assert automatic["speed"] == planned["samples_per_s"]
    small = compare(
        capsys, config, "layout.ranks=2", "tables.device_gib=1e-6", "--predict", *cluster[:1], "h100:2"
    )
    assert small[0]["results"][0]["verdict"] == "does not fit"


def test_predictions_run_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        str(job_file(place)),
        EIGHT,
        "layout.dp=1,2,16",
        "dp.mode=ddp,zero1",
        "--predict",
        "--cluster",
        "h100:8",
    ]
    report, messages = compare(capsys, *arguments)
    assert messages == ""
    assert [r["status"] for r in report["results"]] == ["predicted"] * 4 + ["refused"] * 2
    assert "batch.global_size" in report["results"][-1]["error"]
    times = {r["name"]: r["predicted"] for r in report["results"] if r["predicted"]}
    assert report["ranking"] == sorted(times, key=lambda name: times[name])
    assert report["losses"] == []
    assert compare(capsys, *arguments[:2], "layout.dp=8", "--predict", "--cluster", "h100:2", code=1)[0]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["train.steps=4"], "compare sets train.steps itself"),
        (["train.seed=1,2,3", "--limit", "2"], "there are 3 combinations, more than --limit 2"),
        (["--cluster", "h100:8"], "--cluster is for predictions"),
        (["layout.tp=3,7"], "no combination can run; tp=3: layout.tp is 3"),
        (["layout.tp=1,2", "--baseline", "tp=4"], "--baseline 'tp=4' is none of the combinations"),
        (["layout.tpp=1,2"], "there is no field layout.tpp"),
        (["optim.lr=REQUIRED"], "1 field is marked REQUIRED"),
    ],
)
def test_bad_input_starts_nothing(
    arguments: list[str], messages: str, place: Path, stretto: CommandLine
) -> None:
    assert messages in stretto.error("compare", str(job_file(place)), *arguments)
