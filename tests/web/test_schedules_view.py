"""The view of schedules, as a person uses it: choose, type, drag, undo, move by keyboard."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto.program.text import read_program
from stretto.view.page import recorded_page
from stretto.web.schedules import replay

pytest.importorskip("playwright", reason="Playwright drives the browser")

Open = Callable[..., Any]


@pytest.fixture
def view(opened: Open, page_address: str) -> Any:
    """The view of 1F1B on 4 ranks with 8 microbatches."""
    tab = opened(f"{page_address}#schedules")
    tab.wait_for_selector("[data-ready='1']")
    tab.wait_for_selector(".verdict")
    return tab


def verdict(tab: Any) -> str:
    return re.sub(r"\s+", " ", tab.locator(".verdicts").inner_text())


def type_into(tab: Any, label: str, text: str) -> None:
    field = tab.get_by_label(label, exact=True)
    field.fill(text)
    field.press("Enter")


def at(tab: Any, time: float, row: int, end: float = 33.0) -> tuple[float, float]:
    """Where a time of a row is on the screen, if the timeline shows everything."""
    canvas = tab.locator("canvas[tabindex]").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    return box["x"] + 72 + time / end * (box["width"] - 72 - 12), box["y"] + row * 55 + 14


def drag(tab: Any, start: tuple[float, float], end: tuple[float, float], *, release: bool = True) -> None:
    tab.mouse.move(*start)
    tab.mouse.down()
    tab.mouse.move(*end, steps=6)
    if release:
        tab.mouse.up()


def test_both_bubbles_are_on_the_page(view: Any) -> None:
    bubbles = view.get_by_role("region", name="The bubble, by definition").inner_text()
    for text in ("27.3%", "37.5%", "3/11", "3/8"):
        assert text in bubbles


def test_columns_of_bubbles_are_aligned_alike_with_and_without_formulas(view: Any) -> None:
    view.get_by_role("button", name="Add a schedule").click()  # zb-v, which has none
    view.wait_for_selector("[data-ready='2']")
    table = view.get_by_role("region", name="The bubble, by definition")
    table.get_by_role("columnheader", name="zb-v").wait_for()
    assert set(
        table.locator("td").evaluate_all("all => all.map((cell) => getComputedStyle(cell).textAlign)")
    ) == {"left"}


def test_choose_and_type(view: Any) -> None:
    view.get_by_label("Schedule", exact=True).first.select_option("interleaved")
    type_into(view, "chunks", "4")
    view.get_by_text("interleaved:chunks=4").first.wait_for()
    view.locator("#ranks").fill("2")
    view.locator("#ranks").press("Enter")
    view.get_by_text("2 ranks, 4 chunks, 8 microbatches").wait_for()
    view.get_by_text("Costs: times").click()
    type_into(view, "message", "0.5")
    view.get_by_role("button", name="Add a schedule").click()
    view.wait_for_selector("[data-ready='2']")
    # the address is a permalink of all of it
    address = view.url
    view.goto("about:blank")
    view.goto(address)
    view.wait_for_selector("[data-ready='2']")
    assert view.get_by_label("chunks", exact=True).input_value() == "4"
    assert view.get_by_label("message", exact=True).input_value() == "0.5"
    view.get_by_role("button", name="Remove zb-v").click()
    view.wait_for_selector("[data-ready='1']")


def test_an_impossible_number_is_refused_where_it_is_typed(view: Any) -> None:
    view.get_by_text("Costs: times").click()
    type_into(view, "F, forward", "1, x")
    assert "as in 1, 1, 2, 1" in view.get_by_label("F, forward").evaluate(
        "(field) => field.validationMessage"
    )
    type_into(view, "F, forward", "1, 2")
    view.get_by_role("alert").get_by_text("per_stage has 2 entries").wait_for()


def test_drag_undo_redo(view: Any) -> None:
    assert "peak activations 4" in verdict(view)
    # while it is dragged, the answer comes already
    drag(view, at(view, 11, 0), at(view, 13.6, 0), release=False)
    view.get_by_text("4 → 5").wait_for()
    assert "orders" not in view.url
    view.mouse.up()
    view.get_by_role("heading", name="1f1b, edited").wait_for()
    assert "✓ runs" in verdict(view)
    # the address has the row that was changed, and no other
    assert len(view.url) < 400
    address = view.url
    view.keyboard.press("Control+z")
    view.get_by_role("heading", name="1f1b", exact=True).wait_for()
    view.keyboard.press("Control+Shift+z")
    view.get_by_role("heading", name="1f1b, edited").wait_for()
    assert view.url == address
    view.goto("about:blank")
    view.goto(address)
    view.get_by_text("4 → 5").wait_for()
    view.get_by_role("button", name="Reset edits").click()
    view.get_by_role("heading", name="1f1b", exact=True).wait_for()


def test_a_deadlock_is_drawn_as_its_cycle(view: Any) -> None:
    drag(view, at(view, 3.5, 0), at(view, 17, 0))
    view.get_by_role("heading", name="1f1b, edited").wait_for()
    view.get_by_text("this order does not run").first.wait_for()
    assert "✗ does not run deadlock: rank 0 waits at 0B1" in verdict(view)
    items = view.locator(".verdict li").all_inner_texts()
    assert items == ["0B1 waits for 1B1", "1F3 waits for 0F3"]
    # marked over the timeline, and never mistaken for what runs
    red = """() => {
      const over = document.querySelector('.chart canvas[aria-hidden]');
      const { data } = over.getContext('2d').getImageData(0, 0, over.width, over.height);
      let count = 0;
      for (let i = 0; i < data.length; i += 4)
        if (data[i] > 190 && data[i + 1] < 60 && data[i + 3] > 200) count++;
      return count;
    }"""
    view.mouse.move(5, 5)
    assert view.evaluate(red) > 200


def test_a_deadlock_while_dragging_goes_when_the_drag_is_given_up(view: Any) -> None:
    drag(view, at(view, 3.5, 0), at(view, 17, 0), release=False)
    view.get_by_text("✗ does not run").wait_for()
    view.locator("canvas[tabindex]").first.press("Escape")
    view.get_by_text("✓ runs").wait_for()
    view.mouse.up()
    assert "orders" not in view.url
    assert "makespan 33" in verdict(view)


def test_keys_move_an_action(view: Any) -> None:
    canvas = view.locator("canvas[tabindex]").first
    canvas.focus()
    for _ in range(5):
        view.keyboard.press("ArrowRight")
    assert "0B0" in view.locator(".tip b").inner_text()
    view.keyboard.press("Alt+ArrowRight")
    view.get_by_role("heading", name="1f1b, edited").wait_for()
    # the action is still selected, and can be moved on
    assert "0B0" in view.locator(".tip b").inner_text()
    view.keyboard.press("Alt+ArrowRight")
    view.get_by_text("✓ runs").wait_for()
    # keys that come faster than answers
    view.evaluate("""() => {
      const key = () => new KeyboardEvent('keydown', {key: 'ArrowLeft', altKey: true});
      for (let i = 0; i < 2; i++) document.querySelector('canvas[tabindex]').dispatchEvent(key());
    }""")
    view.get_by_text("4 → 4").wait_for()


def test_a_long_timeline_opens_legibly_and_is_never_a_barcode(opened: Open, page_address: str) -> None:
    programs = "%5B%7B%22name%22%3A%22zb-v%22%7D%5D"
    tab = opened(f"{page_address}#schedules?ranks=16&microbatches=64&programs={programs}")
    tab.wait_for_selector("[data-ready='1']")
    chart = tab.locator(".chart").first
    tab.wait_for_selector(".chart[data-drawn]:not([data-drawn='0'])")
    assert float(chart.get_attribute("data-to")) < 100 < 199.5
    assert chart.get_attribute("data-columns") == "0"
    assert tab.locator(".columns").is_hidden()
    tab.get_by_role("button", name="Fit").click()
    tab.wait_for_selector(".chart[data-columns]:not([data-columns='0'])")
    assert tab.locator(".columns").is_visible()
    # in the steady state a third each of F, I and W: a column has all three colours
    colours = tab.evaluate("""() => {
      const canvas = document.querySelector('canvas[tabindex]'), ratio = canvas.width / canvas.clientWidth;
      const x = Math.floor((canvas.clientWidth * 0.5) * ratio), seen = new Set();
      const pixel = (y) => canvas.getContext('2d').getImageData(x, Math.floor(y * ratio), 1, 1);
      for (let y = 1; y < 27; y++) seen.add([...pixel(y).data].join());
      return [...seen];
    }""")
    assert len(colours) >= 3


def test_memory_of_a_rank(view: Any) -> None:
    view.get_by_text("peak 4 on rank 0").wait_for()
    view.get_by_label("Rank", exact=True).select_option("2")
    view.locator(".curves .u-legend").get_by_text("activations").wait_for()
    view.get_by_label("Schedule", exact=True).first.select_option("pipedream")
    view.get_by_role("heading", name="Versions of the weights").wait_for()


def test_files_go_out_and_in(view: Any, tmp_path: Path) -> None:
    drag(view, at(view, 11, 0), at(view, 13.6, 0))
    view.get_by_role("heading", name="1f1b, edited").wait_for()
    saved = dict[str, Path]()
    for button in ("CSV of torch", "JSON", "SVG", "PNG"):
        with view.expect_download() as waiting:
            view.get_by_role("button", name=button, exact=True).click()
        saved[button] = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(saved[button])
    assert saved["PNG"].read_bytes()[1:4] == b"PNG"
    assert "1f1b, edited" in saved["SVG"].read_text(encoding="utf-8")
    order = "0F0,0F1,0F2,0F3,0F4,0B0,"
    assert saved["CSV of torch"].read_text(encoding="utf-8").startswith(order)
    assert read_program(saved["JSON"]) == replace(
        read_program(saved["CSV of torch"], "1f1b"), parameters=read_program(saved["JSON"]).parameters
    )
    view.get_by_role("button", name="Layout of Megatron-LM").click()
    view.get_by_role("alert").get_by_text("an edited 1f1b is neither").wait_for()
    # the file dropped on the page is a second timeline, and no program is an error that changes nothing
    dropped = saved["CSV of torch"]
    drop(view, dropped.name, dropped.read_text(encoding="utf-8"))
    view.wait_for_selector("[data-ready='2']")
    view.get_by_role("heading", name="1f1b-edited", exact=True).wait_for()
    drop(view, "<b>x</b>.csv", "0F0,0B9")
    view.get_by_role("alert").get_by_text("microbatches").wait_for()
    assert view.locator(".program legend").count() == 2


def drop(tab: Any, name: str, text: str) -> None:
    """Drop a file where programs are dropped."""
    transfer = tab.evaluate_handle(
        """([name, text]) => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([text], name));
          return transfer;
        }""",
        [name, text],
    )
    tab.locator(".drop").dispatch_event("drop", {"dataTransfer": transfer})


def test_the_config_comes_with_its_program(view: Any) -> None:
    drag(view, at(view, 11, 0), at(view, 13.6, 0))
    view.get_by_role("heading", name="1f1b, edited").wait_for()
    names = list[str]()
    view.on("download", lambda download: names.append(download.suggested_filename))
    view.get_by_role("button", name="Config that trains it").click()
    view.get_by_text("written: 1f1b-edited.yaml, 1f1b-edited.csv").wait_for()
    for _ in range(50):
        if len(names) == 2:
            break
        view.wait_for_timeout(50)
    assert names == ["1f1b-edited.yaml", "1f1b-edited.csv"]


def test_a_page_that_carries_its_answers_has_no_controls(opened: Open, tmp_path: Path) -> None:
    programs = [{"name": name, "ranks": 4, "microbatches": 8} for name in ("1f1b", "zb-h1")]
    answers = {"timeline": replay({"programs": programs})}
    path = tmp_path / "page.html"
    path.write_text(recorded_page("Schedules", "schedules", answers), encoding="utf-8")
    tab = opened(path)
    tab.wait_for_selector("[data-ready='2']")
    assert tab.get_by_role("region", name="Figures").get_by_text("27.3%").is_visible()
    assert tab.locator("select, input[type=number], .drop, .moves:visible").count() == 0
    # what is dragged is the view, not an action
    drag(tab, at(tab, 11, 0), at(tab, 20, 0))
    assert "orders" not in tab.url
