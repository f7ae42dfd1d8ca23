"""Answers about schedules equal what Python computes: times, bubbles, memory, verdicts of edits."""

from __future__ import annotations

import json
from math import isclose
from typing import Any

import pytest

from stretto.program import names, options, schedule
from stretto.program.replay import Costs, simulate
from stretto.web.answers import reply_lines
from stretto.web.bubbles import FORMULAS, closed_form


def answer(ask: str, **question: Any) -> Any:
    (reply,) = [json.loads(line) for line in reply_lines(json.dumps({"ask": ask, **question}))]
    return reply["answer"] if "answer" in reply else reply["error"]


def program(name: str, ranks: int = 4, microbatches: int = 8, **more: Any) -> dict[str, Any]:
    return {"name": name, "ranks": ranks, "microbatches": microbatches, **more}


def moved(rank: int, action: str, index: int, name: str = "1f1b") -> list[str]:
    """The orders of a schedule with one action at another place of its rank."""
    orders = [list(map(str, order)) for order in schedule(name, 4, 8).orders]
    orders[rank].remove(action)
    orders[rank].insert(index, action)
    return [",".join(order) for order in orders]


@pytest.mark.parametrize("name", names())
def test_every_schedule_is_replayed_as_in_python(name: str) -> None:
    costs: dict[str, Any] = {"F": 1.0, "I": 1.5, "W": 0.5, "hop": 0.25}
    given: dict[str, Any]
    given, sizes = ({"costs": Costs(**costs)}, (2, 4)) if name == "auto" else ({}, (4, 8))
    timeline = simulate(schedule(name, *sizes, **given), Costs(**costs))
    replayed = answer("timeline", programs=[program(name, *sizes)], costs=costs)
    (panel,) = replayed["timelines"]["panels"]
    assert panel["figures"] == {
        "makespan": timeline.makespan,
        "bubble": timeline.bubble.rate,
        "over_ideal": timeline.bubble.over_ideal,
        "peak": max(timeline.peak_activations),
    }
    # an edit that changes nothing says the same
    unchanged = program(name, *sizes, orders=[",".join(order) for order in panel["orders"]])
    edited = answer("edit", program=unchanged, costs=costs)
    assert edited["legal"]
    assert edited["figures"] == panel["figures"]
    assert edited["starts"] == [*timeline.starts]


def test_both_bubbles_stand_side_by_side_with_their_formulas() -> None:
    rows = {row[0].strip(): row[1] for row in answer("timeline", programs=[program("1f1b")])["bubbles"]}
    assert rows["share of the step: bubble / makespan"] == "27.3%"
    assert rows["share of the work: bubble / ideal, as in Megatron-LM's papers"] == "37.5%"
    program_ = schedule("1f1b", 4, 8)
    assert closed_form(program_, "1f1b", of_step=True) == "(p - 1) / (m + p - 1) = 3/11 = 27.3%"
    assert closed_form(program_, "1f1b", of_step=False) == "(p - 1) / m = 3/8 = 37.5%"


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 4), (4, 2), (4, 6), (5, 15), (8, 16)])
def test_closed_forms_are_what_the_replay_measures(name: str, ranks: int, microbatches: int) -> None:
    program_ = schedule(name, ranks, microbatches, **({"steps": 3} if "steps" in options(name) else {}))
    costs = Costs() if name == "zb-h1" else Costs(F=1, I=2, W=0.5)
    bubble = simulate(program_, costs).bubble
    for of_step, measured in ((True, bubble.rate), (False, bubble.over_ideal)):
        text = closed_form(program_, name, of_step=of_step)
        if microbatches % ranks and text.endswith("divides m"):
            continue
        idle, total = text.split(" = ")[-2].split("/")
        assert isclose(int(idle) / int(total), measured, rel_tol=1e-9)


def test_uneven_stages_are_lists() -> None:
    costs: dict[str, Any] = {"F": [1, 2, 1, 1], "I": 1.0, "W": 1.0}
    replayed = answer("timeline", programs=[program("1f1b")], costs=costs)
    triples = [(forward, 1.0, 1.0) for forward in costs["F"]]
    expected = simulate(schedule("1f1b", 4, 8), Costs(per_stage=triples))
    assert replayed["timelines"]["panels"][0]["figures"]["makespan"] == expected.makespan
    # a number beside a list is a rank's share, divided among its two stages
    two = answer("timeline", programs=[program("zb-v", 2, 4)], costs={"F": [0.5] * 4, "I": 1.0, "W": 1.0})
    assert two["timelines"]["panels"][0]["figures"]["makespan"] == simulate(schedule("zb-v", 2, 4)).makespan
    assert (
        "F, I and W" in answer("timeline", programs=[program("1f1b")], costs={"F": [1, 2], "I": [1]})["hint"]
    )
    assert "'FF'" in answer("timeline", programs=[program("1f1b")], costs={"FF": 1})["message"]


def test_a_legal_edit_has_figures() -> None:
    # one more forward of warm-up on the first rank: as fast, one more microbatch in memory
    edited = answer("edit", program=program("1f1b", orders=moved(0, "0B0", 5)))
    assert edited["legal"]
    assert edited["figures"]["makespan"] == 33
    assert edited["figures"]["peak"] == 5
    first, *_ = moved(0, "0B0", 5)
    replayed = answer("timeline", programs=[program("1f1b", orders=[first, "", "", ""])])
    assert replayed["timelines"]["panels"][0]["figures"] == edited["figures"]
    assert replayed["timelines"]["panels"][0]["before"]["peak"] == 4


def test_a_deadlock_is_its_cycle() -> None:
    orders = moved(0, "0F3", 6)
    edited = answer("edit", program=program("1f1b", orders=orders))
    assert not edited["legal"]
    assert edited["message"].startswith("deadlock: rank 0 waits at 0B1 for 1B1")
    assert edited["cycle"] == [["0B1", "1B1"], ["1F3", "0F3"]]
    for rank, order in enumerate(orders):  # what waits is the first that never starts on its rank
        stalled = order.split(",")[edited["completed"][rank]]
        assert stalled in ("0B1", "1F3", "2F3", "3F3")
    assert edited["starts"][0][edited["completed"][0]] == edited["stalls"]
    panel = answer("timeline", programs=[program("1f1b", orders=orders)])["timelines"]["panels"][0]
    assert panel["line"] == "this order does not run"
    assert panel["cycle"] == edited["cycle"]


def test_an_illegal_order_says_why() -> None:
    edited = answer("edit", program=program("1f1b", orders=moved(3, "3B0", 0)))
    assert edited["message"] == "rank 3 action 0 is 3B0, before 3F0 on the same rank"
    assert edited["cycle"] == []
    early = answer("edit", program=program("zb-h1", orders=moved(1, "1W0", 0, "zb-h1")))
    assert "1W0, before 1I0" in early["message"]
    other = answer("edit", program=program("1f1b", microbatches=6, orders=moved(0, "0B0", 5)))
    assert other["hint"] == "reset the edits"


def test_pairs_that_are_taken_apart_do_not_overlap() -> None:
    program_ = schedule("dualpipe-v", 4, 8)
    first, second = sorted(program_.pairs)[0]
    rank = program_.placement[first.stage]
    at = program_.orders[rank].index(second)
    edited = answer(
        "edit", program=program("dualpipe-v", orders=moved(rank, str(second), at + 1, "dualpipe-v"))
    )
    assert "pair" not in edited.get("message", "")


def test_memory_by_kind_adds_up() -> None:
    costs: dict[str, Any] = {"kept_for_w": 0.25, "activations": 2.0}
    answered = answer("program memory", program=program("zb-h1"), costs=costs)
    assert answered["kinds"] == ["activations", "kept for the weight gradient"]
    timeline = simulate(schedule("zb-h1", 4, 8), Costs(**costs))
    assert answered["peaks"] == pytest.approx(timeline.peak_bytes)
    for curves, live in zip(answered["ranks"], timeline.live_bytes, strict=True):
        for moment in (0.5, 3.5, 7.5, 12.5, 20.5):
            total = sum([value for time, value in curve if time <= moment][-1] for curve in curves)
            assert total == pytest.approx(([0.0] + [value for time, value in live if time <= moment])[-1])
    # in microbatches of a rank, unless sizes are given
    assert answer("program memory", program=program("interleaved"))["peaks"][0] == 5.5
    again = answer("program memory", program=program("gpipe", recompute=True), costs={"inputs": 0.1})
    assert again["kinds"] == ["activations", "inputs kept for recomputation"]
    assert again["peaks"][0] == pytest.approx(1 + 8 * 0.1)


def test_versions_of_the_weights() -> None:
    replayed = answer("timeline", programs=[program("pipedream"), program("1f1b")])
    assert replayed["versions"][1] == ["pipedream", "4", "3", "2", "1"]
    curves = answer("program memory", program=program("pipedream"))["versions"]
    assert [max(count for _, count in curve) for curve in curves] == [4, 3, 2, 1]
    assert answer("program memory", program=program("1f1b"))["versions"] == []


def test_a_name_opens_no_file_and_sizes_have_a_limit() -> None:
    assert "no schedule" in answer("timeline", programs=[program("mine.py:lifo")])["message"]
    assert "no schedule" in answer("timeline", programs=[program("/etc/passwd.csv")])["message"]
    assert "200,000" in answer("timeline", programs=[program("1f1b", 256, 4096)])["message"]
