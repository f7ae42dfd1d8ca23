"""Rows of measured runs with their predictions, and the scores of these."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.planner import run_scores
from stretto.planner.run_scores import (
    ADDED,
    MeasuredPoint,
    PredictedRow,
    added_columns,
    concordant,
    fit_efficiency,
    layouts_by_group,
    predict_rows,
    regret,
    scores,
    summary,
)
from stretto.planner.runs import read_run

SECONDS = st.floats(0.01, 100)


def points(*pairs: tuple[float, float], group: str = "g") -> list[MeasuredPoint]:
    return [
        MeasuredPoint(
            name=f"row {i}", predicted=p, measured=m, group=group, layout=i, low=0.9 * p, high=1.1 * p
        )
        for i, (p, m) in enumerate(pairs)
    ]


def test_errors_by_hand() -> None:
    scored = scores(points((1.1, 1.0), (1.6, 2.0), (3.0, 3.0)))
    assert scored is not None
    assert scored.rows == 3
    assert scored.mape == pytest.approx((0.1 + 0.2 + 0.0) / 3)
    assert scored.median == pytest.approx(0.1)
    assert scored.bias == pytest.approx((0.1 - 0.2) / 3)
    assert scored.worst == pytest.approx(-0.2)
    assert scored.worst_row == "row 1"
    assert scored.coverage == pytest.approx(2 / 3)  # 1.0 is in 0.99 to 1.21, 2.0 above 1.76


def test_no_measurements_have_no_scores() -> None:
    assert scores([]) is None


def test_regret_is_the_cost_of_the_predicted_best() -> None:
    assert regret([(1.0, 5.0), (2.0, 4.0), (3.0, 8.0)]) == pytest.approx(0.25)
    assert regret([(2.0, 4.0), (3.0, 8.0)]) == 0.0


def test_equal_predictions_have_the_mean_regret() -> None:
    """Equal predictions have the mean regret of their layouts, whatever the order in the file."""
    for layouts in ([(1.0, 2.0), (1.0, 4.0)], [(1.0, 4.0), (1.0, 2.0)]):
        assert regret(layouts) == pytest.approx(0.5)
        assert concordant(layouts) == (0.5, 1)


def test_repeated_measurements_are_averaged() -> None:
    runs = points((1.0, 4.0), (2.0, 3.0))
    again = replace(runs[0], measured=1.0)  # the same layout, lucky once
    (layouts,) = layouts_by_group([*runs, again])
    assert sorted(layouts) == [(1.0, 2.5), (2.0, 3.0)]
    assert regret(layouts) == 0.0


def test_groups_of_one_layout_have_no_regret() -> None:
    alone = [replace(point, group=i) for i, point in enumerate(points((1.0, 2.0), (2.0, 1.0)))]
    scored = scores(alone)
    assert scored is not None
    assert (scored.groups, scored.regret, scored.concordance) == (0, None, None)


def test_concordance_counts_pairs_in_order() -> None:
    assert concordant([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)]) == (2.0, 3)
    assert concordant([(1.0, 1.0), (2.0, 1.0)]) == (0.0, 0)  # measured alike: nothing to order


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=8))
def test_perfect_predictions_have_no_regret(pairs: list[tuple[float, float]]) -> None:
    right = [(measured, measured) for _, measured in pairs]
    assert regret(right) == pytest.approx(0, abs=1e-6)
    assert regret(pairs) >= 0
    right_pairs, count = concordant(right)
    assert right_pairs == pytest.approx(count, abs=count * 0.5 if _close(pairs) else 0)


def _close(pairs: list[tuple[float, float]]) -> bool:
    """Whether two measured times are nearly equal, so that rounding decides their order."""
    times = sorted(measured for _, measured in pairs)
    return any(b - a <= 1e-6 * b for a, b in pairwise(times))


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12), st.floats(0.02, 3))
def test_no_efficiency_beats_the_fitted_one(rows: list[tuple[float, float]], other: float) -> None:
    ideal, measured = [a for a, _ in rows], [b for _, b in rows]

    def mape(efficiency: float) -> float:
        return sum(abs(a / efficiency / b - 1) for a, b in rows)

    assert mape(fit_efficiency(ideal, measured)) <= mape(other) * (1 + 1e-9)


# ------------------------------------------------------------------ rows

BASE = {
    "model": "llama3-8b",
    "seq": "2048",
    "gpu": "H100",
    "gpus": "8",
    "global_batch": "32",
    "micro_batch": "1",
    "precision": "bf16",
}


def rows(*changes: dict[str, str], memory: bool = False) -> list[PredictedRow]:
    return list(predict_rows([{**BASE, **change} for change in changes], read_run, memory=memory))


def measured(*layouts: dict[str, str], factor: float = 1.0) -> list[PredictedRow]:
    """Rows that were measured as they are predicted, times a factor."""
    first = rows(*layouts)
    seconds = [str(row.estimate.seconds * factor) for row in first if row.estimate is not None]
    return rows(*({**layout, "iter_time_s": time} for layout, time in zip(layouts, seconds, strict=True)))


LAYOUTS = ({"tp": "8"}, {"tp": "4"}, {"tp": "2", "pp": "2"}, {"zero": "3", "tp": "1"})


def test_measurements_equal_to_predictions_have_no_error() -> None:
    summarised = summary(measured(*LAYOUTS))
    assert summarised.model is not None
    assert summarised.baseline is not None
    assert summarised.model.mape == pytest.approx(0, abs=1e-9)
    assert (summarised.model.groups, summarised.model.regret, summarised.model.concordance) == (1, 0.0, 1.0)
    assert summarised.model.coverage == 1.0
    # two lines cannot tell apart what differs in nothing but tensor parallelism
    assert summarised.baseline.mape > 0.01
    assert summarised.baseline.concordance is not None
    assert summarised.baseline.concordance < 1.0


def test_a_common_factor_is_bias_without_regret() -> None:
    scores = summary(measured(*LAYOUTS, factor=2.0)).model
    assert scores is not None
    assert scores.bias == pytest.approx(-0.5)
    assert (scores.regret, scores.concordance, scores.coverage) == (0.0, 1.0, 0.0)


def test_refused_rows_are_counted_and_the_others_predicted() -> None:
    predicted = rows({"tp": "8"}, {"gpu": "Quantum9000"}, {"zero": "7"}, {"gpu": "Quantum9000"})
    assert [row.number for row in predicted] == [1, 2, 3, 4]
    assert [bool(row.refused) for row in predicted] == [False, True, True, True]
    assert sum(summary(predicted).refused.values()) == 3
    for row in predicted:
        assert set(added_columns(row)) == set(ADDED)
    assert added_columns(predicted[1])["predicted_step_time_s"] is None
    assert "Quantum9000" in added_columns(predicted[1])["refused"]


def test_unforeseen_errors_of_a_row_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of nothing")

    monkeypatch.setattr(run_scores, "short_step_estimate", fails)
    (refused,) = rows({"tp": "8"})
    assert refused.refused == "unforeseen ZeroDivisionError: of nothing"


def test_repeated_jobs_are_estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[object]()
    real = run_scores.short_step_estimate

    def counted(*positional: object, **named: object) -> object:
        calls.append(positional)
        return real(*positional, **named)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(run_scores, "short_step_estimate", counted)
    rows({"tp": "8"}, {"tp": "8", "iter_time_s": "3"}, {"tp": "4"})
    assert len(calls) == 2


def test_predicted_memory_is_compared_with_recorded_memory() -> None:
    (plain,) = rows({"tp": "8"}, memory=True)
    assert plain.estimate is not None
    assert plain.estimate.memory is not None
    memory = plain.estimate.memory
    twice = str(2 * memory.allocated.mid / 2**30)
    device = str(memory.device.mid / 2**30)
    predicted = rows(
        {"tp": "8", "peak_mem_gib": twice},
        {"tp": "8", "peak_mem_gib": device, "memory_count": "device"},
        {"tp": "1", "zero": "0", "micro_batch": "4", "oom": "1"},
        memory=True,
    )
    assert added_columns(predicted[0])["memory_error_pct"] == pytest.approx(-50)
    assert added_columns(predicted[1])["memory_error_pct"] == pytest.approx(0, abs=1e-9)
    scored = summary(predicted).memory
    assert (scored.rows, scored.mape, scored.bias) == (2, pytest.approx(0.25), pytest.approx(-0.25))
    assert scored.out_of_memory == {"fits": 0, "tight": 0, "does not fit": 1}
