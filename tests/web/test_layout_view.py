"""The view of layouts: on a page of its own that `stretto layout --html` writes, and as it is typed into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import CommandLine
from stretto import Layout
from stretto.planner.machines.catalogue import find_cluster
from stretto.view.exchanges import Exchange, exchanges
from stretto.view.page import recorded_page
from stretto.web.layouts import layout_record

pytest.importorskip("playwright", reason="Playwright drives the browser")

Open = Callable[..., Any]
LAYOUTS = [
    Layout(),
    Layout(tp=2, dp=2, pp=4),
    Layout(tp=2, cp=2, dp=2, pp=2, order="tp-pp-cp-dp", offset=3),
    Layout(tp=2, cp=2, dp=4, pp=2, ep=4, expert_tp=1),
    Layout(cp=3, pp=4),
]
MORE = ("tp-pp", "tp-cp")
SETTLE = """
  const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const input = document.getElementById('rank');
  const to = async (rank) => { input.value = rank; input.dispatchEvent(new Event('change')); await frame(); };
  const press = async (text) => {
    [...document.querySelectorAll('button')].find((each) => each.textContent === text).click();
    await frame();
  };
"""


def run(tab: Any, script: str) -> Any:
    return tab.evaluate(f"async () => {{ {SETTLE} {script} }}")


@pytest.fixture
def recorded(opened: Open, tmp_path: Path) -> Callable[..., Any]:
    """Opens the page of a layout."""

    def open_layout(
        layout: Layout, node: int = 8, *, cluster: str | None = None, encoder_pp: int = 0, width: int = 1280
    ) -> Any:
        named = find_cluster(cluster) if cluster else None
        shown = exchanges(layout, node, MORE, encoder_pp=encoder_pp)
        record = layout_record(layout, shown, ranks_per_node=node, cluster=named, encoder_pp=encoder_pp)
        path = tmp_path / "layout.html"
        path.write_text(recorded_page("Layout", "layout", {"layout": record}), encoding="utf-8")
        tab = opened(path, width)
        tab.wait_for_selector("#lines li")
        return tab

    return open_layout


READ = """
  const seen = {};
  for (let rank = +input.min; rank <= +input.max; rank++) {
    await to(rank);
    seen[rank] = [...document.querySelectorAll('#rank-panel .group')].map((card) => ({
      axes: card.dataset.axes, members: card.querySelector('.members').textContent,
      number: card.querySelector('h3 span').textContent,
      sends: [...card.querySelectorAll('li')].map((line) => line.textContent),
    }));
  }
  return seen;
"""


def receivers(ranks: list[int], rank: int, to: str) -> list[int]:
    here = ranks.index(rank)
    if to == "others":
        return [other for other in ranks if other != rank]
    if to == "before":
        return [ranks[here - 1]]
    there = here + (1 if to == "next" else -1)
    return ranks[there : there + 1] if there >= 0 else []


def lines(layout: Layout, exchange: Exchange, rank: int, node: int) -> list[str]:
    """The beginnings of a rank's lines in a group: contents, receivers and links."""
    expected = list[str]()
    for send in exchange.sends:
        if send.stages is not None and layout.coordinates(rank)["pp"] not in range(*send.stages):
            continue
        ranks = receivers(layout.group(rank, exchange.axes), rank, send.to)
        here = (rank - layout.offset) // node
        near = [other for other in ranks if (other - layout.offset) // node == here]
        far = [other for other in ranks if other not in near]
        for others, where in ((near, "inside the node"), (far, "between nodes")):
            if others:
                expected.append(f"{send.content} to {', '.join(map(str, others))} {where}")
        if not ranks:
            expected.append(f"{send.content} to none: it has the")
    return expected


@pytest.mark.parametrize(
    ("layout", "node", "encoder_pp"),
    [
        (LAYOUTS[0], 4, 0),
        pytest.param(LAYOUTS[1], 6, 0, marks=pytest.mark.slow),
        (LAYOUTS[2], 4, 0),
        (LAYOUTS[3], 6, 0),
        pytest.param(LAYOUTS[4], 4, 0, marks=pytest.mark.slow),
        (LAYOUTS[4], 6, 2),
    ],
    ids=str,
)
def test_every_rank_has_its_groups_and_messages(
    recorded: Any, layout: Layout, node: int, encoder_pp: int
) -> None:
    seen = run(recorded(layout, node, encoder_pp=encoder_pp), READ)
    shown = exchanges(layout, node, MORE, encoder_pp=encoder_pp)
    assert len(seen) == layout.world
    for rank in range(layout.offset, layout.offset + layout.world):
        cards = seen[str(rank)]
        assert [card["axes"] for card in cards] == [each.axes for each in shown]
        for card, each in zip(cards, shown, strict=True):
            groups = layout.groups(each.axes)
            number = next(n for n, ranks in enumerate(groups) if rank in ranks)
            assert card["members"] == ", ".join(map(str, groups[number]))
            assert card["number"] == f"g{number} of {len(groups)}"
            expected = lines(layout, each, rank, node)
            assert len(card["sends"]) == len(expected) + bool(each.note)
            for line, start in zip(card["sends"], expected, strict=False):
                assert line.startswith(start)


def test_each_stage_of_an_encoder_and_a_decoder_sends_its_own(recorded: Any) -> None:
    tab = recorded(Layout(tp=2, pp=4), encoder_pp=2)
    seen = run(tab, READ)
    sends = [[line.partition(" to ")[0] for line in seen[str(rank)][1]["sends"]] for rank in range(0, 8, 2)]
    encoder, decoder = "activations of the encoder", "activations of the decoder, and the memory"
    back = "gradients of the encoder's activations"
    assert sends[:2] == [[encoder, back]] * 2
    assert sends[2] == [decoder, back]
    assert sends[3] == [decoder, "gradients of the decoder's activations and of the memory"]
    assert "encoder: stages 0 to 1" in tab.locator(".legend").inner_text()
    assert tab.locator("#rank-panel > p.quiet").inner_text().startswith("stage 3 of 4 (pp, decoder)")


def test_the_command_writes_the_page(opened: Open, stretto: CommandLine, tmp_path: Path) -> None:
    """With the names of the cluster's links, in one file that loads nothing."""
    path = tmp_path / "page.html"
    stretto("layout", "--world", 16, "--tp", 8, "--cluster", "dgx-h100", "--html", path)
    tab = opened(path)
    tab.get_by_label("rank", exact=True).fill("3")
    tab.get_by_label("rank", exact=True).press("Enter")
    tab.get_by_role("heading", name="Rank 3").wait_for()
    panel = tab.locator("#rank-panel").inner_text()
    assert "to 0, 1, 2, 4, 5, 6, 7 inside the node (NVLink 4, 450 GB/s)" in panel
    assert "to 11 between nodes (InfiniBand NDR, 50 GB/s)" in panel
    assert tab.title() == "Layout tp8 dp2"


STEPS = """
  const tick = async (axis) => {
    document.querySelector(`#axes input[data-axis="${axis}"]`).click();
    await frame();
  };
  const texts = () => [...document.querySelectorAll('#lines li')].map((line) => line.textContent);
  await to(13);
  await tick('pp'); // tp is ticked at first
  const before = texts();
  await press('Next'); await press('Next'); await press('Back');
  const after = texts();
  await press('All');
  const every = texts();
  await tick('tp'); await tick('dp'); // all shown stays all shown
  return {before, after, every, other: texts(),
          table: [...document.querySelectorAll('#axes tbody tr')].map((row) =>
            [...row.cells].map((cell) => cell.textContent))};
"""


def test_strides_and_masks_are_counted_in_steps(recorded: Any) -> None:
    """tp2 dp2 pp4 over 16 ranks: strides 1, 2, 4."""
    layout = Layout(tp=2, dp=2, pp=4)
    seen = run(recorded(layout), STEPS)
    assert seen["table"] == [
        ["tp", "2", "1", "1", "False"],
        ["dp", "2", "2", "0", "True"],
        ["pp", "4", "4", "3", "True"],
    ]
    assert len(seen["before"]) == 1
    assert len(seen["after"]) == 2
    assert seen["after"][1] == "The stride of dp is that of tp times its size: 1 × 2 = 2."
    text = seen["every"]
    assert text[:2] == seen["after"]
    assert text[3:6] == [
        "tp of rank 13 = 13 // 1 % 2 = 1.",
        "dp of rank 13 = 13 // 2 % 2 = 0.",
        "pp of rank 13 = 13 // 4 % 4 = 3.",
    ]
    assert text[6].startswith("Mask [True, False, True] over [tp, dp, pp]: tp, pp vary inside a group")
    assert "2 × 4 = 8 ranks" in text[6]
    assert text[8].startswith("That group begins at 0 × 2 = 0:")
    group = layout.group(13, "tp-pp")
    counted = [int(line.rstrip(".").rpartition(" = ")[2]) for line in text if line.startswith("Member")]
    assert counted == group
    assert text[9 + 5] == "Member 5: 5 counted out over tp, pp is tp 1, pp 2; rank 0 + 1 × 1 + 2 × 4 = 9."
    assert text[-1] == f"The group of rank 13 is [{', '.join(map(str, group))}]."
    assert seen["other"][-1] == f"The group of rank 13 is [{', '.join(map(str, layout.group(13, 'dp-pp')))}]."


def test_ranks_of_experts_are_counted_over_their_own_axes(recorded: Any) -> None:
    layout = Layout(tp=2, cp=2, dp=4, pp=2, ep=4, expert_tp=1)
    tab = recorded(layout)
    tab.get_by_role("button", name="ranks of expert layers").click()
    tab.get_by_role("button", name="All").click()
    toolbar = tab.get_by_role("toolbar", name="Groups")
    for axes in ("ep", "expert_dp", "tp", "cp-dp", "pp"):
        toolbar.get_by_role("button", name=axes, exact=True).click()
        group = f"The group of rank 0 is [{', '.join(map(str, layout.group(0, axes)))}]."
        tab.locator("#lines li:last-child", has_text=group).wait_for()


def test_ranks_are_chosen_by_pointer_and_keys(recorded: Any) -> None:
    tab = recorded(Layout(tp=2, dp=2, pp=4))
    canvas = tab.locator("canvas[tabindex]")
    box = canvas.bounding_box()
    heading = tab.locator("#rank-panel h2")

    def click(x: float, y: float) -> str:
        tab.mouse.click(box["x"] + x, box["y"] + y)
        run(tab, "await frame();")
        return heading.inner_text()

    # the second rank of each node, and beside all ranks
    places = [(100, 38), (100, box["height"] - 30), (box["width"] - 2, box["height"] - 2)]
    assert [click(*place) for place in places] == ["Rank 1", "Rank 9", "Rank 9"]
    seen = list[str]()
    for key in ("ArrowRight", "ArrowDown", "ArrowUp", "Home", "ArrowLeft", "End"):
        canvas.press(key)
        run(tab, "await frame();")
        seen.append(heading.inner_text())
    assert seen == ["Rank 10", "Rank 15", "Rank 7", "Rank 0", "Rank 0", "Rank 15"]
    tab.mouse.move(box["x"] + 100, box["y"] + 38)
    assert tab.get_by_role("tooltip").inner_text().split("\n") == ["rank 1", "node 0, p0 t1 d0"]


@pytest.mark.parametrize(("dp", "left_out"), [(128, False), (8000, True)])
def test_thousands_of_ranks_stay_usable(recorded: Any, dp: int, left_out: bool) -> None:
    layout = Layout(tp=8, dp=dp, pp=16)
    tab = recorded(layout)
    seen = run(
        tab,
        """
        const canvas = document.querySelector('canvas[tabindex]');
        canvas.focus();
        canvas.dispatchEvent(new KeyboardEvent('keydown', {key: 'End', bubbles: true}));
        await frame();
        return {note: document.getElementById('left')?.textContent ?? '',
                rank: document.querySelector('#rank-panel h2').textContent,
                members: document.querySelectorAll('#rank-panel .members')[1].textContent,
                high: canvas.clientHeight, scrolled: document.querySelector('.scroll').scrollTop,
                wide: document.documentElement.scrollWidth <= document.documentElement.clientWidth};
        """,
    )
    assert seen["rank"] == f"Rank {layout.world - 1}"
    assert seen["members"].endswith(f"... {layout.world - 1} ({dp:,} ranks)")
    assert ("can be chosen by their number" in seen["note"]) == left_out
    assert seen["high"] <= 12_100
    assert (seen["scrolled"] > 1000) != left_out  # the last rank is brought into view where it is drawn
    assert seen["wide"]


def test_a_narrow_window_wraps_the_ranks_of_a_node(recorded: Any) -> None:
    tab = recorded(Layout(tp=2, cp=2, dp=4, pp=2, ep=4), width=400)
    assert tab.locator("canvas[tabindex]").bounding_box()["height"] > 4 * 4 * 40  # 4 nodes, 4 lines or more
    assert run(tab, "return document.documentElement.scrollWidth <= document.documentElement.clientWidth;")


# ------------------------------------------------------------------ a person types


def test_a_layout_is_typed_and_an_illegal_one_has_its_nearest_fix(opened: Open, page_address: str) -> None:
    tab = opened(f"{page_address}#layout?cluster=dgx-h100&model=mixtral-8x7b")
    tab.get_by_text("tp2 dp2 pp4: 16 ranks on 2 nodes of 8").wait_for()
    tab.get_by_label("expert parallel (ep)").fill("3")
    tab.get_by_label("expert parallel (ep)").press("Enter")
    problem = tab.get_by_role("alert").first
    problem.wait_for()
    assert "ep=3 with expert_tp=2 does not divide the 4 ranks" in problem.inner_text()
    assert "the nearest ep is 2" in problem.inner_text()
    tab.get_by_label("expert parallel (ep)").fill("2")
    tab.get_by_label("expert parallel (ep)").press("Enter")
    tab.get_by_role("toolbar", name="Groups").get_by_role("button", name="ep", exact=True).wait_for()
    assert "ep=2" in tab.evaluate("location.hash")


def test_what_is_being_typed_stays_when_the_view_is_drawn_anew(opened: Open, page_address: str) -> None:
    tab = opened(f"{page_address}#layout?cluster=dgx-h100&model=mixtral-8x7b")
    tab.get_by_text("tp2 dp2 pp4: 16 ranks on 2 nodes of 8").wait_for()
    tab.get_by_label("expert parallel (ep)").fill("2")
    tab.evaluate("location.hash += '&rank=5'")
    tab.get_by_text("rank 5", exact=False).first.wait_for()
    assert tab.get_by_label("rank", exact=True).input_value() == "5"
    assert tab.get_by_label("expert parallel (ep)").input_value() == "2"
    tab.get_by_label("expert parallel (ep)").press("Enter")
    tab.get_by_role("toolbar", name="Groups").get_by_role("button", name="ep", exact=True).wait_for()
    tab.get_by_label("Model", exact=True).fill("llama3-8b")
    tab.evaluate("location.hash = location.hash.replace('rank=5', 'rank=6')")
    tab.wait_for_function("document.getElementById('rank').value === '6'")
    assert tab.get_by_label("Model", exact=True).input_value() == "llama3-8b"


def test_what_a_rank_sends_is_what_the_dry_run_counts(opened: Open, page_address: str) -> None:
    tab = opened(f"{page_address}#layout?tp=8&dp=2&pp=2&model=llama3-8b&seq=8192&rank=9")
    table = tab.get_by_role("region", name="Messages, most bytes first")
    table.wait_for()
    rows = [row.inner_text().split("\t") for row in table.locator("tbody tr").all()]
    # 16 microbatches of 8192 positions x 4096 features in 16 bits, an eighth of them
    onward = next(row for row in rows if row[2] == "activations to the next stage")
    assert onward[:2] + onward[3:6] == ["128 MiB", "16", "send", "pp", "25"]
    gradients = next(row for row in rows if row[2] == "gradients")
    assert gradients[3:6] == ["reduce-scatter", "cp-dp", "1"]
    assert gradients[6] == "between nodes (InfiniBand NDR, 50 GB/s)"
    inside = next(row for row in rows if row[2] == "gradients of activations")
    assert inside[6] == "inside the node (NVLink 4, 450 GB/s)"


def test_a_weight_is_chosen_and_its_part_is_drawn(opened: Open, page_address: str) -> None:
    tab = opened(f"{page_address}#layout?tp=4&dp=4&pp=1&model=llama3-8b&rank=6&zero=3")
    tab.get_by_label("weight", exact=True).select_option("mlp.down.weight")
    text = tab.locator("#weight-text", has_text="[4096, 14336]")
    text.wait_for()
    # rank 6: tp 2 of 4, which has the third quarter of the columns
    assert "[4096, 3584] on rank 6: all rows × columns 7168–10751" in text.inner_text()
    states = tab.locator("[data-mode=zero3] [data-kind=weight]")
    assert "over 4 ranks" in states.inner_text()
    tab.get_by_label("activation", exact=True).select_option("heads")
    tab.locator("#activation-text", has_text="columns 2048–3071").wait_for()
    assert "activation=heads" in tab.evaluate("location.hash")


def test_the_view_speaks_chinese(opened: Open, page_address: str) -> None:
    tab = opened(f"{page_address}#layout", locale="zh-CN")
    tab.locator("#cuts .mode").first.wait_for()
    text = tab.locator("main").inner_text()
    assert "张量并行 (tp)" in text
    assert "全部步骤" in text
    for english in ("gradients of activations", "optimiser states", "varies fastest", "inside the node"):
        assert english not in text, english
