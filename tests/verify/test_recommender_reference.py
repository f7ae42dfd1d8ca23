"""The reference by itself: its rules beside torch's optimisers, its gradients beside the plain model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.recommender.config.load import parse_config
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.models.dlrm import Dlrm
from stretto.recommender.placement import TableSpec
from stretto.verify.recommender.every import Kind, draw
from stretto.verify.recommender.reference import (
    RULES,
    Hyperparameters,
    Reference,
    ReferenceIds,
    initial_table,
    visible_values,
)

_JOB = """
model: {family: dlrm, dense: 4, bottom: [6, 5], top: [7, 1], tables: TABLES}
batch: {global_size: 9}
train: {seed: 3, steps: 10}
optim:
  dense: {name: sgd, lr: 0.1}
  tables: {name: sgd, lr: 0.1}
  rate: {schedule: linear, warmup: 0, min_ratio: 0.0}
"""
_TABLES = (
    "[{rows: 30}, {rows: 8, pooling: mean}, {rows: 20, ids: quotient-remainder, divisor: 6, pooling: mean}]"
)


def job(tables: str = _TABLES, *overrides: str) -> RecommenderConfig:
    parsed = parse_config(_JOB.replace("TABLES", tables), "job", overrides)
    assert isinstance(parsed, RecommenderConfig)
    return parsed


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "lazy_adam"])
def test_rules_are_torchs_where_every_row_is_seen(rule: str) -> None:
    """Lazy Adam of rows that are seen in every step is Adam."""
    kinds: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8),
        "lazy_adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-8),
    }
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    table, optimizer = initial_table(weight.detach().clone(), rule), kinds[rule]([weight])
    for _ in range(4):
        weight.grad = torch.randn(7, 3, dtype=torch.float64)
        RULES[rule](
            table, weight.grad, torch.ones(7, dtype=torch.float64), Hyperparameters(0.1, 1e-8, 0.8, 0.95)
        )
        optimizer.step()
        torch.testing.assert_close(table.values, weight.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", list(RULES))
def test_rows_that_were_not_seen_stay(rule: str) -> None:
    table = initial_table(torch.randn(5, 3, dtype=torch.float64), rule)
    seen = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    for step in range(2):
        before = {"values": table.values.clone(), **{k: v.clone() for k, v in table.states.items()}}
        RULES[rule](
            table,
            torch.randn(5, 3, dtype=torch.float64) * seen[:, None],
            seen,
            Hyperparameters(0.1, 1e-8, 0.9, 0.99),
        )
        for name, old in before.items():
            new = table.values if name == "values" else table.states[name]
            assert torch.equal(new[[1, 3, 4]], old[[1, 3, 4]]), (step, name)
        assert not torch.equal(table.values[[0, 2]], before["values"][[0, 2]])


def test_one_rows_adagrad_by_hand() -> None:
    table = initial_table(torch.tensor([[1.0, 2.0]], dtype=torch.float64), "rowwise_adagrad")
    sums = torch.ones(1, dtype=torch.float64)
    RULES["rowwise_adagrad"](
        table, torch.tensor([[3.0, 4.0]], dtype=torch.float64), sums, Hyperparameters(0.5, 0.0, 0, 0)
    )
    assert float(table.states["sum"][0]) == 12.5
    assert table.values[0].tolist() == pytest.approx([1 - 0.5 * 3 / 12.5**0.5, 2 - 0.5 * 4 / 12.5**0.5])


def test_lookups_of_split_sgd_see_the_upper_half() -> None:
    table = initial_table(
        torch.tensor([[1.0 + 2**-7 + 2**-8, -1.0 - 2**-20]], dtype=torch.float64), "split_sgd"
    )
    assert visible_values(table, "split_sgd").tolist() == [[1.0 + 2**-7, -1.0]]
    assert table.values.tolist() == [[1.0 + 2**-7 + 2**-8, -1.0 - 2**-20]]


@pytest.mark.parametrize("kind", ["one", "fixed", "ragged"])
def test_a_step_is_the_plain_models_gradient(kind: Kind) -> None:
    config = job()
    features = config.table_specs()
    *batches, probe = draw(features=features, numbers=4, samples=9, count=3, kind=kind, seed=1)
    steps = Reference(config, features, [*batches, probe]).run([*batches, probe])
    model = Dlrm(config.shape(features), features).double()
    begun = Reference(config, features, [*batches, probe])
    model.net.load_state_dict(begun.net.state_dict())
    with torch.no_grad():
        for stored, weight in zip(model.stored, model.tables, strict=True):
            weight.copy_(begun.tables[stored.name].values)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (batch, expected) in enumerate(zip(batches, steps, strict=True)):
        loss = F.binary_cross_entropy_with_logits(
            model(batch.dense.double(), batch.ids), batch.labels.double()
        )
        optimizer.zero_grad()
        loss.backward()
        assert float(loss.detach()) == pytest.approx(expected.loss, rel=1e-12)
        for stored, weight in zip(model.stored, model.tables, strict=True):
            assert weight.grad is not None
            torch.testing.assert_close(expected.gradients[stored.name], weight.grad, rtol=1e-12, atol=1e-14)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 10)
        optimizer.step()
        for stored, weight in zip(model.stored, model.tables, strict=True):
            torch.testing.assert_close(expected.weights[stored.name], weight.detach(), rtol=1e-12, atol=1e-14)
        with torch.no_grad():
            logits = model(probe.dense.double(), probe.ids)
        torch.testing.assert_close(expected.logits["logits"], logits, rtol=1e-12, atol=1e-12)


def test_clipping_scales_every_gradient() -> None:
    features = job().table_specs()
    *batches, probe = draw(features=features, numbers=4, samples=9, count=2, kind="ragged", seed=1)
    (free,) = Reference(job(), features, [*batches, probe]).run([*batches, probe])
    clipped = job(_TABLES, f"optim.clip={free.norm / 4}")
    (result,) = Reference(clipped, features, [*batches, probe]).run([*batches, probe])
    assert result.norm == free.norm
    begun = Reference(job(), features, [*batches, probe])
    for name, table in begun.tables.items():
        moved: Tensor = result.weights[name] - table.values
        torch.testing.assert_close(moved, 0.25 * (free.weights[name] - table.values), rtol=1e-5, atol=1e-14)


def test_ids_get_rows_when_they_were_seen_often_enough_and_lose_them() -> None:
    ids = ReferenceIds(TableSpec(name="C1", rows=2, dim=4, ids="hash", admit=2, evict_every=2))
    assert ids.see([5, 7, 7, 9], 0) == [7]
    assert ids.see([5, 9, 9], 1) == [5, 9]
    assert ids.evict(1) == []
    # 5 and 7 were seen twice, 7 longer ago
    assert ids.evict(2) == [7]
    assert sorted(ids.with_row) == [5, 9]
    assert ids.see([7], 2) == []  # as one never seen
    aged = ReferenceIds(
        TableSpec(name="C1", rows=9, dim=4, ids="hash", evict="age", max_age=1, evict_every=1)
    )
    aged.see([1, 2], 0)
    aged.see([2], 1)
    assert aged.evict(2) == [1]


def test_vectors_of_ids_without_a_row_are_zeros_without_a_gradient() -> None:
    config = job("[{rows: 4, ids: hash, admit: 100}]")
    features = config.table_specs()
    *batches, probe = draw(features=features, numbers=4, samples=9, count=2, kind="fixed", seed=1)
    (step,) = Reference(config, features, [*batches, probe]).run([*batches, probe])
    assert not step.gradients["C1"].any()
    assert not step.weights["C1"].any()
    assert not step.lookups["C1"].any()
