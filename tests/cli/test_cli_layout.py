"""`stretto layout`."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from command_line import CommandLine
from pages import commands, text_of, unprinted
from stretto import Layout
from stretto.view.exchanges import exchanges
from stretto.view.grid import grid_svg


def test_json_has_the_layout_s_groups(stretto: CommandLine) -> None:
    report = stretto.json("layout", "--world", "16", "--tp", "2", "--pp", "4", "--order", "tp-pp-dp")
    layout = Layout(tp=2, pp=4, dp=2, order="tp-pp-dp")
    assert report["world"] == 16
    assert report["sizes"] == {"tp": 2, "cp": 1, "ep": 1, "dp": 2, "pp": 4}
    assert report["order"] == "tp-pp-dp-cp-ep"
    assert report["coordinates"] == [layout.coordinates(rank) for rank in range(16)]
    assert report["groups"] == {axis: layout.groups(axis) for axis in ("tp", "pp", "dp", "cp")}
    assert report["groups"]["pp"][0] == [0, 2, 4, 6]


def test_experts_are_added(stretto: CommandLine) -> None:
    report = stretto.json("layout", "--world", "8", "--tp", "2", "--ep", "2")
    assert report["groups"]["ep"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert report["expert"]["sizes"] == {"tp": 2, "ep": 2, "dp": 2, "pp": 1}
    assert report["expert"]["groups"]["dp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert report["expert"]["coordinates"][2] == {"tp": 0, "ep": 1, "dp": 0, "pp": 0}


def test_text_shows_every_rank_with_its_place(stretto: CommandLine) -> None:
    shown = stretto("layout", "--world", "16", "--pp", "4")
    assert "\x1b" not in shown
    layout = Layout(dp=4, pp=4)
    for rank in range(16):
        at = layout.coordinates(rank)
        assert f"{rank:>2} p{at['pp']} d{at['dp']}" in shown
    assert "[0, 4, 8, 12]" in shown


def test_many_ranks_are_summed_up(stretto: CommandLine) -> None:
    shown = stretto("layout", "--world", "100000", "--tp", "8", "--pp", "10")
    assert len(shown.splitlines()) < 40
    assert "stage 9    ranks 90000-99999" in shown
    assert "more nodes" in shown


def test_svg_is_drawn(tmp_path: Path, stretto: CommandLine) -> None:
    path = tmp_path / "layout.svg"
    assert f"wrote {path}" in stretto("layout", "--world", "16", "--pp", "4", "--svg", str(path))
    assert ET.parse(path).getroot().tag.endswith("svg")


def test_groups_over_any_axes_are_listed(stretto: CommandLine) -> None:
    """As Megatron-LM's RankGenerator(tp=2, ep=1, dp=2, pp=4, cp=1).get_ranks("tp-pp")."""
    layout = ("--world", "16", "--tp", "2", "--pp", "4")
    shown = stretto("layout", *layout, "--groups", "tp-pp,dp")
    assert "tp-pp: 2 groups of 8\n   0  2 nodes   [0, 1, 4, 5, 8, 9, 12, 13]\n" in shown
    assert "\ndp: 8 groups of 2\n   0  1 node    [0, 2]\n" in shown
    report = stretto.json("layout", *layout, "--groups", "tp-pp")
    assert report["groups"]["tp-pp"] == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]


def test_json_says_what_is_sent_where(stretto: CommandLine) -> None:
    report = stretto.json("layout", "--world", "32", "--tp", "8", "--pp", "2", "--cluster", "dgx-h100")
    assert report["ranks_per_node"] == 8
    lying = {each["axes"]: (each["size"], each["count"], each["inside"]) for each in report["exchanges"]}
    assert lying == {"tp": (8, 4, 4), "dp": (2, 16, 0), "pp": (2, 16, 0)}
    pp = report["exchanges"][2]
    assert [(send["what"], send["to"]) for send in pp["sends"]] == [
        ("activations", "next"),
        ("gradients of activations", "previous"),
    ]
    assert report["cluster"]["links"]["inside"]["kind"] == "NVLink 4"
    assert report["cluster"]["links"]["between"]["bandwidth"] == 5e10


def test_a_page_and_a_picture_are_written(tmp_path: Path, stretto: CommandLine) -> None:
    svg, html = tmp_path / "layout.svg", tmp_path / "layout.html"
    arguments = ["--world", "16", "--pp", "4", "--groups", "tp-pp", "--svg", str(svg), "--html", str(html)]
    assert stretto("layout", *arguments).endswith(f"\nwrote {svg}\nwrote {html}\n")
    assert "tp-pp: 4 groups of 4" in svg.read_text()
    assert "<title>Layout dp4 pp4</title>" in html.read_text()
    assert "cannot write" in stretto.error(
        "layout", "--world", "16", "--html", str(tmp_path / "none" / "page.html")
    )


def test_an_encoder_has_the_first_stages(tmp_path: Path, stretto: CommandLine) -> None:
    svg, html = tmp_path / "layout.svg", tmp_path / "layout.html"
    layout = ["--world", "8", "--pp", "4", "--encoder-pp", "1"]
    shown = stretto("layout", *layout, "--svg", str(svg), "--html", str(html))
    assert "rank, then p stage, d replica; encoder: stage 0, decoder: stages 1 to 3" in shown
    assert "encoder: stage 0, decoder: stages 1 to 3" in svg.read_text()
    assert "in the decoder the memory too" in svg.read_text()
    assert '"encoder":1' in html.read_text()
    report = stretto.json("layout", *layout)
    assert report["encoder_pp"] == 1
    pp = next(each for each in report["exchanges"] if each["axes"] == "pp")
    memory = [send["stages"] for send in pp["sends"] if "memory" in send["what"]]
    assert memory == [[1, 4], [2, 4]]
    assert "encoder_pp" not in stretto.json("layout", *layout[:4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--pp", "4", "--encoder-pp", "4"],
            "leaves none of the 4 pipeline ranks to the decoder\nhint: --enc",
        ),
        (["--encoder-pp", "1"], "leaves none of the 1 pipeline ranks to the decoder\nhint: --pp 2"),
        (["--groups", "tpp-pp"], "group 'tpp-pp' names unknown axis 'tpp'\nhint: did you mean 'tp'?"),
        (["--groups", "tp,"], "group '' names unknown axis ''\nhint: axes are tp, cp, ep, dp, pp"),
        (["--groups", "tp-dp-tp"], "names tp twice\nhint: name every axis once, as in tp-dp\n"),
        (["--ep", "2", "--groups", "cp-ep"], "names cp and an axis of experts"),
        (["--cluster", "dgx-h1000"], "cluster 'dgx-h1000' is not known\nhint: did you mean"),
        (["--cluster", "dgx-h100:8"], "has 8 devices, not 16"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], message: str, stretto: CommandLine) -> None:
    assert message in stretto.error("layout", "--world", "16", *arguments)


def test_the_page_on_layouts_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stretto: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = commands(text_of("docs/do/layout.md"))
    assert not unprinted(command, stretto(*command.argv[1:]))
    svg = grid_svg(layout := Layout(tp=2, dp=2, pp=4), groups=exchanges(layout, 8))
    assert text_of("docs/pictures/layout.svg") == svg
