"""Programs as files: what the page writes is read, checked and trained by the commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import CommandLine
from stretto.program import names, schedule
from stretto.program.text import read_program
from stretto.web.answers import reply_lines


def files(kind: str, description: dict[str, Any], layers: int = 8, **more: Any) -> dict[str, str]:
    """The files of a format by name, or the error's message under ""."""
    question = {"ask": "program file", "programs": [description], "format": kind, "layers": layers, **more}
    (reply,) = [json.loads(line) for line in reply_lines(json.dumps(question))]
    if "error" in reply:
        return {"": reply["error"]["message"]}
    return {file["name"]: file["text"] for file in reply["answer"]["files"]}


def edited() -> dict[str, Any]:
    """1F1B of 2 ranks and 4 microbatches, with one more forward of warm-up on the first rank."""
    orders = [list(map(str, order)) for order in schedule("1f1b", 2, 4).orders]
    orders[0].remove("0B0")
    orders[0].insert(3, "0B0")
    rows = [",".join(order) for order in orders]
    return {"name": "1f1b", "ranks": 2, "microbatches": 4, "orders": rows}


def write(folder: Path, written: dict[str, str]) -> Path:
    """Write the files, and return the first."""
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / next(iter(written))


def test_csv_and_json_hold_the_edited_order(tmp_path: Path) -> None:
    for kind in ("csv", "json"):
        path = write(tmp_path, files(kind, edited()))
        assert path.name == f"1f1b-edited.{kind}"
        program = read_program(path)
        assert [",".join(map(str, order)) for order in program.orders] == edited()["orders"]
    assert "several copies" in files("csv", {"name": "dualpipe", "ranks": 4, "microbatches": 8})[""]


def test_an_edited_config_passes_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stretto: CommandLine
) -> None:
    written = files("config", edited())
    assert [*written] == ["1f1b-edited.yaml", "1f1b-edited.csv"]
    write(tmp_path, written)
    monkeypatch.chdir(tmp_path)
    assert "makespan 15" in stretto("schedule", "1f1b-edited.csv")
    stretto("config", "1f1b-edited.yaml")


@pytest.mark.parametrize("name", [name for name in names() if name not in ("forward-only", "auto")])
def test_every_schedule_has_a_config_that_passes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stretto: CommandLine
) -> None:
    path = write(tmp_path, files("config", {"name": name, "ranks": 2, "microbatches": 4}))
    monkeypatch.chdir(tmp_path)
    stretto("config", path)


def test_what_trains_nothing_has_no_config() -> None:
    assert "forwards only" in files("config", {"name": "forward-only", "ranks": 2, "microbatches": 4})[""]
    assert "too few" in files("config", {"name": "zb-v", "ranks": 4, "microbatches": 8}, layers=4)[""]
    stuck = edited()
    stuck["orders"][1] = ",".join(reversed(stuck["orders"][1].split(",")))
    assert "before 1F3 on the same rank" in files("config", stuck)[""]


@pytest.mark.slow
def test_an_edited_config_trains(tmp_path: Path) -> None:
    path = write(tmp_path, files("config", edited(), layers=2))
    overrides = ["model.hidden=32", "data.sequence=16", "train.steps=2", "data.vocab=300", "sample.tokens=0"]
    command = [sys.executable, "-m", "stretto.cli.main", "train", path.name, *overrides]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs").is_dir()


def test_layout_of_megatron() -> None:
    interleaved = {"name": "interleaved", "ranks": 4, "microbatches": 8}
    (text,) = files("megatron", interleaved, layers=30).values()
    assert "--pipeline-model-parallel-layout 'Ettt|(t*4|)*6tttL'" in text
    assert "an edited 1f1b is neither" in files("megatron", edited())[""]
    assert "zb-v is neither" in files("megatron", {"name": "zb-v", "ranks": 4, "microbatches": 8})[""]


def test_a_picture_of_all_programs() -> None:
    other = {"name": "gpipe", "ranks": 2, "microbatches": 4}
    question = {"ask": "program file", "programs": [edited(), other], "format": "svg", "costs": {"hop": 0.5}}
    (reply,) = [json.loads(line) for line in reply_lines(json.dumps(question))]
    (picture,) = reply["answer"]["files"]
    assert picture["text"].startswith("<svg")
    assert "1f1b, edited" in picture["text"]
    assert "gpipe" in picture["text"]
