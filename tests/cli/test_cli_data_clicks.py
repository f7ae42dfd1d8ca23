from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clicks_logs import log_lines
from command_line import CommandLine
from stretto.cli.main import run
from stretto.recommender.clicks.folder import ClickFolder


def answer(stretto: CommandLine, *arguments: str) -> dict[str, Any]:
    return stretto.json("data", *arguments, silent=True)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for day in range(2):
        Path(f"day_{day}").write_text("\n".join(log_lines(120, seed=day)))
    with Path("day_1").open("a") as file:
        file.write("\n1\toops\n")
    Path("rows.csv").write_text("clicked,age,city\n1,30,Rome\n0,,Oslo\n1,31,Rome\n")
    Path("tokens.txt").write_text("text")
    return tmp_path


def test_clicks_and_info_say_the_same(log: Path, stretto: CommandLine):
    report = answer(stretto, "clicks", "day_0", "day_1", "--out", "out", "--threshold", "3")
    folder = ClickFolder("out")
    assert (report["samples"], report["base_rate"], report["path"]) == (240, folder.base_rate, "out")
    assert [each["rows"] for each in report["features"]] == list(folder.table_rows().values())
    assert report["malformed"] == [["day_1", 121, "2 columns, not 40"]]
    assert report["parts"] == [["day_0", 120], ["day_1", 120]]
    assert folder.transform is not None
    assert folder.transform.threshold == 3
    assert answer(stretto, "info", "out") == report
    assert answer(stretto, "info", "out", "--verify") == report | {"verified": True}
    assert answer(stretto, "clicks", "day_*", "--out", "out", "--threshold", "3")["samples"] == 240


def test_other_formats_and_ways(log: Path, stretto: CommandLine):
    columns = ("--label", "clicked", "--numbers", "age", "--features", "city")
    report = answer(stretto, "clicks", "rows.csv", *columns, "--out", "a", "--hash", "16", "--missing-flags")
    assert (report["samples"], report["numbers"], report["features"][0]["rows"]) == (3, 2, 16)
    assert report["features"][0]["name"] == "city"
    report = answer(stretto, "clicks", "day_0", "--out", "b", "--raw")
    assert report["features"][0]["rows"] is None


def test_text_for_people(log: Path, stretto: CommandLine):
    shown = stretto("data", "clicks", "day_0", "day_1", "--out", "out", "--raw")
    assert shown.index("write samples") < shown.index("samples  ") < shown.index("feature")
    assert "day_1, line 121: 2 columns, not 40" in shown
    shown = stretto("data", "clicks", "day_0", "day_1", "--out", "b")
    assert shown.index("count ids") < shown.index("write samples")


def test_an_interrupted_build_prints_the_resume_command(
    log: Path, monkeypatch: pytest.MonkeyPatch, stretto: CommandLine, capsys: pytest.CaptureFixture[str]
):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stretto.recommender.clicks.build.build", stop)
    assert run(["data", "clicks", "day_0", "--out", "x"]) == 130
    assert "the same command continues" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["clicks", "nowhere", "--out", "x"], "nowhere: no such file"),
        (["clicks", "day_0"], "Missing option '--out'"),
        (["clicks", "day_1", "--out", "x", "--on-error", "fatal"], "day_1, line 121: 2 columns, not 40"),
        (["clicks", "day_0", "--out", "x", "--on-error", "fata"], "must be one of skip, fatal"),
        (["clicks", "day_0", "--out", "x", "--hash", "5", "--raw"], "exclude each other"),
        (["clicks", "day_0", "--out", "x", "--hash", "1"], "hash into 1 rows"),
        (["clicks", "day_0", "--out", "x", "--threshold", "0"], "threshold 0"),
        (["clicks", "rows.csv", "--out", "x"], "no column 'label'"),
        (["clicks", "rows.csv", "--out", "x", "--format", "cvs"], "format 'cvs'"),
        (["clicks", "tokens.txt", "--out", "x"], "line 1: 1 column, not 40"),
        (["clicks", "day_0", "--out", "."], "holds other files"),
    ],
)
def test_bad_input_is_one_error_line_and_exit_code_2(
    log: Path, stretto: CommandLine, arguments: list[str], error: str
):
    first, *rest = stretto.error("data", *arguments).splitlines()
    assert first.startswith("error: ")
    assert error in first
    assert len(rest) <= 1
    assert not Path("x").exists()


def test_what_is_held_out_and_not_read_is_printed(log: Path, stretto: CommandLine):
    Path("valid.csv").write_text("label,C1,city,I1\n1,a,Rome,2\n1,b,Oslo,x\n")
    Path("train.csv").write_text("label,C1,city,I1\n1,a,Rome,2\n0,b,Oslo,3\n")
    shown = stretto("data", "clicks", "valid.csv", "train.csv", "--out", "named")
    assert "held out   valid.csv (by name)" in shown
    assert "1 of 4 lines (25.00%) are malformed, left out" in shown
    assert "columns that are not read: city" in shown
    assert "no file by its name: training holds out the last share" in stretto(
        "data", "clicks", "valid.csv", "train.csv", "--out", "shared", "--split", "share"
    )
    assert answer(stretto, "info", "named")["held_out"] == ["valid.csv"]
    assert answer(stretto, "info", "shared")["held_out"] == []


def test_documents_of_a_click_folder_are_refused_with_the_right_command(
    log: Path, stretto: CommandLine, capsys: pytest.CaptureFixture[str]
):
    answer(stretto, "clicks", "day_0", "--out", "out", "--raw")
    assert run(["data", "show", "out"]) == 2
    assert "out: a click folder, which has samples and no documents\nhint: stretto data info out" in (
        capsys.readouterr().err
    )
