"""`stretto plan` of a recommender."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.cli.main import run
from stretto.recommender.placement import check_placements
from stretto.recommender.planner.placement_file import read_placements
from stretto.recommender.shape import dlrm_preset, table_specs

DCN = ["plan", "--model", "dlrm-dcnv2", "--cluster", "dgx-a100", "--batch", "65536"]


def test_a_plan_is_written_edited_and_priced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "placement.yaml"
    assert run([*DCN, "--write", str(path), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["ranks"], planned["fits"], len(planned["tables"])) == (8, True, 26)
    assert sum(planned["parts"].values()) == pytest.approx(planned["step_time_s"])
    assert planned["samples_per_s"] == pytest.approx(65536 / planned["step_time_s"])
    placements = read_placements(path, 8, 8)
    check_placements(table_specs(dlrm_preset("dlrm-dcnv2")), placements, 8)
    assert {t["name"]: (t["split"], t["ranks"]) for t in planned["tables"]} == {
        name: (placement.split, list(placement.ranks)) for name, placement in placements.items()
    }

    assert run([*DCN, "--placement", str(path), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_time_s"] == pytest.approx(planned["step_time_s"])

    lines = path.read_text().splitlines()
    edited = ["C21: {split: table, ranks: 0}" if line.startswith("C21:") else line for line in lines]
    path.write_text("\n".join(edited))
    assert run([*DCN, "--placement", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] > planned["step_time_s"]

    path.write_text("\n".join(f"C{i}: {{split: data}}" for i in range(1, 27)))
    assert run([*DCN, "--placement", str(path)]) == 1
    assert "does not fit: rank 0 keeps" in capsys.readouterr().out


def test_text_shows_the_time_breakdown_and_unknown_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "dlrm-kaggle", "--cluster", "dgx-h100:2", "--batch", "4096"]) == 0
    text = capsys.readouterr().out
    assert "samples/s" in text
    assert "update" in text
    assert "C26" in text
    assert text.index("no popularity of ids is known for 26 tables") < text.index(" samples/s, ")


def test_choices_that_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--fix", "split=row", "--fix", "optimizer=adagrad", "--fix", "wire=fp16", "--precision", "bf16"]
    assert run([*DCN, *fixed, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {table["split"] for table in facts["tables"]} == {"row"}
    assert (facts["optimizer"], facts["precision"]) == ("adagrad", "bf16")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--fix", "split=rows"], "did you mean 'row'?"),
        (["--fix", "spilt=row"], "did you mean 'split'?"),
        (["--fix", "optimizer=adam"], "optimiser 'adam'"),
        (["--fix", "program=jax"], "program 'jax'"),
        (["--fix", "device_gib=-1"], "no number above 0"),
        (["--precision", "int8"], "--precision is 'int8'"),
        (["--sequence", "10"], "--sequence is for language models"),
        (["--model", "dlrm-dcn"], "dlrm-dcnv2"),
        (["--placement", "nowhere.yaml"], "cannot read nowhere.yaml"),
    ],
)
def test_what_is_wrong_is_said(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*DCN, *more]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_what_fits_nowhere_is_refused_with_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    short = [
        "--model",
        "dlrm-113b",
        "--fix",
        "device_gib=1",
        "--fix",
        "host_gib=1",
        "--fix",
        "place=device,cpu",
    ]
    assert run([*DCN, *short, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"] is False
    assert "1 GiB of device, 1 GiB of host memory" in facts["error"]
    assert "GiB with its states) does not fit" in facts["error"]


def test_a_config_is_planned_for_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "configs/dlrm.yaml", "layout.ranks=3", "--cluster", "cpu", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["ranks"], facts["cluster"]) == (3, "cpu")
    assert run(["plan", "--model", "llama3-8b", "--placement", "a.yaml"]) == 2
    assert "--placement is for recommenders" in capsys.readouterr().err
