"""The view of embedding tables: its answers are those of `stretto plan`, and a person can change them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page

from command_line import CommandLine
from stretto.recommender.shape import dlrm_preset
from stretto.web.answers import reply_lines


def ask(split: str, ranks: int = 8, cluster: str = "dgx-a100-80gb") -> dict[str, Any]:
    question = {"model": "dlrm-dcnv2", "cluster": cluster, "ranks": ranks, "batch": 65536, "split": split}
    (line,) = reply_lines(json.dumps({"ask": "tables", **question}))
    reply = json.loads(line)
    return reply.get("answer") or reply


def stored(answer: dict[str, Any]) -> list[float]:
    return [sum(rank["bytes"].values()) for rank in answer["ranks"]]


def test_the_hybrid_placement_is_that_of_the_command(stretto: CommandLine) -> None:
    answer = ask("hybrid")
    command = ("plan", "--model", "dlrm-dcnv2", "--cluster", "dgx-a100-80gb:8", "--batch", 65536)
    plan = stretto.json(*command)
    assert answer["seconds"] == plan["step_time_s"]
    assert stored(answer) == pytest.approx([load["device_gib"] * 2**30 for load in plan["loads"]])
    assert [each["ranks"] for each in answer["tables"]] == [each["ranks"] for each in plan["tables"]]
    assert {split for rank in answer["ranks"] for split in rank["bytes"]} == {"table", "column", "row"}


def test_one_split_for_all_tables() -> None:
    tables = dlrm_preset("dlrm-dcnv2").tables
    size = sum(4 * table.rows * (table.dim + 1) for table in tables)  # a state for each row
    unsplit, rows, columns, copies = (ask(split) for split in ("table", "row", "column", "data"))
    assert sum(stored(unsplit)) == pytest.approx(size)
    assert stored(rows) == pytest.approx([size / 8] * 8, rel=1e-3)
    extra = sum(4 * table.rows for table in tables) * 7 / 8  # a state for each row on each of 8 ranks
    assert stored(columns) == pytest.approx([size / 8 + extra] * 8, rel=1e-3)
    assert stored(copies) == pytest.approx([size] * 8)
    lesson = [round(1e3 * answer["seconds"], 1) for answer in (unsplit, columns, rows)]
    assert lesson == [27.0, 22.2, 20.6], "docs/learn/recommenders.md has these"
    assert ["needs 98.12 GiB" in text for text in copies["over"]] == [True]
    busy = [sum(rank["seconds"].values()) for rank in unsplit["ranks"]]
    assert max(busy) > 3 * sum(busy) / 8, "the table of a hundred ids a sample is on one rank"
    assert all(len(table["ranks"]) == 1 for table in unsplit["tables"])


def test_what_cannot_be_placed_is_an_error_or_beside_the_device() -> None:
    assert ask("diagonal")["error"]["message"] == "no placement 'diagonal'"
    assert "has 8 devices" in ask("row", 16, "dgx-1-v100-32gb:8")["error"]["message"]
    places = [table["place"] for table in ask("hybrid", 1, "a100-40gb-pcie-node")["tables"]]
    assert "cpu" in places, "98 GiB in 40"


def test_the_view_follows_the_split(opened: Callable[..., Page], page_address: str) -> None:
    page = opened(f"{page_address}#tables?model=dlrm-kaggle&ranks=4&split=row")
    placed = page.locator("#placed")
    placed.wait_for()
    assert "1.00 times the mean" in placed.inner_text()
    page.get_by_label("Placement").select_option("table")
    page.locator("div[aria-busy=false] #placed", has_not_text="1.00 times").wait_for()
    assert "split=table" in page.evaluate("location.hash")
    ratio = re.search(r"([\d.]+) times", placed.inner_text())
    assert ratio is not None
    assert float(ratio[1]) > 1.0
    assert page.locator("rect[data-part=whole]").count() >= 4
    assert page.locator("tbody tr").count() == 26
