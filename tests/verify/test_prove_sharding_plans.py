"""Modules under a sharding plan whose split changes: proved, and each fault is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import on_ranks
from stretto import (
    BatchParallel,
    ColumnParallel,
    GatherBatch,
    Layout,
    Mesh,
    RowParallel,
    parallelize,
    sum_gradients,
)
from stretto.engine.parallel import parallelize as parallelize_module
from stretto.engine.parallel import splits
from stretto.engine.parallel.collectives import local_part
from stretto.engine.parallel.styles import ParallelStyle
from stretto.prove import Report, prove


def plain() -> nn.Module:
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    classifier = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 3))
    return nn.Sequential(features, classifier)


PLAN: dict[str, ParallelStyle] = {
    "0": BatchParallel(),
    "1": GatherBatch("shares"),
    "1.0": ColumnParallel(),
    "1.2": RowParallel(),
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def checked(plan: dict[str, ParallelStyle], sums: bool = True, steps: int = 2, **how: Any) -> Report:
    """A proof of the plan."""

    def parallel(model: nn.Module) -> nn.Module:
        model.table = parallelize(model, plan, Mesh(Layout(tp=2)))  # pyright: ignore
        return model

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        mean = loss(model, batch)
        mean.backward()
        if sums:
            sum_gradients(model, model.table)
        optimizer.step()
        optimizer.zero_grad()
        return mean

    torch.manual_seed(1)
    batch = torch.randn(8, 1, 6, 6), torch.randint(3, (8,))
    return prove(plain, parallel, batch, step, loss=loss, reduction="same", steps=steps, **how)


def _right() -> list[Report]:
    by_layer: dict[str, ParallelStyle] = {
        "0": BatchParallel(),
        "1.0": RowParallel(),
        "1.2": ColumnParallel(),
        "1.3": BatchParallel(),
    }
    return [checked(PLAN), checked(by_layer), checked(PLAN, steps=1, initial="load")]


def test_splits_that_change_are_proved():
    for reports in on_ranks(2, _right):
        for report in reports:
            assert report.equal, report
            compared = {quantity.name for quantity in report.quantities if quantity.error is not None}
            assert {"loss", "gradients", "weights", "states", "buffers"} <= compared


def _missing_sum(_: pytest.MonkeyPatch) -> Report:
    return checked(PLAN, sums=False)


def _local_statistics(patch: pytest.MonkeyPatch) -> Report:
    patch.setattr(parallelize_module, "over_ranks", lambda *_: None)
    return checked(PLAN)


def _wrong_rows(patch: pytest.MonkeyPatch) -> Report:
    """Each rank computes on the other's samples, and sends them as its own: the batch out of order."""
    changed = {("whole", "batch"): lambda x, group: local_part(x.roll(len(x) // 2, 0), group, 0)}
    patch.setattr(splits, "_CONVERSIONS", {**splits._CONVERSIONS, **changed})
    return checked(PLAN)


def _summed_twice(patch: pytest.MonkeyPatch) -> Report:
    """The backward of a gather sums what is whole on every rank."""
    changed = {("batch", "whole"): splits._CONVERSIONS["batch", "assembled"]}
    patch.setattr(splits, "_CONVERSIONS", {**splits._CONVERSIONS, **changed})
    return checked({"0": BatchParallel(), "1": BatchParallel()})


FAULTS: tuple[tuple[Callable[[pytest.MonkeyPatch], Report], str], ...] = (
    (_missing_sum, "and their sum is the reference: the reduction over them is missing"),
    (_local_statistics, "the first output that differs is 0.1's: it normalises by the samples of one rank"),
    (_wrong_rows, "the first output that differs is 1's"),
    (_summed_twice, "every gradient is 2 times the reference: wrong gradient scale"),
)


def _faulty() -> list[Report]:
    reports = list[Report]()
    for fault, _ in FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            reports.append(fault(patch))
    return reports


def test_faults_of_changing_splits_are_seen_and_named():
    for reports in on_ranks(2, _faulty):
        for (_, says), report in zip(FAULTS, reports, strict=True):
            assert not report.equal
            assert says in str(report.diagnosis), report.diagnosis
