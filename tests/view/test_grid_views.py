"""Device grids in the terminal and as SVG show every rank where the layout puts it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from stretto import Layout
from stretto.view import colours
from stretto.view.exchanges import exchanges
from stretto.view.grid import cell, grid, grid_svg, nodes, shown_rows

SVG = "{http://www.w3.org/2000/svg}"
LAYOUTS = [
    Layout(),
    Layout(dp=3),
    Layout(dp=4, pp=4),
    Layout(tp=2, cp=2, dp=4, pp=4, ep=2, order="tp-cp-ep-dp-pp"),
    Layout(tp=2, dp=2, pp=4, order="tp-pp-dp", offset=5),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_rank_stands_in_its_node(layout: Layout, width: int) -> None:
    lines = grid(layout, width=width).plain.splitlines()
    assert all(len(line) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    for rank in range(layout.offset, layout.offset + layout.world):
        shown = cell(layout, rank)
        assert f"{rank} {shown.coordinates}".strip() in text
    assert [line.split()[1] for line in lines if line.startswith("node")] == [
        str(node) for node in range(len(nodes(layout, 8)))
    ]


def test_a_cell_shows_its_coordinates() -> None:
    layout = Layout(tp=2, dp=2, pp=4, order="tp-pp-dp")
    assert cell(layout, 13).coordinates == "p2 t1 d1"
    assert cell(layout, 13).stage == 2


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_svg_has_a_cell_a_rank_in_its_stage_s_colour(layout: Layout) -> None:
    root = ET.fromstring(grid_svg(layout))
    cells = [rect for rect in root.iter(f"{SVG}rect") if rect.get("height") == "38"]
    assert len(cells) == layout.world
    for rank, rect in zip(range(layout.offset, layout.offset + layout.world), cells, strict=True):
        stage = layout.coordinates(rank)["pp"]
        assert rect.get("fill") == colours.hexed(colours.of_stage(stage, layout.pp))
        assert float(rect.get("x", "")) + float(rect.get("width", "")) <= float(root.get("width", ""))
        assert float(rect.get("y", "")) + 38 <= float(root.get("height", ""))
    texts = {"".join(each.itertext()) for each in root.iter(f"{SVG}text")}
    assert {str(rank) for rank in range(layout.offset, layout.offset + layout.world)} <= texts


def test_a_node_of_many_ranks_takes_several_lines() -> None:
    root = ET.fromstring(grid_svg(Layout(tp=8, dp=8, pp=4), ranks_per_node=72))
    assert float(root.get("width", "")) < 1100
    rects = [
        tuple(float(rect.get(name, "")) for name in ("x", "y", "width", "height"))
        for rect in root.iter(f"{SVG}rect")
    ]
    cells = [rect for rect in rects if rect[3] == 38]
    boxes = [rect for rect in rects if rect[3] > 100][1:]  # the first is the ground
    assert len(cells) == len(set(cells)) == 256
    inside = [
        sum(x <= a and y <= b and a + w <= x + wide and b + h <= y + high for a, b, w, h in cells)
        for x, y, wide, high in boxes
    ]
    assert inside == [72, 72, 72, 40]


def panels(svg: str) -> dict[str, ET.Element]:
    """The elements of each panel, by its axes, gathered under one element."""
    found, panel = dict[str, ET.Element](), None
    for each in ET.fromstring(svg):
        text = "".join(each.itertext())
        if each.tag == f"{SVG}text" and (title := re.match(r"([a-z_-]+): [\d,]+ groups? of", text)):
            panel = found[title[1]] = ET.Element("panel")
        if panel is not None:
            panel.append(each)
    return found


def numbers(panel: ET.Element) -> dict[int, int]:
    """The group of every rank, as written in its cell."""
    texts = ["".join(each.itertext()) for each in panel.iter(f"{SVG}text")]
    return {int(a): int(b[1:]) for a, b in pairwise(texts) if a.isdecimal() and re.fullmatch(r"g\d+", b)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("node", [4, 8, 24])
def test_every_group_is_outlined(layout: Layout, node: int) -> None:
    shown = exchanges(layout, node, ("tp-pp",))
    drawn = panels(grid_svg(layout, ranks_per_node=node, groups=shown))
    assert list(drawn) == [each.axes for each in shown]
    for axes, panel in drawn.items():
        groups = layout.groups(axes)
        assert numbers(panel).items() <= {rank: n for n, group in enumerate(groups) for rank in group}.items()
        if layout.world <= 8 * node:
            assert len(numbers(panel)) == layout.world
        cells = [
            (float(each.get("x", "")), float(each.get("y", "")) - 8, numbers(panel)[int(each.text or "")])
            for each in panel.iter(f"{SVG}text")
            if (each.text or "").isdecimal()
        ]
        outlined = list[int]()
        for box in panel.iter(f"{SVG}rect"):
            if box.get("class") != "group":
                continue
            x, y, wide, high = (float(box.get(name, "")) for name in ("x", "y", "width", "height"))
            inside = {group for a, b, group in cells if x < a < x + wide and y < b < y + high}
            assert len(inside) == 1  # no outline goes round ranks of two groups
            outlined += [n for n in inside for a, b, _ in cells if x < a < x + wide and y < b < y + high]
            colour = colours.GROUPS[inside.pop() % len(colours.GROUPS)]
            assert box.get("stroke") == colours.hexed(colour)
        assert len(outlined) == len(cells)


def test_links_of_the_first_group_are_dashed_between_nodes() -> None:
    layout = Layout(tp=2, dp=2, pp=4)
    drawn = panels(grid_svg(layout, groups=exchanges(layout, 8)))
    dashes = {
        axes: [bool(path.get("stroke-dasharray")) for path in panel.iter(f"{SVG}path")]
        for axes, panel in drawn.items()
    }
    # 0 to 1 are one box; 0 to 2; 0 to 4 to 8 to 12 with the second node from 8
    assert dashes == {"tp": [], "dp": [False], "pp": [False, True, False]}


def test_of_many_nodes_the_panels_draw_those_of_the_first_group() -> None:
    layout = Layout(tp=8, dp=128, pp=16)
    svg = grid_svg(layout, groups=exchanges(layout, 8))
    assert len(svg) < 500_000
    drawn = panels(svg)
    first = layout.group(0, "pp")
    assert set(first[:8]) <= set(numbers(drawn["pp"]))
    assert "2,040 more nodes are not drawn" in "".join(drawn["pp"].itertext())
    root = ET.fromstring(svg)
    for each in root.iter(f"{SVG}rect"):
        assert float(each.get("x", "")) + float(each.get("width", "")) <= float(root.get("width", ""))


def test_a_large_svg_is_summed_up() -> None:
    root = ET.fromstring(grid_svg(Layout(tp=8, dp=1250, pp=10)))
    cells = [rect for rect in root.iter(f"{SVG}rect") if rect.get("height") == "38"]
    assert len(cells) == 128 * 8
    assert "99999" in {"".join(each.itertext()) for each in root.iter(f"{SVG}text")}


def test_some_keeps_the_last_row() -> None:
    rows = nodes(Layout(dp=50), 8)
    assert [row[-1] for row in nodes(Layout(dp=50), 8)][-1] == 49
    shown, left_out = shown_rows(rows, 3)
    assert [number for number, _ in shown] == [0, 1, 6]
    assert left_out == 4


def test_ramp_of_stages_rises_in_lightness_and_text_is_legible() -> None:
    for stages in (2, 4, 16):
        ramp = [colours.of_stage(stage, stages) for stage in range(stages)]
        light = [colours.luminance(colour) for colour in ramp]
        assert light == sorted(light)
        assert len(set(ramp)) == stages
    everything = [colours.of_stage(stage, 32) for stage in range(32)]
    everything += [colours.of_kind(kind, chunk, 4) for kind in colours.KINDS for chunk in range(4)]
    for colour in everything:
        ink = 0.0 if colours.text_on(colour) == "#000000" else 1.0
        lighter, darker = sorted((colours.luminance(colour), ink), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5  # WCAG AA
