"""Figures of predictions over published points."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from xml.etree import ElementTree

import pytest
from browser import Browser

from stretto.planner.table.published import FIGURES, Comparison, compare
from stretto.view import colours
from stretto.view.figure import figure_html, figure_svg

SVG = "{http://www.w3.org/2000/svg}"


@cache
def compared(name: str) -> Comparison:
    return compare(FIGURES[name])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


def height_of(mark: ElementTree.Element) -> float:
    """The vertical middle of a circle, or of the outline of a square or diamond."""
    if mark.tag == f"{SVG}circle":
        return float(mark.attrib["cy"])
    heights = [float(corner.split()[1].rstrip("Z")) for corner in mark.attrib["d"][1:].split("L")]
    return (min(heights) + max(heights)) / 2


@pytest.mark.parametrize("name", FIGURES)
def test_every_run_is_a_hollow_and_a_filled_mark(name: str) -> None:
    comparison = compared(name)
    drawn = ElementTree.fromstring(figure_svg(comparison))
    groups = [group for group in drawn.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    assert len(groups) == len(comparison.points)
    shapes: dict[str, set[str]] = {}
    by_about = {(point.series, point.at, f"{point.published:.4g}"): point for point in comparison.points}
    for group in groups:
        title, _, published, predicted, *_ = group
        match = re.match(r"(.*), ([\w.]+): published ([\d.]+), ", title.text or "")
        assert match is not None
        point = by_about[(match[1], match[2], match[3])]
        assert published.attrib["class"] == "hollow"
        assert "class" not in predicted.attrib
        shapes.setdefault(point.series, set()).add(
            published.tag + str(published.attrib.get("d", "").count("L"))
        )
        # faster is higher
        if point.published != point.predicted:
            assert (height_of(published) < height_of(predicted)) == (point.published > point.predicted)
    # each series has one shape of its own, so that colour is not needed
    assert all(len(each) == 1 for each in shapes.values())
    outlines = {next(iter(each)) for each in shapes.values()}
    assert len(outlines) >= min(3, len(shapes))  # squares and diamonds both have four corners


@pytest.mark.parametrize("ground", [(255, 255, 255), (13, 17, 23)])
def test_series_read_on_light_and_dark(ground: colours.Rgb) -> None:
    for colour in colours.SERIES:
        light, dark = sorted((colours.luminance(colour), colours.luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, colour


def test_the_page_has_every_run_in_a_table_that_sorts(browser: Browser) -> None:
    comparison = compared("korthikanti-5")
    page = figure_html(comparison)
    assert not re.search(r'(?:src|href)="|@import|url\((?!#)', page)
    assert comparison.source in page
    sort = """
        await frame();
        const rows = () => [...document.querySelectorAll('tbody tr')];
        const column = (at) => rows().map((row) => row.cells[at].textContent);
        const head = [...document.querySelectorAll('thead th')], seen = [column(6)];
        head[6].querySelector('button').click(); seen.push(column(6), head[6].getAttribute('aria-sort'));
        head[6].querySelector('button').click(); seen.push(column(6), head[6].getAttribute('aria-sort'));
        return seen;
    """
    before, up, ascending, down, descending = browser.opened(page, sort)
    assert before == [f"{100 * point.error:+.1f}%" for point in comparison.points]
    assert up == sorted(before, key=lambda text: float(text[:-1]))
    assert down == up[::-1]
    assert (ascending, descending) == ("ascending", "descending")
