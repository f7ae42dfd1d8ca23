"""The view of memory as a person uses it: choose, slide, drop a config.json, read, save."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from stretto.cli import main
from stretto.job.huggingface import config_to_huggingface
from stretto.job.presets import preset

pytest.importorskip("playwright", reason="Playwright drives the browser")

Open = Callable[..., Any]
ADDRESS = "#memory?model=llama3-8b&cluster=dgx-h100&tp=2&dp=2&pp=4&seq=8192"


@pytest.fixture
def view(opened: Open, page_address: str) -> Any:
    tab = opened(f"{page_address}{ADDRESS}")
    tab.locator("#formulas").wait_for()
    return tab


def settled(tab: Any) -> None:
    """Wait until the answer to the last question is shown."""
    tab.wait_for_timeout(50)
    tab.locator("div[aria-busy=false] #verdict").wait_for()


def needs(tab: Any) -> float:
    settled(tab)
    match = re.search(r"needs ([\d.]+) GiB", tab.locator("#verdict").inner_text())
    assert match is not None
    return float(match[1])


def rows(tab: Any, name: str) -> dict[str, list[str]]:
    lines = tab.get_by_role("region", name=name).locator("tbody tr").all()
    return {cells[0]: cells[1:] for cells in (line.inner_text().split("\t") for line in lines)}


def test_sliders_move_the_verdict(view: Any) -> None:
    assert view.locator("#verdict").get_attribute("data-verdict") == "fits"
    before = needs(view)
    slider = view.get_by_role("slider", name="micro batch")
    slider.focus()
    for _ in range(5):
        slider.press("ArrowRight")
    view.locator("#verdict[data-verdict='does not fit']").wait_for()
    assert needs(view) > before
    assert "micro=6" in view.evaluate("location.hash")
    view.get_by_label("recomputation").select_option("full")
    view.locator("#verdict[data-verdict=fits]").wait_for()


def test_bars_have_the_bytes_of_the_table(view: Any) -> None:
    """Of every rank all kinds; the one that is clicked is taken apart below."""
    bars = view.locator("#bars .memory-row")
    assert bars.count() == 4
    bars.nth(2).click()
    view.get_by_role("heading", name="Where each GiB of pipeline rank 2 goes").wait_for()
    table = rows(view, "By kind, largest first")
    shares = [float(cells[1].rstrip("%")) for cells in table.values()]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.6)
    title = bars.nth(2).locator("[data-kind=activations] title").text_content()
    assert title == f"activations of blocks: {table['activations of blocks'][0]}"
    assert "rank=2" in view.evaluate("location.hash")


def test_a_config_is_dropped_and_taken_back(view: Any) -> None:
    config = json.dumps(config_to_huggingface(preset("qwen2.5-7b")))
    file = {"name": "qwen/config.json", "mimeType": "application/json", "buffer": config.encode()}
    view.get_by_label("a config.json of Hugging Face").set_input_files(file)
    view.locator("#loaded", has_text="(qwen2)").wait_for()
    settled(view)
    # 18,944 inner features and 4 key heads of 28
    assert "4 key heads of 28" in view.locator("#activation-reasons").inner_text()
    assert view.evaluate("location.hash").count("config=%7E") == 1  # deflated, so that it can be sent
    view.get_by_role("button", name="back to the presets").click()
    view.locator("#activation-reasons", has_text="8 key heads of 32").wait_for()


def test_a_hostile_file_stays_text_and_says_what_is_wrong(view: Any) -> None:
    file = {"name": "<img src=x onerror=alert(1)>.json", "mimeType": "application/json", "buffer": b"[1]"}
    view.get_by_label("a config.json of Hugging Face").set_input_files(file)
    problem = view.get_by_role("alert")
    problem.wait_for()
    assert "<img src=x onerror=alert(1)>.json is not a mapping" in problem.inner_text()
    assert view.locator("img").count() == 0


def test_scores_are_kept_if_attention_is_written_out(opened: Open, page_address: str) -> None:
    """Then 2 bytes of 5 remain of the paper's term: the model has no dropout."""
    tab = opened(f"{page_address}#memory?model=korthikanti-22b&cluster=dgx-a100-80gb&tp=8&dp=1&pp=1")
    tab.locator("#formulas").wait_for()
    assert tab.locator("#formulas code").first.inner_text() == "sbh(34/t+5as/(ht))"
    assert "fused attention" in tab.locator("#activation-reasons").inner_text()
    assert float(rows(tab, "Activations: formula and count")["scores of attention"][2].rstrip("%")) < -99
    tab.get_by_label("attention", exact=True).select_option("unfused")
    tab.locator("tr", has_text="scores of attention").get_by_text("-60.0%").wait_for()


def test_offload_and_optimiser_change_the_states(view: Any) -> None:
    before = needs(view)
    view.get_by_label("offload").select_option("optimizer")
    settled(view)
    view.locator("#state-reasons", has_text="offloaded").wait_for()
    assert needs(view) < before
    assert "in host memory" in view.locator("#rank-memory").inner_text()
    view.get_by_label("offload").select_option("none")
    view.get_by_label("optimiser", exact=True).select_option("sgd")
    view.locator("#state-reasons", has_text="the optimiser is sgd").wait_for()
    assert needs(view) < before


@pytest.mark.parametrize(
    "state",
    [
        "optimiser=sgd&offload=optimizer&zero=2",
        "offload=nvme&recompute=full&blocks=2",
        "states=bfloat16&offload=both&zero=3&pp=1&dp=4",
        "optimiser=adafactor&model=mixtral-8x7b&tp=1&ep=2&expert_tp=1&schedule=interleaved&chunks=2",
    ],
)
def test_the_line_below_the_answer_predicts_the_same(
    opened: Open, page_address: str, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    tab = opened(f"{page_address}#memory?{state}")
    tab.locator("#formulas").wait_for()
    stretto, *line = shlex.split(tab.locator("code", has_text="stretto predict").inner_text())
    assert stretto == "stretto"
    assert main.run([*line, "--json"]) in (0, 1)  # 1: it does not fit
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert needs(tab) == round(row["memory"]["device"]["gib"], 1)
    assert row["verdict"] == tab.locator("#verdict").get_attribute("data-verdict")


def test_the_answer_is_saved_as_json(view: Any) -> None:
    with view.expect_download() as downloading:
        view.get_by_role("button", name="Save as JSON").click()
    with open(downloading.value.path(), encoding="utf-8") as file:
        saved = json.load(file)
    assert saved["layout"] == "tp2 dp2 pp4"
    assert saved["memory"]["device"]["gib"] == pytest.approx(needs(view), abs=0.05)


def test_an_illegal_job_keeps_the_last_answer_and_says_the_fix(view: Any) -> None:
    view.get_by_label("tensor parallel (tp)").fill("3")
    view.get_by_label("tensor parallel (tp)").press("Enter")
    problem = view.get_by_role("alert")
    problem.wait_for()
    assert "layout.tp" in problem.inner_text()
    assert view.locator("#verdict").count() == 1


def test_a_phone_shows_everything_in_chinese(opened: Open, page_address: str) -> None:
    tab = opened(f"{page_address}{ADDRESS}", width=400, locale="zh-CN", color_scheme="dark")
    tab.locator("#formulas").wait_for()
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    text = tab.locator("main").inner_text()
    for chinese in ("放得下", "优化器状态", "带门控的 MLP", "分配器碎片"):
        assert chinese in text
    for english in ("optimiser states", "At its fullest", "the fullest pipeline rank", "gradients are"):
        assert english not in text
