"""The timeline as a widget: what anywidget loads, in a browser, and the traits that Python reads and sets."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Browser

from stretto import Action, ActionKind, StrettoError, schedule, simulate, timeline_widget
from stretto.program.replay import Timeline
from stretto.view.page import script_json
from stretto.view.panel import with_path
from stretto.view.panel_record import panels_record
from stretto.view.widget import _widget_class, joined_module, shadow_style

HOSTILE = "</script><img src=x onerror=document.title='run'>"


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return simulate(replace(schedule("1f1b", 4, 8), name=HOSTILE))


# a notebook's side of a widget: the model, and an element that is put into the page after it was rendered
NOTEBOOK = """
const until = async (holds) => { while (!holds()) await new Promise((done) => setTimeout(done, 5)); };
const module = await import(URL.createObjectURL(new Blob([%s], { type: "text/javascript" })));
const traits = { ...JSON.parse(document.getElementById("traits").textContent), ...%s };
const saved = [], handlers = {};
const model = {
  get: (name) => traits[name] ?? null,
  set: (name, value) => { traits[name] = value; handlers[`change:${name}`]?.(); },
  save_changes: () => saved.push({ selected: traits.selected, view: traits.view }),
  on: (event, act) => { handlers[event] = act; },
  off: (event, act) => { if (handlers[event] === act) delete handlers[event]; },
};
const el = document.createElement("div");
const close = module.default.render({ model, el });
document.body.style.background = "%s";
document.body.append(el);
const root = el.firstChild.shadowRoot.querySelector(".timelines");
await until(() => root.querySelector("canvas")?.parentElement.dataset.from);
const chart = root.querySelector("canvas");
const box = chart.getBoundingClientRect(), left = 72, plot = box.width - left - 12;
const from = (Event, kind, more) =>
  chart.dispatchEvent(new Event(kind, { bubbles: true, composed: true, cancelable: true, ...more }));
const send = (kind, time, rank, more) => from(kind === "wheel" ? WheelEvent : PointerEvent, kind, {
  clientX: box.left + left + (time / 33) * plot, clientY: box.top + 55 * rank + 14, pointerId: 1, ...more });
const click = (time, rank) => {
  for (const kind of ["pointermove", "pointerdown", "pointerup", "click"]) send(kind, time, rank);
};
const press = (name) => from(KeyboardEvent, "keydown", { key: name });
const sight = () => [+chart.parentElement.dataset.from, +chart.parentElement.dataset.to];
"""


def opened(
    chromium: Browser, timeline: Timeline, script: str, background: str = "white", **traits: Any
) -> Any:
    data = {"data": panels_record([with_path(timeline)]), "css": shadow_style(), **traits}
    page = (
        "<!DOCTYPE html><title>notebook</title><body><style>canvas { border: 9px solid }</style>"
        f'<script id="traits" type="application/json">{script_json(data)}</script>'
    )
    module = script_json(joined_module("widget"))
    notebook = NOTEBOOK % (module, json.dumps(traits), background)
    with chromium.new_page(viewport={"width": 1300, "height": 900}) as tab:
        tab.set_content(page)
        return tab.evaluate(f"async () => {{ {notebook} {script} }}")


def test_the_widget_is_one_module() -> None:
    module = joined_module("widget")
    assert not re.findall(r"^import |^export (?!default)", module, re.MULTILINE)
    assert module.count("class Timelines ") == 1
    assert ":root" not in shadow_style()
    assert ':host([data-theme="dark"]) {' in shadow_style()


def test_a_click_selects_an_action(chromium: Browser, timeline: Timeline) -> None:
    found = opened(
        chromium,
        timeline,
        """
        click(5, 2);  // rank 2 waits from 4 to 6
        const first = traits.selected;
        click(3.5, 3);
        const tip = root.querySelector(".tip"), text = tip.innerText, placed = tip.getBoundingClientRect();
        send("pointerleave", 3.5, 3);
        return {
          first, second: traits.selected, saved: saved.length, mark: root.dataset.selected, text,
          hidden: tip.hidden, open: tip.matches(":popover-open"), placed: placed.left - box.left,
          title: document.title, heading: root.querySelector("h2").textContent,
          border: getComputedStyle(chart).borderTopWidth,
        };
        """,
    )
    assert (found["first"], found["second"], found["mark"]) == (None, "3F0", "3F0")
    assert found["saved"] == 2
    assert found["text"].startswith("3F0 forward")
    assert "rank 3" in found["text"]
    assert (found["hidden"], found["open"]) == (True, True)
    assert found["placed"] > 72
    assert (found["title"], found["heading"]) == ("notebook", HOSTILE)
    assert found["border"] == "0px"  # styles of the notebook stay outside


def test_python_selects_and_shows_a_part(chromium: Browser, timeline: Timeline) -> None:
    found = opened(
        chromium,
        timeline,
        """
        const begin = [root.dataset.selected, ...sight()];
        model.set("selected", "0B7");  // from 30 to 33, outside of what is shown
        await until(() => sight()[1] === 33 && saved.length);
        const follows = traits.view;
        model.set("view", [10, 12]);
        await until(() => sight()[0] === 10 && saved.length > 1);
        const then = sight(), told = traits.view;
        model.set("selected", "9F9");
        const absent = root.dataset.selected;
        close();
        return {begin, follows, then, told, absent, left: Object.keys(handlers)};
        """,
        selected="2F0",
        view=[5, 15],
    )
    assert found["begin"] == ["2F0", 5, 15]
    assert found["follows"][1] == 33
    assert (found["then"], found["told"], found["absent"], found["left"]) == ([10, 12], [10, 12], "", [])


def test_the_wheel_scrolls_the_notebook_and_zooms_with_ctrl(chromium: Browser, timeline: Timeline) -> None:
    found = opened(
        chromium,
        timeline,
        """
        const scrolls = send("wheel", 10, 1, { deltaY: -100 }), still = sight();
        const zooms = !send("wheel", 10, 1, { deltaY: -100, ctrlKey: true });
        await until(() => saved.length);
        const zoomed = sight();
        press("ArrowRight"); press("ArrowRight"); press("Enter");
        return {
          scrolls, still, zooms, zoomed, view: traits.view, selected: traits.selected,
          suppressed: el.firstChild.hasAttribute("data-lm-suppress-shortcuts"),
          theme: el.firstChild.dataset.theme,
        };
        """,
        background="#111",
    )
    assert found["scrolls"]
    assert found["still"] == [0, 33]
    assert found["zooms"]
    assert found["zoomed"][1] - found["zoomed"][0] == pytest.approx(33 * 2.718281828**-0.4)
    assert found["view"] == found["zoomed"]
    assert re.fullmatch(r"0[FB]\d", found["selected"])
    assert (found["suppressed"], found["theme"]) == (True, "dark")


def test_traits() -> None:
    pytest.importorskip("anywidget")
    widget = timeline_widget(simulate(schedule("zb-v", 2, 4)))
    assert (widget.event, repr(widget)) == (None, "TimelineWidget('zb-v', selected=None)")
    widget.selected = "1W2"
    event = widget.event
    assert (event.rank, event.action, event.end - event.start) == (1, Action(1, ActionKind.W, 2), 0.5)
    assert {"data", "css", "selected", "view", "_esm"} <= set(widget.keys)
    with pytest.raises(StrettoError, match="'9F9'"):
        widget.selected = "9F9"
    assert widget.selected == "1W2"


def test_without_anywidget_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    _widget_class.cache_clear()
    with pytest.raises(StrettoError, match="anywidget") as caught:
        timeline_widget(simulate(schedule("1f1b", 2, 2)))
    assert caught.value.hint == "pip install 'stretto[notebook]'"
