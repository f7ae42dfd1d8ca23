"""Expert metrics from sums over all ranks."""

from __future__ import annotations

import pytest
import torch

from stretto.run.train.speed import ExpertReport, summarise_experts


def test_losses_are_by_token_drops_by_choice_and_loads_by_layer() -> None:
    loads = torch.tensor([[10.0, 10.0, 10.0, 10.0], [0.0, 8.0, 8.0, 24.0]], dtype=torch.float64)
    report = summarise_experts(torch.tensor(6.0), torch.tensor(4.0), loads, tokens=12.0)
    assert ExpertReport(*report.tolist()) == ExpertReport(
        loss=0.5, dropped=pytest.approx(4 / 80), busiest=pytest.approx(2.4)
    )


def test_a_step_without_choices_drops_none() -> None:
    none = torch.zeros((), dtype=torch.float64)
    assert summarise_experts(none, none, torch.zeros(1, 2, dtype=torch.float64), 1.0).tolist() == [
        0.0,
        0.0,
        0.0,
    ]
