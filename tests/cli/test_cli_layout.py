"""`stretto layout`."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from stretto import Layout
from stretto.cli import main


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:  # type: ignore[type-arg]
    assert main.run(["layout", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_layout_s_groups(capsys: pytest.CaptureFixture[str]) -> None:
    facts = run_json(capsys, "--world", "16", "--tp", "2", "--pp", "4", "--order", "tp-pp-dp")
    layout = Layout(tp=2, pp=4, dp=2, order="tp-pp-dp")
    assert facts["world"] == 16
    assert facts["sizes"] == {"tp": 2, "cp": 1, "ep": 1, "dp": 2, "pp": 4}
    assert facts["order"] == "tp-pp-dp-cp-ep"
    assert facts["coordinates"] == [layout.coordinates(rank) for rank in range(16)]
    assert facts["groups"] == {axis: layout.groups(axis) for axis in ("tp", "pp", "dp", "cp")}
    assert facts["groups"]["pp"][0] == [0, 2, 4, 6]


def test_experts_are_added(capsys: pytest.CaptureFixture[str]) -> None:
    facts = run_json(capsys, "--world", "8", "--tp", "2", "--ep", "2")
    assert facts["groups"]["ep"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert facts["expert"]["sizes"] == {"tp": 2, "ep": 2, "dp": 2, "pp": 1}
    assert facts["expert"]["groups"]["dp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert facts["expert"]["coordinates"][2] == {"tp": 0, "ep": 1, "dp": 0, "pp": 0}


def test_text_shows_every_rank_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["layout", "--world", "16", "--pp", "4"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    layout = Layout(dp=4, pp=4)
    for rank in range(16):
        at = layout.coordinates(rank)
        assert f"{rank:>2} p{at['pp']} d{at['dp']}" in shown
    assert "[0, 4, 8, 12]" in shown


def test_many_ranks_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["layout", "--world", "100000", "--tp", "8", "--pp", "10"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 40
    assert "stage 9    ranks 90000-99999" in shown
    assert "more nodes" in shown


def test_svg_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layout.svg"
    assert main.run(["layout", "--world", "16", "--pp", "4", "--svg", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    assert ET.parse(path).getroot().tag.endswith("svg")
