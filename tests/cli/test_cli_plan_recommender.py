"""`stretto plan` of a recommender."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import CommandLine
from stretto.recommender.placement import check_placements
from stretto.recommender.planner.placement_file import read_placements
from stretto.recommender.shape import dlrm_preset, table_specs

DCN = ["plan", "--model", "dlrm-dcnv2", "--cluster", "dgx-a100", "--batch", "65536"]


def test_a_plan_is_written_edited_and_priced(tmp_path: Path, stretto: CommandLine) -> None:
    path = tmp_path / "placement.yaml"
    planned = stretto.json(*DCN, "--write", str(path))
    assert (planned["ranks"], planned["fits"], len(planned["tables"])) == (8, True, 26)
    assert sum(planned["parts"].values()) == pytest.approx(planned["step_time_s"])
    assert planned["samples_per_s"] == pytest.approx(65536 / planned["step_time_s"])
    placements = read_placements(path, 8, 8)
    check_placements(table_specs(dlrm_preset("dlrm-dcnv2")), placements, 8)
    assert {t["name"]: (t["split"], t["ranks"]) for t in planned["tables"]} == {
        name: (placement.split, list(placement.ranks)) for name, placement in placements.items()
    }

    again = stretto.json(*DCN, "--placement", str(path))
    assert again["step_time_s"] == pytest.approx(planned["step_time_s"])

    lines = path.read_text().splitlines()
    edited = ["C21: {split: table, ranks: 0}" if line.startswith("C21:") else line for line in lines]
    path.write_text("\n".join(edited))
    assert stretto.json(*DCN, "--placement", str(path))["step_time_s"] > planned["step_time_s"]

    path.write_text("\n".join(f"C{i}: {{split: data}}" for i in range(1, 27)))
    assert "does not fit: rank 0 needs" in stretto(*DCN, "--placement", str(path), code=1)


def test_text_shows_the_time_breakdown_and_unknown_costs(stretto: CommandLine) -> None:
    text = stretto("plan", "--model", "dlrm-kaggle", "--cluster", "dgx-h100:2", "--batch", "4096")
    assert "samples/s" in text
    assert "update" in text
    assert "C26" in text
    assert text.index("no popularity of ids is known for 26 tables") < text.index(" samples/s, ")


def test_choices_that_are_made(stretto: CommandLine) -> None:
    fixed = ["--fix", "split=row", "--fix", "optimizer=adagrad", "--fix", "wire=fp16", "--precision", "bf16"]
    report = stretto.json(*DCN, *fixed)
    assert {table["split"] for table in report["tables"]} == {"row"}
    assert (report["optimizer"], report["precision"]) == ("adagrad", "bf16")


@pytest.mark.parametrize(
    ("more", "message"),
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
def test_what_is_wrong_is_said(more: list[str], message: str, stretto: CommandLine) -> None:
    assert message in " ".join(stretto.error(*DCN, *more).split())


def test_what_fits_nowhere_is_refused_with_its_bytes(stretto: CommandLine) -> None:
    fixes = ("--fix", "device_gib=1", "--fix", "host_gib=1", "--fix", "place=device,cpu")
    report = stretto.json(*DCN, "--model", "dlrm-113b", *fixes, code=1)
    assert report["fits"] is False
    assert "1 GiB of device, 1 GiB of host memory" in report["error"]
    assert "GiB with its states) does not fit" in report["error"]


def test_a_config_is_planned_for_its_ranks(stretto: CommandLine) -> None:
    arguments = ("plan", "configs/dlrm.yaml", "layout.ranks=3", "--cluster", "cpu")
    report = stretto.json(*arguments)
    assert (report["model"], report["ranks"], report["cluster"]) == ("dlrm", 3, "cpu")
    assert stretto.json(*arguments, "tables.overlap=false")["samples_per_s"] < report["samples_per_s"]
    assert "--placement is for recommenders" in stretto.error(
        "plan", "--model", "llama3-8b", "--placement", "a.yaml"
    )
