"""`stretto figure`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.cli.main import run


def test_a_figure_is_drawn_and_its_table_can_be_predicted_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, html, csv = tmp_path / "f.svg", tmp_path / "f.html", tmp_path / "f.csv"
    assert run(["figure", "korthikanti-5", "--out", str(svg), "--html", str(html), "--csv", str(csv)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Korthikanti et al. 2022, table 5" in said
    assert "8 runs, step time: MAPE " in said
    assert "constants were fitted on these runs" in said
    assert f"wrote {html}" in said
    assert svg.read_text(encoding="utf-8").startswith("<svg")
    assert "<table>" in html.read_text(encoding="utf-8")
    assert run(["figure", "korthikanti-5", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert run(["predict", "--table", str(csv), "--no-memory", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert facts["error"] == again["error"]
    errors = [row["error"] for row in again["rows"]]
    assert [point["error"] for point in facts["points"]] == pytest.approx(errors, rel=1e-9)


def test_the_list_names_every_figure_and_what_was_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["figure", "--list"]) == 0
    said = capsys.readouterr().out
    assert {"sc21-1", "sc21-10", "korthikanti-5", "zb-5"} <= set(said.split())
    assert "no constant was fitted on its runs" in " ".join(said.split())
    assert run(["figure", "--list", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["figures"]][-1] == "zb-5"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "stretto figure --list"),
        (["zb-6"], "did you mean 'zb-5'"),
        (["sc21-13"], "tensor against pipeline parallelism, 162.2 B parameters on 64 GPUs) is a plot whose"),
        (["sc21-15"], "stretto predict --table"),
        (["zb-5", "--out", "picture.pdf"], "ends in .svg or .png"),
        (["korthikanti-5", "--html", "/nowhere/page.html"], "cannot write"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["figure", *words]) == 2
    assert message in capsys.readouterr().err
