"""What a notebook shows of layouts, programs, timelines, predictions and plans."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from stretto import Layout, Program, schedule, simulate
from stretto.job.job import Job
from stretto.job.presets import preset
from stretto.planner.estimate import Estimate, estimate
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.search.ranking import Plan, Ranked
from stretto.program.action import Action, ActionKind
from stretto.view import notebook

HOSTILE = "<script>alert(1)</script>\"'&"


class Elements(HTMLParser):
    """The elements of a piece of HTML with their attributes, and its text; every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: dict[str, dict[str, str | None]] = {}
        self.texts: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes[tag] = dict(attrs)
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def predicted() -> Estimate:
    job = Job(shape=preset("gpt2-large"), layout=Layout(tp=2, pp=4), global_batch=32, sequence=1024)
    return estimate(job, find_cluster("a100-80gb-sxm", 8))


def plan(predicted: Estimate, **more: Any) -> Plan:
    ranking = [Ranked(estimate=predicted, reason=HOSTILE, layout="tp2 pp4")]
    values: dict[str, Any] = {"ranking": ranking, "evaluated": [], "rejected": {}, "candidates": 1234}
    values |= {"feasible": 5, "replayed": 7, "seconds": 0.5, "objective": "throughput", "assumptions": None}
    return Plan(**values | more)


def test_texts_are_a_line(predicted: Estimate) -> None:
    seconds, rate = predicted.seconds, predicted.tokens_per_s
    text = repr(predicted)
    assert text.startswith(f"Estimate('tp2 pp4' on 8 x a100-80gb-sxm: {seconds:.4g} s a step (")
    assert f"{rate:,.0f} tokens/s, MFU {predicted.mfu:.1%}, " in text
    assert text.endswith(" GiB: fits)")
    assert "GiB" not in repr(replace(predicted, memory=None))
    assert repr(plan(predicted)) == f"Plan(best 'tp2 pp4', {text}; 1 ranked of 1,234 candidates)"
    nothing = plan(predicted, ranking=[], nearest=plan(predicted).ranking[0])
    assert repr(nothing).startswith("Plan(nothing fits, nearest 'tp2 pp4', Estimate(")
    assert repr(plan(predicted, ranking=[], complete=False)).startswith("Plan(cut short, nearest none; 0 ")
    shown = [Layout(tp=2), schedule("zb-v", 4, 8), simulate(schedule("zb-v", 4, 8)), predicted, nothing]
    assert all(len(repr(each)) < 300 and "\n" not in repr(each) for each in shown)


@pytest.mark.parametrize(
    ("shown", "about", "texts"),
    [
        (Layout(tp=2, pp=4), "Layout tp2 pp4: 8 ranks", ("tp2 pp4", "p3 t1")),
        (schedule("1f1b", 4, 8), "timeline of 1f1b: 4 ranks, 8 microbatches: makespan 33", ("rank 3", "7")),
        (simulate(schedule("zb-v", 2, 4)), "timeline of zb-v: 2 ranks, 2 chunks", ("rank 1",)),
    ],
)
def test_pictures(shown: Any, about: str, texts: tuple[str, ...]) -> None:
    svg = shown._repr_svg_()
    drawn = ["".join(text.itertext()) for text in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert set(texts) <= set(drawn)
    image = Elements(shown._repr_html_()).attributes["img"]
    assert about in (image["alt"] or "")
    kind, _, data = (image["src"] or "").partition(",")
    assert (kind, b64decode(data).decode()) == ("data:image/svg+xml;base64", svg)


def test_hostile_names_stay_text(predicted: Estimate) -> None:
    program = replace(schedule("gpipe", 2, 2), name=HOSTILE)
    for shown in (program, simulate(program)):
        html = Elements(shown._repr_html_() or "")
        assert {*html.attributes} == {"div", "img"}
        assert HOSTILE in (html.attributes["img"]["alt"] or "")
        assert "<script" not in (shown._repr_svg_() or "")
    table = Elements(plan(predicted)._repr_html_() or "")
    assert HOSTILE in table.texts
    assert "script" not in table.attributes


def test_what_cannot_be_drawn_has_its_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backward_first = (Action(0, ActionKind.B, 0), Action(0, ActionKind.F, 0))
    stuck = Program(name="stuck", placement=(0,), microbatches=1, orders=(backward_first,))
    assert (stuck._repr_svg_(), stuck._repr_html_()) == (None, None)
    monkeypatch.setattr(notebook, "_MOST_ACTIONS", 15)
    large = schedule("gpipe", 2, 4)
    assert (large._repr_svg_(), simulate(large)._repr_html_()) == (None, None)


def test_tables(predicted: Estimate) -> None:
    table = Elements(predicted._repr_html_() or "")
    assert table.attributes["th"]["scope"] == "row"
    assert "tp2 pp4 on 8 x a100-80gb-sxm, 1f1b" in table.texts
    texts = table.texts[: table.texts.index("A step of the busiest pipeline rank")]
    shown = dict(pairwise(texts))
    assert shown["step, s"] == f"{predicted.seconds:.4g}"
    assert shown["bubble"] == f"{predicted.bubble:.1%}"
    assert shown["verdict"] == "fits"
    assert re.fullmatch(r"\d+\.\d of 79\.2", shown["memory, GiB"])
    shares = [text for text in table.texts[len(texts) :] if text.endswith("%")]
    assert sum(float(share[:-1]) for share in shares) == pytest.approx(100, abs=0.2)
    ranking = Elements(plan(predicted)._repr_html_() or "").texts
    assert f"{predicted.tokens_per_s:,.0f}" in ranking
    assert any(text.startswith("1,234 candidates, 7 replayed, 5 fit") for text in ranking)
    nearest = plan(predicted, ranking=[], nearest=plan(predicted).ranking[0])
    assert any(
        text.startswith("Nothing fits; nearest: ") for text in Elements(nearest._repr_html_() or "").texts
    )


def test_pictures_are_imported_when_they_are_shown() -> None:
    code = (
        "import sys\nfrom stretto import Layout, schedule, simulate\n"
        "line = simulate(schedule('1f1b', 2, 2))\n"
        "assert not any(name.startswith('stretto.view') for name in sys.modules)\n"
        "assert Layout(pp=2)._repr_svg_() and line._repr_html_() and line.program._repr_svg_()\n"
        "assert not {'torch', 'numpy', 'stretto.planner'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
