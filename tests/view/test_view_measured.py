"""Predicted and measured steps side by side."""

from __future__ import annotations

import pytest

from stretto import schedule, simulate
from stretto.errors import StrettoError
from stretto.program import ActionKind, lower
from stretto.program.replay import Costs
from stretto.view.measured import (
    StepPart,
    compare,
    measured_html,
    measured_panel,
    measured_table,
    measured_text,
    parts_table,
    seconds,
)
from stretto.view.trace import TraceEvent, trace_of

PROGRAM = lower(schedule("interleaved", 2, 4))


def events(costs: Costs, later: float = 0.0) -> list[TraceEvent]:
    recorded = trace_of(simulate(PROGRAM, costs)).events
    return [event._replace(start=event.start + later, end=event.end + later) for event in recorded]


PREDICTED = events(Costs())
MEASURED = [*events(Costs(F=1.5), later=7.0), TraceEvent(0, "optimizer", 8.0, 8.5)]


def test_differences_by_kind() -> None:
    comparison = compare(PREDICTED, MEASURED)
    kinds = {each.kind: each for each in comparison.kinds}
    assert (kinds[ActionKind.F].count, kinds[ActionKind.B].count) == (16, 16)
    # a stage of two a rank, half a cost of 1 ms
    assert kinds[ActionKind.F].predicted_mean == pytest.approx(0.5e-3)
    assert kinds[ActionKind.F].measured_mean == pytest.approx(0.75e-3)
    assert kinds[ActionKind.F].relative == pytest.approx(0.5)
    assert kinds[ActionKind.F].measured == pytest.approx(16 * 0.75e-3)
    assert kinds[ActionKind.B].relative == pytest.approx(0)
    assert comparison.predicted_step == pytest.approx(simulate(PROGRAM).makespan / 1e3)
    assert comparison.measured_step == pytest.approx(simulate(PROGRAM, Costs(F=1.5)).makespan / 1e3)


def test_the_table_in_words() -> None:
    table = measured_table(compare(PREDICTED, MEASURED))
    assert table[1] == ("F forward", "16", "500 us", "750 us", "+50.0%", "8 ms", "12 ms")
    assert table[-1][0] == "first to last"
    lines = measured_text(compare(PREDICTED, MEASURED)).splitlines()
    assert lines[0].split()[:2] == ["action", "count"]
    assert len(lines) == len(table)


def test_parts_add_up_to_the_step_but_for_those_within_others() -> None:
    parts = [
        StepPart("forward", 0.2, 0.1),
        StepPart("backward", 0.4, 0.3),
        StepPart("of it recompute", 0.1, None, within=True),
        StepPart("everything else", None, 0.1),
    ]
    assert parts_table(parts) == [
        ("part of the step", "predicted", "measured", "difference", "of the step"),
        ("forward", "200 ms", "100 ms", "-50.0%", "20.0%"),
        ("backward", "400 ms", "300 ms", "-25.0%", "60.0%"),
        ("  of it recompute", "100 ms", "", "", ""),
        ("everything else", "", "100 ms", "", "20.0%"),
        ("step", "600 ms", "500 ms", "-16.7%", "100.0%"),
    ]


def test_without_a_prediction_parts_are_measured_only() -> None:
    assert parts_table([StepPart("forward", None, 0.1)])[-1] == ("step", "", "100 ms", "", "100.0%")


def test_communications_count_where_both_have_them() -> None:
    only = [event for event in MEASURED if "SEND" not in event.action]
    kinds = {each.kind for each in compare(PREDICTED, only).kinds}
    assert ActionKind.RECV_F in kinds
    assert not {ActionKind.SEND_F, ActionKind.SEND_B} & kinds


def test_another_program_is_refused() -> None:
    without = [event for event in MEASURED if event.action != "2B1"]
    with pytest.raises(StrettoError, match="rank 0 action 2B1 is not in the measured timeline"):
        compare(PREDICTED, without)
    with pytest.raises(StrettoError, match="rank 0 action 2B1 is not in the predicted timeline"):
        compare(without, MEASURED)
    with pytest.raises(StrettoError, match="twice in the measured"):
        compare(PREDICTED, MEASURED + MEASURED)
    with pytest.raises(StrettoError, match="the measured timeline has no action"):
        compare(PREDICTED, [])


def test_rows_lie_one_above_the_other_from_the_first_action_on() -> None:
    panel = measured_panel(PREDICTED, MEASURED, "interleaved")
    assert [row.label for row in panel.rows] == [
        *("rank 0 predicted", "rank 0 measured", "rank 1 predicted", "rank 1 measured")
    ]
    firsts = [min((b for b in panel.blocks if b.row == row), key=lambda b: b.start) for row in range(4)]
    assert [block.start for block in firsts[:2]] == pytest.approx([0, 0])
    assert [block.start for block in firsts[2:]] == pytest.approx([0.5, 0.75])
    assert {block.chunk for block in panel.blocks} == {0, 1}
    assert panel.unit == "ms"
    assert panel.end == pytest.approx(1e3 * compare(PREDICTED, MEASURED).measured_step)


def test_page() -> None:
    page = measured_html(PREDICTED, MEASURED, "interleaved")
    assert "<title>interleaved: predicted and measured</title>" in page
    assert '"tracks":2' in page
    assert '"rank 1 measured"' in page
    assert '"unit":"ms"' in page
    assert '"caption":"Parts of the step"' not in page
    parts = [StepPart("forward", 0.2, 0.1)]
    assert '"caption":"Parts of the step"' in measured_html(PREDICTED, MEASURED, "interleaved", parts)
    assert '["F forward","16","500 us","750 us","+50.0%",' in page


def test_times_have_units() -> None:
    assert [seconds(time) for time in (0, 2.5, 0.0125, 3e-6, -0.5e-3, 0.99999e-3)] == [
        *("0 s", "2.5 s", "12.5 ms", "3 us", "-500 us", "1 ms")
    ]


def test_it_does_not_matter_in_which_order_events_come() -> None:
    turned, straight = compare(PREDICTED[::-1], MEASURED), compare(PREDICTED, MEASURED)
    assert measured_table(turned) == measured_table(straight)
