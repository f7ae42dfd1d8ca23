"""`stretto train` with a recommender's config, and other commands with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from command_line import CommandLine
from pages import ROOT
from recommender_job import job_file
from stretto.cli.main import run

pytestmark = pytest.mark.apart


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recommender")
    job_file(folder)
    return folder


def test_training_prints_quality_and_next_commands(folder: Path, stretto: CommandLine) -> None:
    text = stretto("train", str(folder / "tiny.yaml"), "tables.placement=auto")
    assert "dlrm of" in text
    assert text.count("rank  load") == 1  # before it starts
    end = text[text.index("speed: ") :]
    assert "samples/s" in end
    assert "on 66 held-out samples: AUC " in end
    assert "best possible" in end
    assert f"stretto verify {folder}/tiny.yaml tables.placement=auto --layouts all" in end
    first = folder / "runs" / "tiny" / "checkpoints" / "step-00000006"
    export = f"stretto checkpoint export {first} --table C1 --out C1.npy"
    assert export in end
    assert run([*export.split()[1:-1], str(folder / "C1.npy")]) == 0
    assert (folder / "C1.npy").exists()


def test_json_is_one_object_and_a_taken_name_gets_a_number(folder: Path, stretto: CommandLine) -> None:
    line = ["train", str(folder / "tiny.yaml"), "--json", "run.name=twice", "train.steps=3", "layout.ranks=1"]
    for name in ("twice", "twice-2"):
        report = json.loads(stretto(*line))
        assert report["steps"] == 3
        assert report["run_dir"] == str(folder / "runs" / name)
        assert report["checkpoint"].endswith(f"{name}/checkpoints/step-00000003")
        assert report["stopped"] is False
        assert report["placement"]["C1"] == {"split": "row", "ranks": [0], "place": "device", "cache": 0.1}
        assert 0 < report["auc"] < 1
        assert report["best_entropy"] < report["entropy"]
        assert set(report) >= {"loss", "samples_per_s", "logloss", "calibration"}
    report = json.loads(stretto(*line, "train.steps=5", "--resume", "auto"))
    assert (report["steps"], report["run_dir"]) == (5, str(folder / "runs" / "twice"))
    lines = (folder / "runs" / "twice" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_the_criteo_config_is_refused_on_cpus_until_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stretto: CommandLine
) -> None:
    path = str(ROOT / "configs" / "dlrm-criteo.yaml")
    monkeypatch.chdir(tmp_path)
    if not torch.cuda.is_available():
        error = stretto.error("train", path, "data.source=synthetic", "data.split=share")
        assert "hint: use train.device=auto or cpu" in error
    small = ["data.source=synthetic", "data.split=share", "train.device=cpu", "tables.place=device"]
    error = stretto.error("train", path, *small, "tables.device_gib=1")
    assert "does not fit: all 26 tables take" in error
    assert "fewer rows (model.max_rows)" in error


def test_without_evaluation_there_is_no_quality(folder: Path, stretto: CommandLine) -> None:
    line = ["train", str(folder / "tiny.yaml"), "--json", "run.name=none", "train.steps=1", "layout.ranks=1"]
    report = json.loads(stretto(*line, "eval.every=null"))
    assert report["auc"] is report["entropy"] is None


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["tables.placement=rows"], "tables.placement is rows: there is no such file"),
        (["layout.ranks=0"], "layout.ranks is 0, must be a whole number above 0"),
        (["checkpoint.resume=nowhere"], "there is no such folder"),
        (["data.source=nothing.tsv"], "there is no such file or folder"),
        (["metrics.trace=3"], "there is no field metrics.trace"),
    ],
)
def test_bad_input_is_an_error_before_ranks_start(
    folder: Path, overrides: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", str(folder / "tiny.yaml"), *overrides]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.count("error:") == 1


def test_config_fills_in_defaults_and_checks_them(folder: Path, stretto: CommandLine) -> None:
    assert stretto.json("config", str(folder / "tiny.yaml"))["tables"]["placement"] == "row"
    assert "adamw has none" in stretto.error("config", str(folder / "tiny.yaml"), "optim.dense.momentum=0.5")


def test_commands_for_language_models_say_so(folder: Path, stretto: CommandLine) -> None:
    assert "recommender" in stretto.error("dryrun", str(folder / "tiny.yaml"))


def test_a_batch_script_starts_its_ranks(folder: Path, stretto: CommandLine) -> None:
    assert "#SBATCH --nodes=2" in stretto("launch", "slurm", str(folder / "tiny.yaml"), "--nodes", "2")
    assert "ranks=2" in stretto.error("launch", "slurm", str(folder / "tiny.yaml"), "--nodes", "3")
