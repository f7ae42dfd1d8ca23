"""`stretto dryrun`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import CommandLine
from stretto.cli import main

QUICK = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
SMALL = ("model.layers=2", "model.hidden=32", "model.heads=2", "data.sequence=16")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["dryrun", QUICK, *SMALL, "optim.name=adamw", "layout.tp=2", "--rank", "3", "--json"]
    assert main.run(arguments) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert output.err == ""
    assert report["rank"] == 3
    assert set(report["coordinates"]) == {"tp", "cp", "dp", "pp"}
    for name in ("flops", "bytes", "calls"):
        assert report[name] == report["predicted"][name] != {}
    assert report["predicted"]["peak_memory_bytes"] == pytest.approx(report["peak_memory_bytes"], rel=0.05)


def test_text_stands_beside_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["dryrun", QUICK, *SMALL]) == 0
    text, progress = capsys.readouterr()
    assert progress.splitlines()[0] == "dry run of rank 0 of 4, 4 microbatches"
    assert "forward products" in text
    assert "predicted" in text
    assert "rank 0 of 4" in text


def test_lines_say_how_far_it_is(stretto: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.cli.dryrun._EVERY", 0.0)
    lines = stretto.error("dryrun", QUICK, *SMALL, "--quick", code=0).splitlines()
    assert [line for line in lines if line.startswith("step 1 of 2: 50%, ")]
    assert lines[-1].startswith("the planner's counts")
    assert [line for line in lines if line.startswith("step 2 of 2: 100%, ")]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(["--rank", "4"], "rank 4 is outside the layout"), (["layout.tp=3"], "layout.tp is 3")],
)
def test_bad_input(stretto: CommandLine, arguments: list[str], error: str) -> None:
    err = stretto.error("dryrun", QUICK, *arguments)
    assert error in err
    assert "hint: " in err


def test_uncounted_operations_are_not_listed(stretto: CommandLine) -> None:
    assert stretto.json("dryrun", QUICK, *SMALL, "optim.name=muon")["predicted"]["flops"] is None
