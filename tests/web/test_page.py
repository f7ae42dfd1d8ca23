"""What holds for every view of the page: Chinese for each text, accessible, within its width, its files."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from stretto.program import names
from stretto.view.page import FRONT, MODULES, recorded_page

VIEWS = {
    "schedules": "[data-ready]",
    "layout": "#lines li",
    "memory": "figure, .bars, table",
    "plan": "#search",
    "tables": "#placed",
}


def texts(source: str) -> set[str]:
    """The literal texts that a module shows: arguments of `t`, labels, captions and titles."""
    literal = r'"((?:[^"\\\n]|\\.)*)"'
    found = re.findall(rf"\bt\(\s*{literal}", source)
    found += re.findall(rf"\b(?:label|caption|xLabel)={literal}", source)
    return {text for text in found if re.search("[a-z]{2}", text)}


def test_every_text_has_its_chinese() -> None:
    table = (FRONT / "strings.js").read_text(encoding="utf-8")
    keys = re.findall(r'^  "((?:[^"\\]|\\.)*)": "', table, re.MULTILINE)
    assert len(keys) == len(set(keys)), "a text twice"
    shown = {
        name: texts((FRONT / file).read_text(encoding="utf-8"))
        for name, file in MODULES.items()
        if name.startswith("stretto/") and name != "stretto/strings"
    }
    assert sum(map(len, shown.values())) > 200
    shown["schedules"] = {*names().values()}
    missing = {name: sorted(each - {*keys}) for name, each in shown.items() if each - {*keys}}
    assert not missing


@pytest.mark.parametrize(
    ("view", "scheme"),
    [
        pytest.param(view, scheme, marks=[pytest.mark.slow] if (at + dark) % 2 else [])
        for at, view in enumerate(VIEWS)
        for dark, scheme in enumerate(("light", "dark"))
    ],
)
def test_axe_finds_nothing_and_nothing_is_wider_than_the_window(
    opened: Callable[..., Page],
    page_address: str,
    accessible: Callable[[Page], None],
    view: str,
    scheme: str,
) -> None:
    page = opened(f"{page_address}#{view}", width=400, color_scheme=scheme)
    page.wait_for_selector(VIEWS[view])
    accessible(page)


def test_the_page_in_one_file_has_all_modules_and_no_address_of_another_host() -> None:
    page = recorded_page("<&>", "schedules", {"timeline": {"text": "</script>"}})
    assert page.count("data:text/javascript;base64,") == len(MODULES)
    assert "<title>&lt;&amp;&gt;</title>" in page
    assert "</script>" not in page[page.index('id="answers"') :].split("\n")[0][:-9]
    assert not re.search(r"""(?:src|href)=["']https?:""", page)


def test_a_view_in_a_frame_has_no_header_and_the_language_and_colours_of_its_address(
    opened: Callable[..., Page], page_address: str
) -> None:
    page = opened(f"{page_address}?embed&language=zh&theme=dark#layout?tp=2")
    page.wait_for_selector(VIEWS["layout"])
    assert page.query_selector("header") is None
    assert page.get_by_text("通信组").count()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_in_a_frame_the_timeline_comes_before_the_fields(
    opened: Callable[..., Page], page_address: str
) -> None:
    for query, timeline_first in (("", False), ("?embed", True)):
        page = opened(f"{page_address}{query}#schedules")
        page.wait_for_selector(VIEWS["schedules"])
        top = "(each) => document.querySelector(each).getBoundingClientRect().top"
        timeline, form = page.evaluate(f"['[data-ready]', 'form'].map({top})")
        assert (timeline < form) == timeline_first
