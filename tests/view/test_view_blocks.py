"""Blocks: lanes for what runs at once, pairs, marks; what ranks hold over time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import schedule, simulate
from stretto.program import Action, ActionKind, names
from stretto.program.memory import peak_held
from stretto.program.replay import Costs
from stretto.program.transforms.activations import offload, recompute
from stretto.view.panel import Phase, TimelineBlock, activation_curves, blocks, panel, peak, stacked, window
from stretto.view.panel_svg import timeline_svg
from stretto.view.terminal import timelines_text

NAMES = [name for name in names() if name != "auto"]


def block(row: int, start: float, end: float) -> TimelineBlock:
    return TimelineBlock(row=row, start=start, end=end, action=Action(0, ActionKind.F, 0))


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(1, 6)).map(
            lambda t: block(t[0], t[1], t[1] + t[2])
        ),
        max_size=30,
    )
)
def test_no_two_blocks_cover_one_another(given_blocks: list[TimelineBlock]) -> None:
    laid_out = stacked(given_blocks)
    assert sorted((b.row, b.start, b.end) for b in laid_out) == sorted(
        (b.row, b.start, b.end) for b in given_blocks
    )
    for at, block in enumerate(laid_out):
        assert 0 <= block.lane < block.lanes
        for other in laid_out[at + 1 :]:
            if block.row == other.row and block.start < other.end and other.start < block.end:
                assert block.lanes == other.lanes
                assert block.lane != other.lane


def test_neighbours_with_rounding_between_them_stay_in_one_lane() -> None:
    laid_out = stacked([block(0, 0.0, 0.1 + 0.2), block(0, 0.3, 0.4)])
    assert [b.lanes for b in laid_out] == [1, 1]


def test_pairs_are_marked_whether_they_run_at_once_or_not() -> None:
    program = schedule("dualpipe-v", 4, 10)
    paired = {action for pair in program.pairs for action in pair}
    assert paired
    for costs, lanes in ((Costs(), 1), (Costs(pair=0.7), 2)):
        drawn = blocks(simulate(program, costs))
        assert {b.action for b in drawn if b.paired} == paired
        assert {b.lanes for b in drawn if b.paired} == {lanes}
        assert {b.lanes for b in drawn if not b.paired} == {1}


def test_updates_are_shown_with_and_without_time() -> None:
    program = schedule("pipedream", 2, 3)
    assert sum(b.is_mark for b in blocks(simulate(program))) == 6
    timed = blocks(simulate(program, Costs(update=0.5)))
    assert sum(b.kind is ActionKind.UPDATE and not b.is_mark for b in timed) == 6


@pytest.mark.parametrize("name", NAMES)
def test_curves_peak_at_the_most_that_is_held(name: str) -> None:
    timeline = simulate(schedule(name, 4, 9))
    program = timeline.program
    each = [program.placement.count(rank) / program.copies for rank in range(4)]
    expected = [most / count for most, count in zip(peak_held(program), each, strict=True)]
    curves = activation_curves(timeline)
    assert [peak(curve) for curve in curves] == pytest.approx(expected)
    for curve in curves:
        times = [time for time, _ in curve]
        assert times == sorted(set(times))
        assert times[-1] == pytest.approx(timeline.makespan)
        assert curve[-1][1] == pytest.approx(0)


def test_curve_of_one_rank_by_hand() -> None:
    curve = activation_curves(simulate(schedule("gpipe", 1, 2)))[0]
    assert curve == ((0.0, 1.0), (1.0, 2.0), (4.0, 1.0), (6.0, 0.0))


def test_recomputed_and_offloaded_activations_are_not_held_in_between() -> None:
    program = schedule("gpipe", 1, 3)
    assert [peak(curve) for curve in activation_curves(simulate(recompute(program)))] == [1]
    moved = offload(program)
    assert [peak(curve) for curve in activation_curves(simulate(moved))] == peak_held(moved)


def test_a_window_has_fill_steady_state_and_drain() -> None:
    line = simulate(schedule("pipedream", 4, 8, steps=3))
    steps = window(line)
    assert steps is not None
    # rank 0 has its first backward after 4 forwards and 6 units of waiting, its last forward before the last
    # 3 backwards and half of one before
    assert steps.phases == (Phase("fill", 0, 10), Phase("steady state", 10, 70), Phase("drain", 70, 81))
    assert steps.steps == (Phase("step 0", 3, 27), Phase("step 1", 27, 51), Phase("step 2", 51, 75))
    # a step's last update goes up through the ranks
    assert steps.ends == ((33, 31, 29, 27), (57, 55, 53, 51))
    assert panel(line).window == steps
    busy = sum(min(b.end, 70) - max(b.start, 10) for b in blocks(line) if b.start < 70 and b.end > 10)
    assert busy == 4 * 60  # no rank waits
    assert window(simulate(schedule("pipedream", 4, 8))) is None
    # too few microbatches for a steady state
    short = window(simulate(schedule("pipedream", 4, 1, steps=2)))
    assert short is not None
    assert [phase.name for phase in short.phases] == ["fill", "drain"]


def test_windows_are_drawn() -> None:
    line = simulate(schedule("pipedream", 4, 8, steps=3))
    svg = timeline_svg(line)
    for name in ("fill", "steady state", "drain", "step 0", "step 2", "end of a step"):
        assert f">{name}</text>" in svg
    assert svg.count('stroke-dasharray="5 3"') == 3  # two ends of steps, one in the legend
    assert "stroke-dasharray" not in timeline_svg(simulate(schedule("pipedream", 4, 8)))
    text = timelines_text([line], width=240, colour=False).plain.splitlines()
    steps, phases = text[4:6]
    assert [part.strip() for part in steps.strip(" |").split("|")] == ["step 0", "step 1", "step 2"]
    assert [part.strip() for part in phases.strip(" |").split("|")] == ["fill", "steady state", "drain"]
    # the end of step 0 stands under the end of 3B7 on the last rank
    assert text[3][: steps.index("|", steps.index("|") + 1)].endswith("F7B7--")
