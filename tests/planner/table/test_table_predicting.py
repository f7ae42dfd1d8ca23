"""Rows with their predictions, and the summary of errors."""

from __future__ import annotations

import pytest

from stretto.planner.table import predicting
from stretto.planner.table.predicting import ADDED, Predicted, columns, predict_rows, summary

BASE = {
    "model": "llama3-8b",
    "seq": "2048",
    "gpu": "H100",
    "gpus": "8",
    "global_batch": "32",
    "micro_batch": "1",
    "precision": "bf16",
}


def rows(*changes: dict[str, str], memory: bool = False) -> list[Predicted]:
    return list(predict_rows([{**BASE, **change} for change in changes], memory=memory))


def measured(*layouts: dict[str, str], factor: float = 1.0) -> list[Predicted]:
    """Rows that were measured as they are predicted, times a factor."""
    first = rows(*layouts)
    seconds = [str(one.estimate.seconds * factor) for one in first if one.estimate is not None]
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
    assert [one.number for one in predicted] == [1, 2, 3, 4]
    assert [bool(one.refused) for one in predicted] == [False, True, True, True]
    assert sum(summary(predicted).refused.values()) == 3
    for one in predicted:
        assert set(columns(one)) == set(ADDED)
    assert columns(predicted[1])["predicted_step_time_s"] is None
    assert "Quantum9000" in columns(predicted[1])["refused"]


def test_unforeseen_errors_of_a_row_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of nothing")

    monkeypatch.setattr(predicting, "short_step_estimate", fails)
    (refused,) = rows({"tp": "8"})
    assert refused.refused == "unforeseen ZeroDivisionError: of nothing"


def test_repeated_jobs_are_estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[object]()
    real = predicting.short_step_estimate

    def counted(*positional: object, **named: object) -> object:
        calls.append(positional)
        return real(*positional, **named)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(predicting, "short_step_estimate", counted)
    rows({"tp": "8"}, {"tp": "8", "iter_time_s": "3"}, {"tp": "4"})
    assert len(calls) == 2


def test_predicted_memory_is_compared_with_recorded_memory() -> None:
    (plain,) = rows({"tp": "8"}, memory=True)
    assert plain.estimate is not None
    assert plain.estimate.memory is not None
    held = plain.estimate.memory
    twice = str(2 * held.allocated.mid / 2**30)
    device = str(held.device.mid / 2**30)
    predicted = rows(
        {"tp": "8", "peak_mem_gib": twice},
        {"tp": "8", "peak_mem_gib": device, "memory_count": "device"},
        {"tp": "1", "zero": "0", "micro_batch": "4", "oom": "1"},
        memory=True,
    )
    assert columns(predicted[0])["memory_error_pct"] == pytest.approx(-50)
    assert columns(predicted[1])["memory_error_pct"] == pytest.approx(0, abs=1e-9)
    scored = summary(predicted).memory
    assert (scored.rows, scored.mape, scored.bias) == (2, pytest.approx(0.25), pytest.approx(-0.25))
    assert scored.out_of_memory == {"fits": 0, "tight": 0, "does not fit": 1}
