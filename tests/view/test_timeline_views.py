"""Timelines in the terminal and as SVG show the replay."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from stretto import schedule, simulate
from stretto.program import Program, lower, names
from stretto.program.replay import Costs, Timeline
from stretto.view import panel as drawn
from stretto.view.panel_svg import compare_svg, timeline_svg
from stretto.view.terminal import timelines_text

SVG = "{http://www.w3.org/2000/svg}"


def replay(name: str, ranks: int, microbatches: int, costs: Costs | None = None, **more: int) -> Timeline:
    return simulate(schedule(name, ranks, microbatches, **more), costs or Costs())


def rows(timeline: Timeline, width: int = 120) -> list[str]:
    return timelines_text([timeline], width=width, colour=False).plain.splitlines()


def test_plain_rows_of_1f1b() -> None:
    shown = rows(replay("1f1b", 2, 3))
    assert shown[0] == "rank 0  F0-F1-······B0----F2-B1----···B2----"
    assert shown[1] == "rank 1  ···F0-B0----F1-B1----F2-B2----······"
    assert shown[2].split() == ["0", "5", "10"]
    assert "F forward" in shown[3]
    assert "idle" in shown[3]


def test_a_rank_with_several_stages_names_the_stage() -> None:
    assert "0F0-" in rows(replay("interleaved", 2, 4, chunks=2))[0]
    assert "2F0-" in rows(replay("interleaved", 2, 4, chunks=2))[0]


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (4, 8), (8, 64), (3, 200)])
def test_rows_fit_the_width(width: int, colour: bool, ranks: int, microbatches: int) -> None:
    timeline = replay("1f1b", ranks, microbatches, Costs(F=0.7, I=1.1, W=0.9, hop=0.1))
    text = timelines_text([timeline], width=width, colour=colour)
    lines = text.plain.splitlines()[:ranks]
    assert all(len(line) <= width for line in lines)
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipe"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 32), (16, 64)])
def test_in_80_columns_every_column_has_the_action_of_its_time(
    name: str, ranks: int, microbatches: int
) -> None:
    timeline = replay(name, ranks, microbatches)
    lines = rows(timeline, width=80)
    cells = [line[len(f"rank {ranks - 1}") + 2 :] for line in lines[:ranks]]
    assert all(len(line) <= 80 for line in lines)
    ends = timeline.makespan
    if cut := re.fullmatch(r" +⋯ leaves out (\S+) to (\S+) \(--from, --to\); 1 column = (\S+)", lines[-1]):
        stop, start, column = map(float, cut.groups())
        assert {len(line) for line in lines[:ranks]} == {80}
        times = [(i + 0.5) * column for i in range(cells[0].index("⋯"))]
        assert times[-1] + column / 2 == stop
        times += [0.0] + [start + (i + 0.5) * column for i in range(len(cells[0]) - len(times) - 1)]
        assert times[-1] + column / 2 == ends
    else:
        assert "idle" in lines[-1]
        times = [(i + 0.5) * ends / len(cells[0]) for i in range(len(cells[0]))]
    for rank, row in enumerate(cells):
        events = [e for e in timeline.events if e.rank == rank and e.action.kind.is_compute]
        for time, cell in zip(times, row, strict=True):
            if time:  # a label may be longer than a letter: its first column is enough
                at = [e for e in events if e.start < time < e.end]
                assert (cell == "·") == (not at)
                assert cell == str(at[0].action.kind) if cell in "FBIW" else True
    assert ("⋯" in cells[0]) == (ranks > 4)


def test_a_part_of_a_timeline() -> None:
    timeline = replay("1f1b", 2, 3)
    part = timelines_text([timeline], width=120, colour=False, start=3, end=9).plain.splitlines()
    full = rows(timeline)
    assert part[0][8:] == full[0][8 + 9 : 8 + 27]
    assert part[1][8:] == "B0-" + full[1][8 + 9 + 3 : 8 + 27]  # the second half of a block has its name
    assert part[2].split() == ["3", "5"]


def test_actions_without_a_column_are_counted() -> None:
    costs = Costs(per_stage=((1, 1, 1),) * 3 + ((0.01, 0.01, 0.01),))
    lines = rows(replay("gpipe", 4, 1, costs), width=30)
    assert lines[-1].strip() == "2 actions shorter than half a column, not drawn"
    assert lines[-2].strip() == "1 column = 0.4105, edges rounded"
    assert lines[3].split()[-1] == "·" * 22


def test_colours_mark_kinds() -> None:
    timeline = replay("1f1b", 2, 12)
    out = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200)
    out.print(timelines_text([timeline], width=200, colour=True))
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert len(set(re.findall(r"48;2;(\d+;\d+;\d+)", shown))) == 4  # two kinds, each in two shades
    assert all(f"{number}" in shown for number in range(12))


def rows_of(svg: str) -> list[ET.Element]:
    """The groups of the rows, one under another."""
    return [each for each in ET.fromstring(svg).iter(f"{SVG}g") if each.get("transform")]


def blocks_of(row: ET.Element) -> list[ET.Element]:
    return [each for each in row.iter(f"{SVG}rect") if each.get("fill", "").startswith("#")]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "hanayo", "forward-only"])
def test_svg_has_a_block_an_action_at_its_time(name: str) -> None:
    timeline = replay(name, 4, 8)
    shown = rows_of(timeline_svg(timeline))
    assert len(shown) == 4
    scale = max(920 / timeline.makespan, 15 / min(e.end - e.start for e in timeline.events))
    for rank, row in enumerate(shown):
        assert row.get("transform") == f"translate(72 {62 + rank * 54})"
        events = [e for e in timeline.events if e.rank == rank and e.action.kind.is_compute]
        drawn = blocks_of(row)
        assert len(drawn) == len(events) > 0
        for event, block in zip(events, drawn, strict=True):
            assert float(block.get("x", "")) == pytest.approx(event.start * scale, abs=0.01)
            assert float(block.get("width", "")) == pytest.approx(
                (event.end - event.start) * scale - 1, abs=0.01
            )
        numbers = ["".join(each.itertext()) for each in row.find(f"{SVG}g") or ()]
        assert numbers == [str(event.action.microbatch) for event in events]


def test_svg_has_a_memory_curve_a_rank() -> None:
    timeline = replay("1f1b", 4, 8)
    tops: list[float] = []
    for row in rows_of(timeline_svg(timeline)):
        curve = next(each for each in row.iter(f"{SVG}path") if each.get("class") == "held")
        heights = [float(v) for v in re.findall(r"V([\d.]+)", curve.get("d", ""))]
        tops.append(max(heights) - min(heights))
    # 16 pixels for the most that any rank holds
    assert tops == pytest.approx([16 * peak / 4 for peak in timeline.peak_activations])


def test_overlapped_pairs_share_the_height_of_their_row() -> None:
    timeline = replay("dualpipe-v", 2, 6, Costs(pair=0.8))
    halves = [block for row in rows_of(timeline_svg(timeline)) for block in blocks_of(row)]
    pairs = len(timeline.program.pairs)
    assert pairs > 0
    assert [float(each.get("height", "")) for each in halves].count(13.0) == 2 * pairs


def test_updates_within_the_step_are_marks() -> None:
    svg = timeline_svg(replay("pipedream", 2, 4))
    marks = [each for each in ET.fromstring(svg).iter(f"{SVG}path") if each.get("class") == "mark"]
    assert len(marks) == 2 * 4


def test_comparison_lays_all_on_one_axis() -> None:
    both = [replay("gpipe", 2, 4), replay("naive", 2, 4)]
    svg = compare_svg(both)
    texts = ["".join(each.itertext()) for each in ET.fromstring(svg).iter(f"{SVG}text")]
    assert ("gpipe" in texts, "naive" in texts, texts.count("time")) == (True, True, 1)
    grounds = [
        each for row in rows_of(svg) for each in row.iter(f"{SVG}rect") if each.get("fill") == "url(#hatch)"
    ]
    widths = [float(each.get("width", "")) for each in grounds]
    assert widths == pytest.approx([920 * each.makespan / both[1].makespan for each in both for _ in (0, 1)])
    assert texts[texts.index("schedule") :][: 3 * 5] == [
        *("schedule", "makespan", "bubble", "peak activations", "transfers"),
        *("gpipe", "15", "20.0%", "4", "8"),
        *("naive", "24", "50.0%", "1", "8"),
    ]


def test_terminal_compares_on_one_axis() -> None:
    text = timelines_text([replay("gpipe", 2, 4), replay("naive", 2, 4)], width=60, colour=False).plain
    lines = text.splitlines()
    assert lines[0].startswith("gpipe: 2 ranks")
    assert lines[1] == "rank 0  F0F1F2F3······B0--B1--B2--B3--"
    assert len(lines[1]) == 8 + 15 * 2
    assert len(lines[5]) == 8 + 24 * 2


@pytest.mark.parametrize("name", list(names()))
def test_every_schedule_is_drawn(name: str) -> None:
    timeline = replay(name, 4, 8) if name != "auto" else replay("1f1b", 4, 8)
    shown = rows(timeline, width=400)
    compute = sum(event.action.kind.is_compute for event in timeline.events)
    assert len(re.findall(r"[FBIW]\d", "".join(shown[:4]))) == compute
    assert len(timeline_svg(timeline)) < 60_000


def test_svg_has_the_figures_and_dark_colours() -> None:
    svg = timeline_svg(replay("1f1b", 4, 8))
    texts = ["".join(each.itertext()) for each in ET.fromstring(svg).iter(f"{SVG}text")]
    assert "1f1b" in texts
    assert "4 ranks, 8 microbatches: makespan 33, bubble 27.3% at F = I = W = 1" in texts
    assert [text for text in texts if text.startswith("rank")] == [f"rank {rank}" for rank in range(4)]
    assert "prefers-color-scheme: dark" in svg
    assert "bubble" in texts


def test_communications_are_no_blocks() -> None:
    program = lower(schedule("1f1b", 2, 2))
    assert len(drawn.blocks(simulate(program, Costs(hop=1)))) == 8


def test_svg_escapes_names() -> None:
    program = schedule("gpipe", 2, 2)
    named = Program(
        name='a<b>&"c"', placement=program.placement, microbatches=program.microbatches, orders=program.orders
    )
    assert ET.fromstring(timeline_svg(simulate(named))).find(f"{SVG}text").text == 'a<b>&"c"'  # type: ignore[union-attr]


def test_a_long_timeline_stays_within_bounds() -> None:
    root = ET.fromstring(timeline_svg(replay("1f1b", 2, 300)))
    assert 2000 < float(root.get("width", "")) <= 6200


@pytest.mark.parametrize(
    ("end", "most", "expected"),
    [(33, 13, [0, 5, 10, 15, 20, 25, 30]), (1, 4, [0, 0.5, 1]), (0, 4, [0]), (0.3, 3, [0, 0.1, 0.2, 0.3])],
)
def test_ticks_are_round(end: float, most: int, expected: list[float]) -> None:
    assert drawn.ticks(end, most) == pytest.approx(expected)
