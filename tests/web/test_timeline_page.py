"""Timelines in a page of one file: blocks where they belong, and its controls in a browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from stretto import schedule, simulate
from stretto.program import ActionKind, lower
from stretto.program.replay import Costs, Timeline
from stretto.view import colours
from stretto.view.measured import measured_html
from stretto.view.page import timeline_page
from stretto.view.panel import figures_table, with_path
from stretto.view.trace import trace_of

LEFT, RIGHT, PITCH, ROW = 72, 12, 28 + 20 + 7, 28  # the timeline's own measures, px

# helpers for the scripts of tests: what a reader's pointer and keys would do, sent to what they would hit
HELPERS = """
const canvas = (panel) => document.querySelectorAll('canvas[tabindex]')[panel ?? 0];
const at = (x, y, panel) => {
  const box = canvas(panel).getBoundingClientRect();
  return {clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true};
};
const pointer = (kind, x, y, panel) =>
  canvas(panel).dispatchEvent(new PointerEvent(kind, {...at(x, y, panel), pointerId: 1}));
const wheel = (x, y, deltaY, more) =>
  canvas().dispatchEvent(new WheelEvent('wheel', {...at(x, y), deltaY, ...more}));
const key = (name, more) => canvas().dispatchEvent(new KeyboardEvent('keydown', {key: name, ...more}));
const pixel = (x, y, which) => {
  const seen = which ?? canvas(), ratio = window.devicePixelRatio || 1;
  return [...seen.getContext('2d').getImageData(Math.round(x * ratio), Math.round(y * ratio), 1, 1).data];
};
const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
const shown = (panel) => ({...canvas(panel).parentElement.dataset});
const bubble = document.querySelector('.tip');
const tipText = () => (bubble.hidden ? null : bubble.innerText);
const status = document.querySelector('.timelines [role=status]');
const timelines = document.querySelector('.timelines').timelines;
const charts = timelines.charts;
const nameOf = (b) => `${b.stage}${b.kind}${b.microbatch ?? ''}`;
timelines.look(0, timelines.view.data.end);
"""


@pytest.fixture
def run(opened: Callable[..., Page], tmp_path: Path) -> Callable[..., Any]:
    """Opens a page, runs the body of an async function in it, returns its value."""

    def run_script(page: str, script: str) -> Any:
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf-8")
        tab = opened(path, 1300)
        tab.wait_for_selector("[data-ready]")
        return tab.evaluate(f"async () => {{ {HELPERS} {script} }}")

    return run_script


def replay(name: str, ranks: int, microbatches: int, costs: Costs | None = None) -> Timeline:
    return simulate(schedule(name, ranks, microbatches), costs or Costs())


def page_of(*timelines: Timeline) -> str:
    table = figures_table(timelines)
    return timeline_page("<Timelines> & more", [*map(with_path, timelines)], below=[("Figures", table)])


def test_the_page_is_one_file_that_loads_nothing() -> None:
    page = re.sub(r"base64,[^\"]+", "", page_of(replay("zb-v", 4, 8)))
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)|@import|https?://""", page)
    assert "default-src 'none'" in page
    assert not re.search(r"\{\{\w+\}\}", page)
    assert "<title>&lt;Timelines&gt; &amp; more</title>" in page


def test_names_cannot_leave_their_place(run: Callable[..., Any]) -> None:
    name = "</script><b>{{data}}&"
    page = page_of(simulate(replace(schedule("gpipe", 2, 2), name=name)))
    titles = "return [...document.querySelectorAll('h1, h2, tbody th')].map((each) => each.textContent);"
    assert run(page, titles) == ["<Timelines> & more", name, name]


def test_the_table_compares(run: Callable[..., Any]) -> None:
    page = page_of(replay("gpipe", 2, 4), replay("naive", 2, 4))
    script = """
        const rows = [...document.querySelectorAll('tbody tr')];
        return rows.map((row) => [...row.cells].map((cell) => cell.textContent));
    """
    gpipe, naive = run(page, script)
    assert gpipe == ["gpipe", "15", "20.0%", "4", "8"]
    assert naive[0] == "naive"


DRAW = (
    """
    await frame();
    const list = charts[0].panel;
    const box = canvas().getBoundingClientRect(), wide = box.width - LEFT - RIGHT;
    const x = (time) => LEFT + time / list.last * wide;
    const seen = list.start.map((start, i) => pixel(x(start) + 3.5, list.row[i] * PITCH + 4));
    return {seen, kinds: list.kind, shades: list.shade, all: shown(),
            ready: document.querySelector('.timelines').dataset.ready,
            idle: pixel(x(list.last) - 4, 4), held: [pixel(x(8), 28 + 19), pixel(x(8), 28 + 2)],
            label: canvas().getAttribute('aria-label'), title: document.title};
""".replace("LEFT", str(LEFT))
    .replace("RIGHT", str(RIGHT))
    .replace("PITCH", str(PITCH))
)


def test_every_block_is_painted_in_its_colour_at_its_place(run: Callable[..., Any]) -> None:
    page = run(page_of(replay("zb-v", 4, 8)), DRAW)
    kinds = [ActionKind.F, ActionKind.I, ActionKind.W]  # those of the schedule, in the legend's order
    assert len(page["seen"]) == 4 * 2 * 8 * 3
    for seen, kind, shade in zip(page["seen"], page["kinds"], page["shades"], strict=True):
        assert tuple(seen[:3]) == colours.of_kind(kinds[kind], shade, 2)
    assert page["ready"] == "1"
    assert page["all"]["drawn"] == str(4 * 2 * 8 * 3)
    assert tuple(page["idle"][:3]) not in {colours.of_kind(k, s, 2) for k in kinds for s in (0, 1)}
    assert page["held"][0] == pytest.approx([0xB9, 0xC0, 0xC9, 255], abs=3)  # the memory curve
    assert page["held"][1][3] == 0  # which does not fill its strip
    assert "zb-v" in page["label"]


HOVER = (
    """
    await frame();
    const wide = canvas().getBoundingClientRect().width - LEFT - RIGHT;
    const x = (time) => LEFT + time / 33 * wide, y = (rank) => rank * PITCH + 14;
    const over = document.querySelectorAll('canvas')[1];
    pointer('pointermove', x(6.5), y(2));      // rank 2, 2B0: from 6 to 8
    const tip = tipText();
    const edges = {own: pixel(x(6), y(2) + 6, over), needs: pixel(x(4), y(3) + 6, over),
                   early: pixel(x(2), y(2) + 6, over), else: pixel(x(12.5), y(0), over)};
    const before = [...over.getContext('2d').getImageData(0, 0, over.width, over.height).data].some((v) => v);
    pointer('pointermove', x(5), y(2));        // idle
    const gone = tipText();
    const after = [...over.getContext('2d').getImageData(0, 0, over.width, over.height).data].some((v) => v);
    return {tip, gone, before, after, edges};
""".replace("LEFT", str(LEFT))
    .replace("RIGHT", str(RIGHT))
    .replace("PITCH", str(PITCH))
)


def test_hovering_shows_times_and_dependencies(run: Callable[..., Any]) -> None:
    page = run(page_of(replay("1f1b", 4, 8)), HOVER)
    tip = page["tip"]
    assert tip.startswith("2B0 backward")
    lines = [line for line in tip.splitlines() if line]
    after = {lines[at]: lines[at + 1] for at in range(1, len(lines) - 1)}
    assert (after["start"], after["end"], after["takes"]) == ("6", "8", "2")
    assert after["waits for"] == "2F0, 3B0"
    assert after["waited for by"] == "1B0"
    assert after["after"] == "2F1, idle 2"
    assert after["activations"] == "2"
    edges = page["edges"]
    assert edges["own"][3] > 0  # outlined: itself and both that it waits for
    for edge in (edges["needs"], edges["early"]):  # in red, but for rounding of what lets light through
        assert edge[:3] == pytest.approx([0xCF, 0x22, 0x2E], abs=3)
    assert edges["else"][3] == 0
    assert page["before"]
    assert page["gone"] is None
    assert not page["after"]


MOVE = """
    await frame();
    const steps = [shown()];
    const note = async () => { await frame(); steps.push(shown()); };
    wheel(LEFT + 400, 10, -100); await note();                       // 1 zooms in at the pointer
    wheel(LEFT + 400, 10, 100); await note();                        // 2 and back out
    key('+'); await note();                                          // 3
    key('d'); await note();                                          // 4 pans
    pointer('pointerdown', 500, 10); pointer('pointermove', 600, 10);
    pointer('pointerup', 600, 10); await note();                     // 5 drags
    canvas().dispatchEvent(new MouseEvent('dblclick', at(500, 10))); await note();  // 6 fits
    const scrolled = wheel(10, 10, -100); await note();              // 7 over the labels: left to the page
    document.querySelector('[aria-label="Zoom in"]').click(); await note();             // 8
    [...document.querySelectorAll('button')].find((b) => b.textContent === 'Fit').click();
    await note();                                                    // 9
    return {steps, scrolled, width: canvas().getBoundingClientRect().width};
""".replace("LEFT", str(LEFT))


def test_wheel_drag_keys_and_buttons_move_the_view(run: Callable[..., Any]) -> None:
    page = run(page_of(replay("1f1b", 4, 8)), MOVE)
    views = [(float(step["from"]), float(step["to"])) for step in page["steps"]]
    wide = page["width"] - LEFT - RIGHT
    assert views[0] == (0, 33)
    pointed = 33 * 400 / wide
    low, high = views[1]
    assert high - low == pytest.approx(33 * 2.718281828**-0.4)
    assert (pointed - low) / (high - low) == pytest.approx(400 / wide)  # stays under the pointer
    assert views[2] == pytest.approx((0, 33))
    assert views[3] == pytest.approx((16.5 - 16.5 * 0.7, 16.5 + 16.5 * 0.7))
    span = 33 * 0.7
    assert views[4] == pytest.approx((views[3][0] + 0.2 * span, views[3][1] + 0.2 * span))
    assert views[5] == pytest.approx((views[4][0] - 100 / wide * span, views[4][1] - 100 / wide * span))
    assert views[6] == (0, 33)
    assert views[7] == (0, 33)
    assert page["scrolled"] is True
    assert views[8] == views[3]
    assert views[9] == (0, 33)
    # what is out of view is not drawn
    assert int(page["steps"][3]["drawn"]) < int(page["steps"][0]["drawn"]) == 64


KEYS = """
    await frame();
    const said = () => status.textContent.split(',')[0];
    const heard = [];
    for (const name of ['ArrowDown', 'ArrowRight', 'ArrowRight', 'ArrowDown', 'End', 'ArrowUp', 'Home']) {
      key(name); heard.push(said());
    }
    key('Escape');
    const gone = tipText();
    const find = document.querySelector('input[type=search]');
    const go = (text) => { find.value = text; find.dispatchEvent(new Event('change')); };
    go('3b7'); heard.push(said());
    go('9F9'); heard.push(status.textContent);
    return {heard, gone, role: canvas().getAttribute('role'), stop: canvas().tabIndex,
            live: status.getAttribute('role'),
            buttons: [...document.querySelectorAll('.timelines button')]
              .map((b) => b.getAttribute('aria-label') ?? b.textContent)};
"""


def test_the_keyboard_moves_between_actions_and_announces_them(run: Callable[..., Any]) -> None:
    page = run(page_of(replay("1f1b", 4, 8)), KEYS)
    moves = ["0F0", "0F1", "0F2", "1F1", "1B7", "0B7", "0F0"]
    assert page["heard"] == [*moves, "3B7", "there is no action 9F9"]
    assert page["gone"] is None
    assert (page["role"], page["stop"], page["live"]) == ("application", 0, "status")
    assert page["buttons"] == [*("Zoom in", "Zoom out", "Fit", "Legible")]


DARK = """
    await frame();
    const ground = () => getComputedStyle(document.body).backgroundColor;
    const first = [ground(), pixel(80 + 400, 28 + 19)];
    document.getElementById('theme').click(); await frame();
    return [first, [ground(), pixel(80 + 400, 28 + 19)]];
"""


def test_light_and_dark(run: Callable[..., Any]) -> None:
    light, dark = run(page_of(replay("gpipe", 4, 8)), DARK)
    assert (light[0], dark[0]) == ("rgb(255, 255, 255)", "rgb(13, 17, 23)")
    assert light[1] == pytest.approx([0xB9, 0xC0, 0xC9, 255], abs=3)
    assert dark[1] == pytest.approx([0x4A, 0x52, 0x5D, 255], abs=3)


LARGE = """
    await frame();
    const time = (act) => {
      const from = performance.now();
      for (let k = 0; k < 5; k++) act();
      return (performance.now() - from) / 5;
    };
    const whole = time(() => charts.forEach((c) => { c.draw(); c.mark(); }));
    const drawn = shown().drawn;
    wheel(600, 10, -1000); for (let k = 0; k < 10; k++) key('+');
    await frame();
    const close = time(() => charts.forEach((c) => { c.draw(); c.mark(); }));
    const found = time(() => { for (let x = 100; x < 1100; x += 10) pointer('pointermove', x, 10); });
    return {whole, close, found, drawn: +drawn, near: +shown().drawn, blocks: charts[0].blocks.length};
"""


def test_twenty_thousand_blocks_stay_usable(run: Callable[..., Any]) -> None:
    timeline = replay("1f1b", 16, 640)
    page = run(page_of(timeline), LARGE)
    assert page["blocks"] == 2 * 16 * 640 > 20_000
    assert page["near"] < 2000 <= page["drawn"]
    # of the whole and of a part; 100 moves of the pointer; wall time is generous, for a busy machine
    assert page["whole"] < 2000, page
    assert page["close"] < 500, page
    assert page["found"] < 5000, page


NUMBERS = """
    await frame();
    const written = [], fill = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
      if (this.textAlign === 'center') written.push([text, parseFloat(this.font)]);
      return fill.call(this, text, x, y);
    };
    const pen = charts[0].canvas.getContext('2d');
    charts[0].rows.forEach((_, row) => charts[0].drawRow(pen, row));
    return written;
"""


def test_numbers_of_many_microbatches_have_one_size(run: Callable[..., Any]) -> None:
    """Forty microbatches: backwards are wide enough for two digits, forwards for none."""
    written = run(page_of(replay("1f1b", 8, 40)), NUMBERS)
    assert {text for text, _ in written} == set(map(str, range(40)))
    sizes = [size for _, size in written]
    assert max(sizes) < 1.1 * min(sizes)


COMPARED = """
    await frame();
    const all = () => [...document.querySelectorAll('.chart')].map((each) => ({...each.dataset}));
    const first = all();
    wheel(400, 10, -100); await frame();
    return [first, all(), [...document.querySelectorAll('h2')].map((each) => each.textContent)];
"""


def test_compared_schedules_share_the_view(run: Callable[..., Any]) -> None:
    page = page_of(*[replay("naive", 2, 4), replay("gpipe", 2, 4), replay("zb-v", 2, 4)])
    first, zoomed, titles = run(page, COMPARED)
    assert titles == ["naive", "gpipe", "zb-v"]
    assert {(each["from"], each["to"]) for each in first} == {("0", "24")}
    assert len({(each["from"], each["to"]) for each in zoomed}) == 1
    assert zoomed[0]["to"] != "24"


MEASURED = """
    await frame();
    const block = charts[0].blocks.find((b) => nameOf(b) === '1F1' && b.row === 3);
    const [x, y, width, height] = charts[0].box(block);
    pointer('pointermove', x + width / 2, y + height / 2);
    return {tip: tipText(), needs: block.needs.map((b) => [nameOf(b), b.row])};
"""


def test_a_measured_action_is_shown_beside_its_prediction(run: Callable[..., Any]) -> None:
    program = lower(schedule("gpipe", 2, 2))
    predicted, measured = (trace_of(simulate(program, costs)).events for costs in (Costs(), Costs(F=1.5)))
    page = run(measured_html(predicted, measured, "gpipe"), MEASURED)
    lines = [line for line in page["tip"].splitlines() if line]
    details = dict(zip(lines[1::2], lines[2::2], strict=True))
    assert details["on"] == "rank 1 measured"
    assert (details["start"], details["takes"]) == ("3", "1.5")
    assert details["predicted"] == "2 to 3, takes 1"
    assert page["needs"] == [["0F1", 1]]  # what was measured, not what was predicted
    assert "activations" not in details


PATH = """
    await frame();
    const marked = () => charts[0].blocks.filter((b) => {
      const [x, y, width, height] = charts[0].box(b);
      const seen = pixel(x + width / 2, y + height + 1);
      return seen[0] === 0xd1 && seen[1] === 0 && seen[2] === 0x6f;
    }).map(nameOf);
    const before = marked(), box = document.querySelector('.legend input');
    box.click(); await frame();
    const after = marked();
    const three = charts[0].blocks.find((b) => nameOf(b) === '2F0'), [x, y] = charts[0].box(three);
    pointer('pointermove', x + 4, y + 4);
    return {before, after, tip: tipText()};
"""


def test_the_critical_path_can_be_shown(run: Callable[..., Any]) -> None:
    timeline = replay("1f1b", 4, 8)
    page = run(page_of(timeline), PATH)
    path = [str(c.event.action) for c in timeline.critical_path if c.event.action.kind.is_compute]
    assert page["before"] == []
    assert sorted(page["after"]) == sorted(path)
    assert "held up by its input" in page["tip"]


PAIRS = """
    await frame();
    const b = charts[0].blocks.filter((each) => each.lanes === 2), [x0, y0, w0, h0] = charts[0].box(b[0]);
    const other = b.find((each) => each.row === b[0].row && each.start === b[0].start && each !== b[0]);
    const [x1, y1, w1, h1] = charts[0].box(other);
    pointer('pointermove', x0 + w0 / 2, y0 + h0 / 2); const one = tipText().split(' ')[0];
    pointer('pointermove', x1 + w1 / 2, y1 + h1 / 2); const two = tipText().split(' ')[0];
    return {count: b.length, one, two, names: [nameOf(b[0]), nameOf(other)]};
"""


def test_an_overlapped_pair_is_two_halves(run: Callable[..., Any]) -> None:
    timeline = replay("dualpipe-v", 2, 6, Costs(pair=0.8))
    page = run(page_of(timeline), PAIRS)
    assert page["count"] == 2 * len(timeline.program.pairs)
    assert [page["one"], page["two"]] == page["names"]
