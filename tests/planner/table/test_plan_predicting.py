"""Rows with what is predicted of them."""

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


def test_what_is_measured_as_predicted_has_no_error() -> None:
    found = summary(measured(*LAYOUTS))
    assert found.model is not None
    assert found.baseline is not None
    assert found.model.mape == pytest.approx(0, abs=1e-9)
    assert (found.model.groups, found.model.regret, found.model.concordance) == (1, 0.0, 1.0)
    assert found.model.coverage == 1.0
    # two lines cannot tell apart what differs in nothing but tensor parallelism
    assert found.baseline.mape > 0.01
    assert found.baseline.concordance is not None
    assert found.baseline.concordance < 1.0


def test_a_factor_on_all_times_is_bias_and_no_regret() -> None:
    found = summary(measured(*LAYOUTS, factor=2.0)).model
    assert found is not None
    assert found.bias == pytest.approx(-0.5)
    assert (found.regret, found.concordance, found.coverage) == (0.0, 1.0, 0.0)


def test_refused_rows_are_counted_and_lose_nothing() -> None:
    found = rows({"tp": "8"}, {"gpu": "Quantum9000"}, {"zero": "7"}, {"gpu": "Quantum9000"})
    assert [one.number for one in found] == [1, 2, 3, 4]
    assert [bool(one.refused) for one in found] == [False, True, True, True]
    assert sum(summary(found).refused.values()) == 3
    for one in found:
        assert set(columns(one)) == set(ADDED)
    assert columns(found[1])["predicted_step_time_s"] is None
    assert "Quantum9000" in columns(found[1])["refused"]


def test_an_unforeseen_row_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of nothing")

    monkeypatch.setattr(predicting, "brief_estimate", fails)
    (found,) = rows({"tp": "8"})
    assert found.refused == "unforeseen ZeroDivisionError: of nothing"


def test_one_job_is_estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[object]()
    real = predicting.brief_estimate

    def counted(*given: object, **named: object) -> object:
        calls.append(given)
        return real(*given, **named)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(predicting, "brief_estimate", counted)
    rows({"tp": "8"}, {"tp": "8", "iter_time_s": "3"}, {"tp": "4"})
    assert len(calls) == 2


def test_memory_beside_what_was_recorded() -> None:
    (plain,) = rows({"tp": "8"}, memory=True)
    assert plain.estimate is not None
    assert plain.estimate.memory is not None
    held = plain.estimate.memory
    twice = str(2 * held.allocated.mid / 2**30)
    device = str(held.device.mid / 2**30)
    found = rows(
        {"tp": "8", "peak_mem_gib": twice},
        {"tp": "8", "peak_mem_gib": device, "memory_count": "device"},
        {"tp": "1", "zero": "0", "micro_batch": "4", "oom": "1"},
        memory=True,
    )
    assert columns(found[0])["memory_error_pct"] == pytest.approx(-50)
    assert columns(found[1])["memory_error_pct"] == pytest.approx(0, abs=1e-9)
    scored = summary(found).memory
    assert (scored.rows, scored.mape, scored.bias) == (2, pytest.approx(0.25), pytest.approx(-0.25))
    assert scored.out_of_memory == {"fits": 0, "tight": 0, "does not fit": 1}
