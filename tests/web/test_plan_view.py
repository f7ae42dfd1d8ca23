"""The view of plans: what it draws of one that a file carries, and a search from the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from stretto.errors import StrettoError
from stretto.job.data_parallel import Precision
from stretto.job.job import Job, Recompute
from stretto.job.presets import preset
from stretto.layout.layout import Layout
from stretto.planner.assumptions import Assumptions
from stretto.planner.estimate import estimate
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.search.ranking import Baseline, Evaluated, Plan, Ranked, Rejected
from stretto.view.page import recorded_page
from stretto.view.plan_record import drawn_plan, front
from stretto.view.plan_texts import differences
from stretto.web.answers import reply_lines

GIB = 2**30
LAYOUTS = [
    (1, 4, 2, "1f1b", {}),
    (2, 2, 2, "1f1b", {}),
    (2, 4, 1, "interleaved", {"chunks": 2}),
    (8, 1, 1, "1f1b", {}),
]


@cache
def plan() -> Plan:
    """Some layouts of GPT-2 large on eight devices, as a search would hand them over."""
    cluster, assumptions = find_cluster("a100-80gb-sxm", 8), Assumptions()
    ranking, tried = [], []
    for tp, pp, dp, schedule, options in LAYOUTS:
        job = Job(
            shape=preset("gpt2-large"),
            layout=Layout(tp=tp, pp=pp, dp=dp),
            global_batch=32,
            micro_batch=2,
            sequence=1024,
            schedule=schedule,
            options=options,
            recompute=Recompute("selective"),
            precision=Precision(dtype="bfloat16"),
        )
        estimated, layout = estimate(job, cluster, assumptions), f"tp={tp} pp={pp} dp={dp} <{schedule}>"
        assert estimated.memory is not None
        ranking.append(Ranked(estimate=estimated, reason=f"because of & {schedule}", layout=layout))
        tried.append(
            Evaluated(
                layout=layout,
                seconds=estimated.seconds,
                memory=estimated.memory.device.mid,
                verdict=estimated.memory.verdict,
            )
        )
    ranking.sort(key=lambda ranked: ranked.estimate.seconds)
    slowest = max(evaluated.seconds for evaluated in tried)
    # more that were only looked at: ever slower and smaller ones, one worse than all, misfits
    tried += [
        Evaluated(
            layout=f"small {k}", seconds=slowest * (1 + 0.2 * k), memory=(9 - k) * GIB / 8, verdict="fits"
        )
        for k in range(1, 9)
    ]
    tried += [
        Evaluated(layout="worse", seconds=9 * slowest, memory=60 * GIB, verdict="tight"),
        Evaluated(layout="no", seconds=slowest, memory=90 * GIB, verdict="does not fit"),
    ]
    tried += [
        Evaluated(
            layout="never", seconds=slowest / 3, memory=800 * GIB, verdict="does not fit", lower_bound=True
        )
    ]
    return Plan(
        ranking=ranking,
        evaluated=tried,
        rejected={"memory": Rejected(2, "no")},
        candidates=len(tried) + 5,
        feasible=13,
        replayed=9,
        seconds=0.5,
        objective="time",
        assumptions=assumptions,
    )


def test_the_front_is_the_pareto_front() -> None:
    tried = plan().evaluated
    best = front(tried)
    usable = [evaluated for evaluated in tried if evaluated.verdict != "does not fit"]
    for evaluated in usable:
        beaten = any(
            o.seconds <= evaluated.seconds
            and o.memory <= evaluated.memory
            and (o.seconds, o.memory) != (evaluated.seconds, evaluated.memory)
            for o in usable
        )
        assert beaten == (tried.index(evaluated) not in best), evaluated
    assert [tried[i].memory for i in best] == sorted(tried[i].memory for i in best)


def test_the_reasons_of_the_losers_add_up() -> None:
    ranking = plan().ranking
    head, *rows = differences(ranking)
    first = ranking[0].estimate
    assert head[:3] == ("", "layout", "step")
    assert head[-1] == "rest"
    assert [row[1] for row in rows] == [ranked.layout for ranked in ranking[1:]]
    for row, ranked in zip(rows, ranking[1:], strict=True):
        difference, *parts = map(float, row[2:])
        assert difference == pytest.approx(ranked.estimate.seconds - first.seconds, abs=6e-4)
        assert sum(parts) == pytest.approx(difference, abs=6e-4 * len(parts))
        for name, text in zip(head[3:-1], row[3:-1], strict=True):
            change = ranked.estimate.parts.get(name, 0.0) - first.parts.get(name, 0.0)
            assert float(text) == pytest.approx(change, abs=6e-4)


@pytest.fixture
def drawn(opened: Callable[..., Page], tmp_path: Path) -> Callable[..., Page]:
    """Opens a plan as `stretto plan --html` writes it."""

    def write(result: Plan, **context: Any) -> Page:
        record = drawn_plan(result, "gpt3-175b", {"train it": "stretto train 'my <plan>.yaml'"})
        path = tmp_path / "plan.html"
        path.write_text(recorded_page(record["title"], "plan", {"plan": record}), encoding="utf-8")
        page = opened(path, **context)
        page.wait_for_selector("[data-ready]")
        return page

    return write


def test_every_candidate_is_a_point_with_its_layout(drawn: Callable[..., Page]) -> None:
    result = plan()
    page = drawn(result)
    assert page.locator("h1").inner_text().startswith("Plan of gpt3-175b on 8 x a100")
    points = page.locator(".scatter [data-layout]")
    shapes, titles = {"fits": "circle.fits", "tight": "path.tight", "does not fit": "path.misfit"}, []
    for i, tried in enumerate(result.evaluated):
        point = points.nth(i)
        assert point.locator(shapes[tried.verdict]).count() == 1  # the verdict is a shape, not only a colour
        titles.append(point.locator("title").text_content() or "")
        assert titles[-1].startswith(tried.layout)
        assert ("none is faster with less memory" in titles[-1]) == (i in front(result.evaluated))
    assert "0.125 GiB" in next(title for title in titles if title.startswith("small 8"))
    boxes = points.evaluate_all(
        "all => all.map((g) => { const b = g.lastElementChild.getBBox(); return [b.x + b.width / 2, b.y]; })"
    )
    # to the right is more memory, down is faster; misfits far beyond the device stand at the edge
    seen = [pair for pair in zip(result.evaluated, boxes, strict=True) if pair[0].verdict == "fits"]
    for tried, (x, y) in seen:
        for other, (x2, y2) in seen:
            assert (tried.memory < other.memory) == (x < x2)
            assert (tried.seconds < other.seconds) == (y > y2)
    assert page.locator(".scatter .limit").count() == 1


def test_bars_are_as_long_as_their_parts(drawn: Callable[..., Page]) -> None:
    result = plan()
    page = drawn(result)
    steps, fullest, ranks = (page.locator("figure.bars").nth(i) for i in range(3))
    widths = steps.locator("[data-part]").evaluate_all(
        "all => all.map((part) => [part.dataset.part, +part.getAttribute('width'), +part.getAttribute('y')])"
    )
    rows = sorted({y for *_, y in widths})
    assert len(rows) == len(result.ranking)
    scale = sum(width for _, width, y in widths if y == rows[0]) / result.ranking[0].estimate.seconds
    for ranked, row in zip(result.ranking, rows, strict=True):
        parts = {name: width for name, width, y in widths if y == row}
        assert sum(parts.values()) == pytest.approx(scale * ranked.estimate.seconds, rel=1e-6)
        assert parts["compute"] == pytest.approx(scale * ranked.estimate.parts["compute"], rel=1e-6)
    assert fullest.locator("svg > g").count() == len(result.ranking)
    memory = result.ranking[0].estimate.memory
    assert memory is not None
    assert ranks.locator("svg > g").count() == len(memory.ranks)
    assert f"{memory.device.mid / GIB:.3g} GiB" in (ranks.locator("svg > g").first.text_content() or "")


def test_parts_differ_without_colour(drawn: Callable[..., Page]) -> None:
    """Neighbours of a bar differ in pattern, or clearly in lightness."""
    page = drawn(plan())
    script = """async () => {
      const { STEP, MEMORY } = await import("stretto/bars");
      const light = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255)
        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
      const alike = [];
      for (const looks of [STEP, MEMORY]) {
        const list = Object.values(looks);
        for (let i = 1; i < list.length; i++) {
          const [one, other] = [list[i - 1], list[i]];
          if (!one || !other || one[1] !== other[1]) continue;
          const [dark, bright] = [light(one[0]), light(other[0])].sort((a, b) => a - b);
          if ((bright + 0.05) / (dark + 0.05) <= 2) alike.push([one, other]);
        }
      }
      return alike;
    }"""
    assert page.evaluate(script) == []


def test_setting_commands_and_rejected_are_text(drawn: Callable[..., Page]) -> None:
    page = drawn(plan())
    terms = dict(
        zip(
            page.locator("dl.terms dt").all_inner_texts(),
            page.locator("dl.terms dd").all_inner_texts(),
            strict=True,
        )
    )
    assert terms["batch"] == "32 x 1024 tokens, bfloat16"
    assert terms["network"] == "none: one node"
    assert terms["search"].startswith("20 candidates, 9 replayed, 13 fit")
    assert terms["train it"] == "stretto train 'my <plan>.yaml'"
    assert "<1f1b>" in page.locator("table").first.inner_text()
    assert page.locator("table", has_text="Not in the ranking").locator("tbody tr").all_inner_texts() == [
        "memory\t2\tno"
    ]


def test_the_ranking_sorts_at_any_width_in_the_dark_and_in_chinese(drawn: Callable[..., Page]) -> None:
    page = drawn(plan(), width=400, color_scheme="dark", locale="zh-CN")
    assert page.locator("html").get_attribute("lang") == "zh-CN"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    wide = page.locator(".wide").first  # cut at the edge: shades say so, and its caption is not cut
    assert wide.evaluate("e => e.scrollWidth > e.clientWidth")
    assert wide.evaluate("e => getComputedStyle(e).backgroundAttachment") == "local, local, scroll, scroll"
    assert wide.locator("caption").evaluate("e => e.getBoundingClientRect().right <= innerWidth")
    head = page.locator("table").first.locator("thead th").nth(6)
    head.locator("button").click()
    values = page.locator("table").first.locator("tbody tr td:nth-child(7)").all_inner_texts()
    assert values == sorted(values, key=lambda text: float(text.rstrip("%")))
    assert head.get_attribute("aria-sort") == "ascending"


def test_the_nearest_is_drawn_if_nothing_fits(drawn: Callable[..., Page]) -> None:
    result = plan()
    nothing = replace(result, ranking=(), feasible=0, nearest=result.ranking[0])
    page = drawn(nothing)
    assert page.locator(".card h3").all_inner_texts() == ["Nothing fits; the nearest"]
    assert page.locator(".scatter .ring").count() == 0
    with pytest.raises(StrettoError, match="no layout was timed"):
        drawn_plan(replace(nothing, nearest=None), "gpt3-175b")
    page = drawn(replace(nothing, complete=False, gap=inf))
    assert "Cut short" in page.locator(".card h3").first.inner_text()
    assert page.get_by_text("cut short by its limit").count() == 1


def test_the_safe_and_the_plain_layouts_are_beside_the_first(drawn: Callable[..., Page]) -> None:
    result = plan()
    first, second, third, fourth, *_ = result.ranking
    plain = {"FSDP": Baseline(fastest=third, safe=fourth), "DDP": Baseline(missing="none fits: a, b")}
    page = drawn(replace(result, safe=second, baselines=plain))
    cards = {card.locator("h3").inner_text(): card.inner_text() for card in page.locator(".card").all()}
    safe = "Plain: FSDP that certainly fits"
    assert list(cards) == ["First", "Safe: the best that certainly fits", "Plain: FSDP", safe, "Plain: DDP"]
    assert fourth.layout in cards[safe]
    more = 100 * (third.estimate.seconds / first.estimate.seconds - 1)
    assert f", {more:+.1f}%" in cards["Plain: FSDP"]
    assert "none fits: a, b" in cards["Plain: DDP"]


def test_many_microbatches_are_shortened() -> None:
    result = plan()
    job = replace(result.ranking[0].estimate.job, global_batch=32_000)
    long = replace(result.ranking[0], estimate=replace(result.ranking[0].estimate, job=job))
    record = drawn_plan(replace(result, ranking=[long]), "gpt3-175b")
    assert "the first" in record["timelines"]["panels"][0]["line"]
    assert len(json.dumps(record)) < 3_000_000


def test_a_search_from_the_page(opened: Callable[..., Page], page_address: str) -> None:
    """Fields, search, mark a row, write its config; the address searches again; an error has its fix."""
    page = opened(page_address + "#plan")
    page.get_by_label("Model", exact=True).select_option("gpt2-large")
    page.get_by_label("Devices").fill("8")
    page.get_by_label("Samples per step").fill("32")
    page.get_by_label("Tokens per sample (0: the model's)").fill("0")
    page.get_by_label("Fixed choices").fill("pp=1,2 micro_batch=2")
    page.get_by_label("Work").select_option("0.5")
    page.get_by_role("button", name="Search").click()
    page.wait_for_selector("div[aria-busy=false] .scatter")
    question = {
        "ask": "plan",
        "model": "gpt2-large",
        "cluster": "dgx-h100:8",
        "batch": 32,
        "sequence": 0,
        "fix": ["pp=1,2", "micro_batch=2"],
        "seconds": 0.5,
    }
    *_, last, end = (json.loads(line) for line in reply_lines(json.dumps(question)))
    assert end == {"answer": None}
    table = page.locator("table").first.locator("tbody tr")
    layouts = [row["layout"] for row in last["part"]["ranking"]]
    assert table.locator("td:nth-child(2)").all_inner_texts() == layouts
    table.nth(1).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Write the config of row 2").click()
    written = Path(download.value.path()).read_text(encoding="utf-8")
    assert written.startswith(f"# {layouts[1]}\n")
    # the address holds the search
    again = opened(page.url)
    again.wait_for_selector("div[aria-busy=false] .scatter")
    assert again.locator("table").first.locator("tbody tr").count() == table.count()
    again.get_by_label("Fixed choices").fill("tpp=2")
    again.get_by_role("button", name="Search").click()
    assert "tp" in again.get_by_role("alert").inner_text()
