"""The page of a layout in a browser: groups, messages and links of every rank, and the rank arithmetic."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from browser import Browser
from stretto import Layout
from stretto.planner.machines.catalogue import find_cluster
from stretto.view.exchanges import Exchange, exchanges
from stretto.view.layout_page import layout_page

LAYOUTS = [
    Layout(),
    Layout(tp=2, dp=2, pp=4),
    Layout(tp=2, cp=2, dp=2, pp=2, order="tp-pp-cp-dp", offset=3),
    Layout(tp=2, cp=2, dp=4, pp=2, ep=4, expert_tp=1),
    Layout(cp=3, pp=4),
]
MORE = ("tp-pp", "tp-cp")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


def page(layout: Layout, node: int = 8, *, cluster: str | None = None, encoder_pp: int = 0) -> str:
    named = find_cluster(cluster) if cluster else None
    shown = exchanges(layout, node, MORE, encoder_pp=encoder_pp)
    return layout_page(layout, shown, ranks_per_node=node, cluster=named, encoder_pp=encoder_pp)


READ = """
    const seen = {}, input = document.getElementById('rank');
    for (let rank = +input.min; rank <= +input.max; rank++) {
      input.value = rank;
      input.dispatchEvent(new Event('change'));
      seen[rank] = [...document.querySelectorAll('#facts .group')].map((card) => ({
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
    """Return the expected text of a rank's messages in a group: contents, receivers and links."""
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
    [*((layout, node, 0) for layout in LAYOUTS for node in (4, 6)), (LAYOUTS[1], 4, 1), (LAYOUTS[4], 6, 2)],
    ids=str,
)
def test_every_rank_has_its_groups_and_messages(
    browser: Browser, layout: Layout, node: int, encoder_pp: int
) -> None:
    seen = browser.opened(page(layout, node, encoder_pp=encoder_pp), READ)
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


def test_each_stage_of_an_encoder_and_a_decoder_sends_its_own(browser: Browser) -> None:
    layout = Layout(tp=2, pp=4)
    text = page(layout, encoder_pp=2)
    seen = browser.opened(text, READ)
    sends = [[line.partition(" to ")[0] for line in seen[str(rank)][1]["sends"]] for rank in range(0, 8, 2)]
    encoder, decoder = "activations of the encoder", "activations of the decoder, and the memory"
    back = "gradients of the encoder's activations"
    assert sends[:2] == [[encoder, back]] * 2
    assert sends[2] == [decoder, back]
    assert sends[3] == [decoder, "gradients of the decoder's activations and of the memory"]
    assert "encoder: stages 0 to 1" in text
    seats = browser.opened(text, "return document.querySelector('#facts p.quiet').textContent;")
    assert seats.startswith("stage 0 of 4 (pp, encoder)")


def test_links_have_the_cluster_s_names(browser: Browser) -> None:
    layout = Layout(tp=8, dp=2)
    seen = browser.opened(page(layout, cluster="dgx-h100"), READ)
    tp, dp = seen["3"][0], seen["3"][1]
    assert "inside the node (NVLink 4, 450 GB/s)" in tp["sends"][0]
    assert "to 11 between nodes (InfiniBand NDR, 50 GB/s)" in dp["sends"][0]


STEPS = """
    const press = (id) => document.getElementById(id).click();
    const tick = (axis) => document.querySelector(`#axes input[data-axis="${axis}"]`).click();
    const input = document.getElementById('rank');
    input.value = 13; input.dispatchEvent(new Event('change'));
    const texts = () => [...document.querySelectorAll('#lines li')].map((line) => line.textContent);
    const steps = [document.getElementById('step').textContent];
    tick('pp'); // tp is ticked at first
    const before = texts();
    press('next'); press('next'); press('back');
    const after = texts();
    press('end');
    const every = texts();
    tick('tp'); tick('dp'); // all shown stays all shown
    return {steps, before, after, every, other: texts(),
            table: [...document.querySelectorAll('#axes tbody tr')].map((row) =>
              [...row.cells].map((cell) => cell.textContent)),
            axes: document.querySelector('.chart').dataset.axes};
"""


def test_strides_and_masks_are_counted_in_steps(browser: Browser) -> None:
    """tp2 dp2 pp4 over 16 ranks: strides 1, 2, 4."""
    layout = Layout(tp=2, dp=2, pp=4)
    seen = browser.opened(page(layout), STEPS)
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
    assert text[-1] == f"The group of rank 13 is {group}."
    assert seen["other"][-1] == f"The group of rank 13 is {layout.group(13, 'dp-pp')}."
    assert sorted(seen["axes"].split("-")) == ["dp", "pp"]


EXPERTS = """
    const kinds = [...document.querySelectorAll('#kinds button')];
    kinds[1].click(); document.getElementById('end').click();
    const last = () => document.querySelector('#lines li:last-child').textContent;
    const seen = {};
    for (const button of document.querySelectorAll('#choices button')) {
      button.click();
      if (button.getAttribute('aria-pressed') === 'true') seen[button.textContent] = last();
    }
    return {seen, kinds: kinds.map((button) => button.textContent)};
"""


def test_ranks_of_experts_are_counted_over_their_own_axes(browser: Browser) -> None:
    layout = Layout(tp=2, cp=2, dp=4, pp=2, ep=4, expert_tp=1)
    seen = browser.opened(page(layout), EXPERTS)
    assert seen["kinds"] == ["ranks of dense layers", "ranks of expert layers"]
    for axes in ("ep", "expert_dp", "tp", "cp-dp", "pp"):
        assert seen["seen"][axes] == f"The group of rank 0 is {layout.group(0, axes)}."


HANDS = """
    await frame();
    const facts = () => document.querySelector('#facts h2').textContent;
    const click = (x, y) => canvas().dispatchEvent(new MouseEvent('click', at(x, y)));
    const seen = [facts()];
    const wide = canvas().clientWidth, high = canvas().clientHeight;
    // the second rank of each node, and beside all ranks
    for (const [x, y] of [[100, 38], [100, high - 30], [wide - 2, high - 2]]) {
      click(x, y);
      seen.push(facts());
    }
    for (const name of ['ArrowRight', 'ArrowDown', 'ArrowUp', 'Home', 'ArrowLeft', 'End']) {
      key(name);
      seen.push(facts());
    }
    pointer('pointermove', 100, 38);
    seen.push(tipText().split('\\n'));
    const first = getComputedStyle(document.body).backgroundColor;
    document.getElementById('theme').click();
    await frame();
    seen.push([first, getComputedStyle(document.body).backgroundColor]);
    return seen;
"""


def test_ranks_are_chosen_by_pointer_and_keys(browser: Browser) -> None:
    seen = browser.opened(page(Layout(tp=2, dp=2, pp=4)), HANDS)
    assert seen[:4] == ["Rank 0", "Rank 1", "Rank 9", "Rank 9"]  # at last beside all cells
    assert seen[4:10] == ["Rank 10", "Rank 15", "Rank 7", "Rank 0", "Rank 0", "Rank 15"]
    assert seen[10] == ["rank 1", "node 0, p0 t1 d0"]
    assert seen[11] == ["rgb(255, 255, 255)", "rgb(13, 17, 23)"]


LARGE = """
    await frame();
    const input = document.getElementById('rank');
    input.value = input.max; input.dispatchEvent(new Event('change'));
    const note = document.getElementById('left');
    return {note: note.hidden ? '' : note.textContent, rank: document.querySelector('#facts h2').textContent,
            members: document.querySelector('#facts .group:nth-of-type(2) .members').textContent,
            high: canvas().clientHeight, scrolled: document.querySelector('.scroll').scrollTop,
            wide: document.documentElement.scrollWidth <= document.documentElement.clientWidth};
"""


@pytest.mark.parametrize(("dp", "left_out"), [(128, False), (8000, True)])
def test_thousands_of_ranks_stay_usable(browser: Browser, dp: int, left_out: bool) -> None:
    layout = Layout(tp=8, dp=dp, pp=16)
    text = page(layout)
    assert len(text) < 60_000
    seen = browser.opened(text, LARGE)
    assert seen["rank"] == f"Rank {layout.world - 1}"
    assert seen["members"].endswith(f"... {layout.world - 1} ({dp:,} ranks)")
    assert ("can be chosen by their number" in seen["note"]) == left_out
    assert seen["high"] <= 12_100
    assert (seen["scrolled"] > 1000) != left_out  # the last rank is brought into view where it is drawn
    assert seen["wide"]


def test_a_narrow_window_wraps_the_ranks_of_a_node(browser: Browser) -> None:
    script = """
        document.body.style.width = '360px';
        document.querySelector('.sides').style.gridTemplateColumns = 'minmax(0, 1fr)';
        dispatchEvent(new Event('resize'));
        await frame();
        const red = (x, y) => pixel(x, y).slice(0, 3).join() === '207,34,46'; // round the chosen rank
        const near = (x, y, step) => [...Array(45).keys()].some((i) => red(x, y + step * (i - 4)));
        const chosen = new Set(), astray = [];
        for (let y = 0; y < canvas().clientHeight; y += 13) {
          key('End'); // the last rank is in another column
          canvas().dispatchEvent(new MouseEvent('click', at(60, y)));
          const rank = +document.querySelector('.chart').dataset.rank;
          if (rank === 31) continue; // between two nodes
          chosen.add(rank);
          if (!near(60, y, 1) || !near(60, y, -1)) astray.push([rank, y]);
        }
        return [canvas().clientWidth, canvas().clientHeight, [...chosen], astray];
    """
    layout = Layout(tp=2, cp=2, dp=4, pp=2, ep=4)
    wide, high, chosen, astray = browser.opened(page(layout), script)
    assert wide <= 360
    assert high > 4 * 4 * 40  # four nodes, at least four lines each
    assert chosen == list(range(0, 32, 2))
    assert not astray  # the mark is round the rank that was hit


def test_the_page_is_one_file_that_loads_nothing() -> None:
    text = page(Layout(tp=2, pp=2), cluster="dgx-h100")
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|https?://|import\s*\(|fetch\(|XMLHttp""", text)
    assert "{{" not in text
    assert "<title>Layout tp2 pp2</title>" in text
