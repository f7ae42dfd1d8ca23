from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command_line import CommandLine
from stretto.cli.main import run
from stretto.recommender.clicks.folder import ClickFolder

SMALL = ("--samples", "2e3", "--features", "3", "--rows", "10:1e3")


def answer(stretto: CommandLine, *arguments: str) -> dict[str, Any]:
    return stretto.json("data", "synth-clicks", *arguments, silent=True)


def test_a_log_is_generated_once_with_its_best_possible_entropy(tmp_path: Path, stretto: CommandLine):
    out = str(tmp_path / "clicks")
    report = answer(stretto, "--out", out, *SMALL, "--seed", "4", "--base-rate", "0.4")
    folder = ClickFolder(out)
    assert [feature.rows for feature in folder.features] == [10, 100, 1000]
    assert (report["samples"], report["path"], report["format"]) == (2000, out, "folder")
    assert report["base_rate"] == pytest.approx(folder.base_rate)
    assert report["base_rate"] == pytest.approx(0.4, abs=0.05)
    assert 0.5 < report["best"]["train"]["entropy"] < 1
    assert report["best"]["valid"]["samples"] == 200
    assert answer(stretto, "--out", out, *SMALL, "--seed", "4", "--base-rate", "0.4") == report | {
        "kept": True
    }


def test_several_ids_and_text(tmp_path: Path, stretto: CommandLine):
    out = f"{tmp_path}/many"
    answer(stretto, "--out", out, *SMALL, "--hot", "2.5", "--varying", "--dense", "1", "--valid", "0")
    folder = ClickFolder(out)
    assert [feature.hot for feature in folder.features] == [None] * 3
    assert folder.index.parts == [("train", 2000)]
    text = answer(
        stretto, "--out", f"{tmp_path}/text", "--samples", "50", "--rows", "9", "--format", "criteo"
    )
    assert text["bytes"] == sum(each.stat().st_size for each in (tmp_path / "text").glob("*.txt"))
    assert len((tmp_path / "text" / "train.txt").read_text().splitlines()) == 45


def test_text_for_people(tmp_path: Path, stretto: CommandLine):
    shown = stretto("data", "synth-clicks", "--out", f"{tmp_path}/clicks", *SMALL)
    assert "2,000 samples" in shown
    assert "best possible" in shown
    assert "valid" in shown


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--samples", "many"], "--samples: 'many' is not a whole number"),
        (["--samples", "1.5"], "--samples: '1.5' is not a whole number"),
        (["--rows", "1e3:"], ""),
        (["--rows", "1e5:1e3"], "26 features of 100000 to 1000 rows"),
        (["--rows", "a:b"], "--rows: 'a' is not a whole number"),
        (["--hot", "1.5"], "hot is 1.5"),
        (["--base-rate", "2"], "base_rate is 2.0"),
        (["--format", "csv"], "format 'csv'"),
        (["--format", "criteo", "--dense", "3"], "3 numbers and 26 features"),
    ],
)
def test_bad_input_is_one_error_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
):
    code = run(["data", "synth-clicks", "--out", f"{tmp_path}/out", "--samples", "20", *arguments])
    if not error:
        assert code == 0
        return
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ")
    assert error in lines[0]
    assert [line.startswith("hint: ") for line in lines[1:]] == [True]
