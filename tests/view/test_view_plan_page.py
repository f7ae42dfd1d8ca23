"""The page of a plan in a browser: a point for every candidate, bars of steps and memory, hover texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import inf

import pytest

from browser import Browser
from stretto.errors import StrettoError
from stretto.job.data_parallel import Precision
from stretto.job.job import Job, Recompute
from stretto.job.presets import preset
from stretto.layout.layout import Layout
from stretto.planner.assumptions import Assumptions
from stretto.planner.estimate import estimate
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.search.ranking import Evaluated, Plan, Ranked, Rejected
from stretto.view import colours
from stretto.view.plan_charts import MEMORY, PARTS, Look, front
from stretto.view.plan_page import plan_page
from stretto.view.plan_texts import differences

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
        estimated, words = estimate(job, cluster, assumptions), f"tp={tp} pp={pp} dp={dp} <{schedule}>"
        assert estimated.memory is not None
        ranking.append(Ranked(estimate=estimated, reason=f"because of & {schedule}", layout=words))
        tried.append(
            Evaluated(
                layout=words,
                seconds=estimated.seconds,
                memory=estimated.memory.device.mid,
                verdict=estimated.memory.verdict,
            )
        )
    ranking.sort(key=lambda one: one.estimate.seconds)
    slowest = max(one.seconds for one in tried)
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


def test_the_front_is_the_pareto_front() -> None:
    tried = plan().evaluated
    best = front(tried)
    usable = [one for one in tried if one.verdict != "does not fit"]
    for one in usable:
        beaten = any(
            o.seconds <= one.seconds
            and o.memory <= one.memory
            and (o.seconds, o.memory) != (one.seconds, one.memory)
            for o in usable
        )
        assert beaten == (tried.index(one) not in best), one
    assert [tried[i].memory for i in best] == sorted(tried[i].memory for i in best)


DRAWN = """
    await frame();
    const svg = document.getElementById('scatter');
    svg.scrollIntoView({block: 'center'}); await frame();
    const facts = JSON.parse(document.getElementById('candidates').textContent);
    const hover = (x, y) => {
      const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
      svg.dispatchEvent(new PointerEvent('pointermove',
        {clientX: box.left + x * scale, clientY: box.top + y * scale, bubbles: true}));
      return tipText();
    };
    const told = facts.layout.map((name, i) => hover(facts.x[i], facts.y[i]));
    const empty = hover(75, 440);
    const circles = [...svg.querySelectorAll('.point.mark')].map((mark) => {
      const box = mark.getBBox();
      return [box.x + box.width / 2, mark.tagName === 'circle' ? box.y + box.height / 2 : box.y + 5];
    });
    const ring = svg.querySelector('.best');
    const shapes = [...svg.querySelectorAll('.point')].map((mark) =>
      mark.tagName === 'circle' ? 'fits' : mark.classList.contains('over') ? 'does not fit' : 'tight');
    return {told, empty, circles, shapes, crosses: svg.querySelectorAll('path.over').length,
            x: facts.x, y: facts.y, line: svg.querySelector('.front').getAttribute('d'),
            ring: [+ring.getAttribute('cx'), +ring.getAttribute('cy')],
            limit: svg.querySelectorAll('.limit').length};
"""


def test_every_candidate_is_a_point_with_its_layout(browser: Browser) -> None:
    result = plan()
    page = browser.opened(plan_page(result, "gpt3-175b"), DRAWN)
    misfits = [one.verdict == "does not fit" for one in result.evaluated]
    assert page["crosses"] == sum(misfits)
    # the verdict is a shape, not only a colour
    assert page["shapes"] == [one.verdict for one in result.evaluated]
    assert set(page["shapes"]) == {"fits", "tight", "does not fit"}
    assert page["circles"] == [
        pytest.approx(at, abs=0.06)
        for at, not_ in zip(zip(page["x"], page["y"], strict=True), misfits, strict=True)
        if not not_
    ]
    # to the right is more memory, down is faster
    for one, x, y in zip(result.evaluated, page["x"], page["y"], strict=True):
        for other, x2, y2 in zip(result.evaluated, page["x"], page["y"], strict=True):
            assert (one.memory < other.memory) <= (x <= x2)
            assert (one.seconds < other.seconds) <= (y >= y2)
    shown = [
        text for one, text in zip(result.evaluated, page["told"], strict=True) if text and one.layout in text
    ]
    assert len(shown) == len(result.evaluated)
    assert page["empty"] is None
    assert "Plan of gpt3-175b on 8 x a100" in plan_page(result, "gpt3-175b")
    fit = next(text for text in page["told"] if text and "small 8" in text)
    assert "0.125 GiB" in fit
    assert "none is faster with less memory" in fit
    assert page["line"].count("L") == len(front(result.evaluated)) - 1
    first = next(i for i, one in enumerate(result.evaluated) if one.layout == result.ranking[0].layout)
    assert page["ring"] == pytest.approx([page["x"][first], page["y"][first]], abs=0.06)
    assert page["limit"] == 1


BARS = """
    await frame();
    const bars = (id) => [...document.querySelectorAll(`#${id} .part`)].map((p) =>
      [p.dataset.of, p.dataset.name, +p.getAttribute('width'), p.dataset.value, +p.getAttribute('x')]);
    const part = document.querySelector('#steps .part');
    part.scrollIntoView({block: 'center'}); await frame();
    const box = part.getBoundingClientRect();
    part.dispatchEvent(new PointerEvent('pointermove',
      {clientX: box.left + 2, clientY: box.top + 2, bubbles: true}));
    const tip = tipText();
    return {steps: bars('steps'), memory: bars('memory'), tip, charts: charts.length,
            blocks: charts[0].blocks.length, rows: charts[0].rows.length,
            table: [...document.querySelector('table').tBodies[0].rows].length};
"""


def test_bars_are_as_long_as_their_parts(browser: Browser) -> None:
    result = plan()
    page = browser.opened(plan_page(result, "gpt3-175b"), BARS)
    wide = {
        one.layout: sum(w for of, _, w, _, _ in page["steps"] if of == one.layout) for one in result.ranking
    }
    scale = wide[result.ranking[0].layout] / result.ranking[0].estimate.seconds
    for one in result.ranking:
        assert wide[one.layout] == pytest.approx(scale * one.estimate.seconds, rel=1e-3)
        for name, value in one.estimate.parts.items():
            parts = [w for of, part, w, _, _ in page["steps"] if (of, part) == (one.layout, name)]
            assert sum(parts) == pytest.approx(scale * value, abs=0.01)
    assert page["tip"].startswith("compute")
    assert f"{result.ranking[0].estimate.parts['compute']:.4g} s" in page["tip"]
    winner = result.ranking[0].estimate
    assert winner.memory is not None
    beside = winner.memory.device.mid - winner.memory.allocated.mid
    labels = sorted({of for of, *_ in page["memory"]})
    assert len(labels) == len(winner.memory.ranks)
    held = [sum(w for of, _, w, _, _ in page["memory"] if of == label) for label in labels]
    for label, length in zip(labels, held, strict=True):
        rank = winner.memory.ranks[int(label.split()[2].strip(","))]
        assert length / held[0] == pytest.approx(
            (rank.total + beside) / (winner.memory.ranks[0].total + beside), rel=1e-3
        )
    assert page["charts"] == 1
    assert page["rows"] == winner.job.layout.pp
    program = winner.job.program()
    assert page["blocks"] == sum(len(order) for order in program.orders)
    assert page["table"] == len(result.ranking)


def test_the_page_loads_nothing_and_escapes_what_it_shows() -> None:
    page = plan_page(plan(), "gpt3-175b")
    assert not re.search(r'(?:src|href)="|@import|url\((?!#)', page)
    assert "<1f1b>" not in page
    assert "because of &amp;" in page


def test_the_page_names_model_nodes_network_and_software() -> None:
    page = plan_page(plan(), "gpt3-175b")
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert re.fullmatch(r"gpt3-175b: [\d.]+ [BM] parameters, \d+ layers of width \d+", facts["model"])
    assert facts["batch"] == "32 x 1024 tokens, bfloat16"
    assert re.fullmatch(r"8 x a100\S* \(dgx-a100-80gb\), [\d.]+ GiB each", facts["cluster"])
    assert re.fullmatch(r"1 node of 8 devices, NVLink \S+ [\d.]+ GB/s inside a node", facts["node"])
    assert facts["network"] == "none: one node"
    assert facts["software"] == "today"
    assert facts["search"].startswith("20 candidates, 9 replayed, 13 fit")


def test_the_reasons_of_the_losers_add_up() -> None:
    ranking = plan().ranking
    head, *rows = differences(ranking)
    first = ranking[0].estimate
    assert head[:3] == ("", "layout", "step")
    assert head[-1] == "rest"
    assert [row[1] for row in rows] == [one.layout for one in ranking[1:]]
    for row, one in zip(rows, ranking[1:], strict=True):
        whole, *parts = map(float, row[2:])
        assert whole == pytest.approx(one.estimate.seconds - first.seconds, abs=6e-4)
        assert sum(parts) == pytest.approx(whole, abs=6e-4 * len(parts))
        for name, text in zip(head[3:-1], row[3:-1], strict=True):
            change = one.estimate.parts.get(name, 0.0) - first.parts.get(name, 0.0)
            assert float(text) == pytest.approx(change, abs=6e-4)


@pytest.mark.parametrize("looks", [PARTS, MEMORY])
def test_parts_differ_without_colour(looks: Mapping[str, Look]) -> None:
    """Neighbours of a bar differ in pattern, or clearly in lightness."""
    for one, other in pairwise(looks.values()):
        if one is None or other is None or one[1] != other[1]:
            continue
        light, dark = sorted((colours.luminance(one[0]), colours.luminance(other[0])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 2, (one, other)


def test_commands_and_rejected_are_on_the_page() -> None:
    page = plan_page(plan(), "gpt3-175b", {"train it": "stretto train 'my plan.yaml'"})
    assert "<dt>train it</dt><dd><code>stretto train &#x27;my plan.yaml&#x27;</code></dd>" in page
    assert re.search(r"Rejected</h2>.*memory</th><td>2</td><td class=\"text\">no</td>", page, re.S)


def test_the_ranking_sorts_and_nothing_is_wider_than_the_window(browser: Browser) -> None:
    script = """
        const rows = () => [...document.querySelector('table').tBodies[0].rows];
        const column = (at) => rows().map((row) => row.cells[at].textContent);
        const head = document.querySelector('thead th:nth-child(7)');
        head.querySelector('button').click();
        return [column(6), head.getAttribute('aria-sort'),
          document.documentElement.scrollWidth <= document.documentElement.clientWidth];
    """
    values, order, narrow_enough = browser.opened(plan_page(plan(), "gpt3-175b"), script)
    assert values == sorted(values, key=lambda text: float(text.rstrip("%")))
    assert order == "ascending"
    assert narrow_enough


DARK = """
    await frame();
    const seen = () => [getComputedStyle(document.body).backgroundColor,
      getComputedStyle(document.querySelector('#scatter text')).fill,
      getComputedStyle(document.querySelector('#steps text')).fill];
    const first = seen();
    document.getElementById('theme').click(); await frame();
    return [first, seen()];
"""


def test_light_and_dark(browser: Browser) -> None:
    light, dark = browser.opened(plan_page(plan(), "gpt3-175b"), DARK)
    assert (light[0], dark[0]) == ("rgb(255, 255, 255)", "rgb(13, 17, 23)")
    assert light[1] != dark[1]
    assert light[2] != dark[2]


def test_where_nothing_fits_the_nearest_is_drawn(browser: Browser) -> None:
    result = plan()
    nothing = replace(result, ranking=(), feasible=0, nearest=result.ranking[0])
    page = plan_page(nothing, "gpt3-175b")
    assert "Nothing fits; nearest</h2>" in page
    assert (
        browser.opened(page, "await frame(); return document.querySelectorAll('#scatter .best').length;") == 0
    )
    with pytest.raises(StrettoError, match="no layout was timed"):
        plan_page(replace(nothing, nearest=None), "gpt3-175b")


def test_the_safe_and_the_plain_layouts_are_beside_the_first() -> None:
    result = plan()
    first, second, third, *_ = result.ranking
    page = plan_page(replace(result, safe=second, baselines={"FSDP": third, "tp8 x pp": None}), "gpt3-175b")
    cards = dict(re.findall(r"<section><h2>(.*?)</h2>(.*?)</section>", page))
    assert list(cards) == ["First", "Safe: the fastest that certainly fits", "Plain: FSDP", "Plain: tp8 x pp"]
    more = 100 * (third.estimate.seconds / first.estimate.seconds - 1)
    assert f", {more:+.1f}%" in cards["Plain: FSDP"]
    assert "none was found" in cards["Plain: tp8 x pp"]
    assert "it is the first" in plan_page(replace(result, safe=first), "gpt3-175b")


def test_a_search_that_was_cut_short_says_so() -> None:
    result = plan()
    unknown = replace(result, ranking=(), feasible=0, nearest=result.ranking[0], complete=False, gap=inf)
    page = plan_page(unknown, "gpt3-175b")
    assert "cut short by its limit" in page
    assert "Nothing fits" not in page


def test_many_microbatches_are_shortened() -> None:
    result = plan()
    job = replace(result.ranking[0].estimate.job, global_batch=32_000)
    long = replace(result.ranking[0], estimate=replace(result.ranking[0].estimate, job=job))
    page = plan_page(replace(result, ranking=[long]), "gpt3-175b")
    assert re.search(r"the first \d+ of \d+ microbatches", page)
    assert len(page) < 3_000_000
