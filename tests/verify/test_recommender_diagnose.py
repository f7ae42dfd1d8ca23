"""Differences of placed tables and the words for them, from made-up evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stretto.recommender.placement import TableSpec
from stretto.verify.compare import Comparison
from stretto.verify.diagnose import explain
from stretto.verify.evidence import Evidence, NormPart, Sum, TableMarks, WrongShard

_TABLES = ("C1", "C2")
_ALL = (*_TABLES, "top.0.weight", "top.0.bias")
_FEATURES = (
    TableSpec(name="C1", rows=9, dim=4, ids="hash"),
    TableSpec(name="C2", rows=9, dim=4),
    TableSpec(name="C3", rows=9, dim=4, ids="quotient-remainder"),
)


def compared(ratios: dict[str, float] | None = None, residual: float = 0.0) -> Comparison:
    """Parameters that are so many times the reference; others are equal."""
    wrong = ratios or {}
    names = dict.fromkeys((*_ALL, *wrong))
    every = {name: wrong.get(name, 1.0) for name in names}
    errors = {name: max(abs(every[name] - 1.0), residual) if name in wrong else 0.0 for name in names}
    left = {name: residual if name in wrong else 0.0 for name in names}
    return Comparison(errors, every, left)


def seen(**changes: Any) -> Evidence:
    """Evidence of two ranks where all is equal, but for some of it, marks of tables included."""
    marks = {name: changes.pop(name) for name in MARKS if name in changes}
    tables = {"table": marks.get("names", _TABLES), "dense parameter": ("top.0.weight", "top.0.bias")}
    equal = Evidence(
        loss=0.7,
        reference_loss=0.7,
        gradients=compared(),
        norm=2.0,
        reference_norm=2.0,
        weights=compared(),
        states=compared(),
        kinds=tables,
        sums=[Sum(2, "ranks", "the sum over all ranks")],
        norm_parts=[NormPart("tables that every rank copies", 0.25)],
        tables=TableMarks(**{"names": _TABLES, "features": _FEATURES, **marks}),
    )
    return replace(equal, **changes)


MARKS = ("names", "vectors", "moves", "duplicates_lost", "local_statistic", "wrong_shards")
BOTH = {"C1": 2.0, "C2": 2.0}
CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"gradients": compared(BOTH)},
        "the gradient of every table is 2 times the reference: wrong gradient scale, as if summed twice "
        "over the 2 ranks",
    ),
    (
        {"gradients": compared(dict.fromkeys(_ALL, 0.5))},
        "every gradient is 0.5 times the reference: wrong gradient scale, as if averaged over the 2 ranks",
    ),
    (
        {"gradients": compared({"C1": 3.0})},
        "the gradient of C1 is 3 times the reference: wrong gradient scale",
    ),
    (
        {"gradients": compared({"C1": 0.9}, 0.1), "duplicates_lost": ["C1"]},
        "the gradient of C1 differs only in rows that were looked up more than once: lookups of one row are "
        "lost, not summed",
    ),
    (
        {"gradients": compared({"C1": 0.9}, 0.1), "wrong_shards": [WrongShard("C1", 1, 2, 1)]},
        "the gradient of C1 differs in direction: gradients go to other rows, or some ranks' are missing "
        "(only part 1 of 2 of C1, on rank 1)",
    ),
    (
        {"gradients": compared({"top.0.weight": 0.5}, 0.2)},
        "the gradient of top.0.weight differs between the 2 ranks, and their sum is the reference: the sum "
        "over all ranks is missing",
    ),
    (
        {"gradients": compared({"top.0.weight": 0.6}, 0.2)},
        "the gradient of top.0.weight differs in direction: the backward of the dense networks differs",
    ),
    (
        {"gradients": compared({"top.0.weight": 20.0, "top.0.bias": 20.0}), "clip": 0.1},
        "the gradient of every dense parameter is 20 times the reference: as if the step did not "
        "clip to a norm of 0.1",
    ),
    (
        {"weights": compared({"C1": 1.1}), "moves": compared({"C1": 20.0}), "clip": 0.1, "states": None},
        "gradients and norm are equal but the rows of C1 are updated by 20 times as much: the gradients of "
        "tables are not clipped",
    ),
    (
        {"gradients": compared({"C1": 1.0 + 1e-7})},
        "the gradient of C1 is 1.0000001 times the reference: wrong gradient scale",
    ),
    (
        {
            "gradients": compared({"C3.quotient": 0.9}, 0.1),
            "names": (*_TABLES, "C3.quotient"),
            "duplicates_lost": ["C3.quotient"],
        },
        "the gradient of C3.quotient differs in direction, and only quotient-remainder tables do: the "
        "gradient of each factor is that of the vector times the other factor",
    ),
    (
        {"loss": 0.71, "vectors": compared({"C3": 1.1})},
        "the loss is 1.01429 times the reference: only what quotient-remainder tables return is wrong, "
        "C3: ids are split, or their two vectors are combined, in another way",
    ),
    (
        {"loss": 0.71, "vectors": compared({"C1": 1.1})},
        "the loss is 1.01429 times the reference: only what hash tables return is wrong, C1: ids have "
        "other rows, or are admitted or evicted at another time",
    ),
    (
        {"loss": 0.71, "vectors": compared({"C2": 1.1})},
        "the loss is 1.01429 times the reference: what C2 returns is wrong: other rows are looked up, or "
        "sums are wrong",
    ),
    (
        {"loss": 0.71, "vectors": compared()},
        "the loss is 1.01429 times the reference, of equal vectors from all tables: the dense networks "
        "or the mean over the batch differ",
    ),
    ({"loss": 1.4}, "the loss is 2 times the reference: wrong scale of the loss"),
    (
        {"loss": 0.71},
        "the loss is 1.01429 times the reference: other rows are looked up, or sums are wrong",
    ),
    ({"loss": float("nan")}, "the loss is not finite"),
    (
        {
            "initial": ["C1"],
            "loss": 0.9,
            "wrong_shards": [WrongShard("C1", 0, 2, 0), WrongShard("C1", 1, 2, 1)],
        },
        "the rows of C1 begin with other values",
    ),
    (
        {"norm": 5.0**0.5},
        "gradients are equal but their norm is 1.11803 times the reference, so clipping is wrong: tables "
        "that every rank copies are counted 2 times",
    ),
    (
        {"norm": 3.0**0.5},
        "gradients are equal but their norm is 0.866025 times the reference, so clipping is wrong: tables "
        "that every rank copies are not counted",
    ),
    (
        {"norm": 1.0},
        "gradients are equal but their norm is 0.5 times the reference, so clipping is wrong: a shard is "
        "left out, or a replicated or tied parameter counted more than once",
    ),
    (
        {"states": Comparison({"C1.sum": 0.3}, {}, {}), "local_statistic": ["C1"]},
        "gradients and norm are equal but the row statistic of C1 is that of each shard's own columns: it is "
        "not the mean over all columns of the table",
    ),
    (
        {"states": Comparison({"C1.sum": 0.3}, {}, {})},
        "gradients and norm are equal but the states C1.sum are not: the optimiser differs",
    ),
    (
        {"weights": compared({"C2": 1.1}), "wrong_shards": [WrongShard("C2", 1, 2, 1)]},
        "gradients and norm are equal but the updated rows of C2 are not (only part 1 of 2 of C2, on rank "
        "1): the optimiser differs",
    ),
    (
        {"weights": compared({"top.0.bias": 1.1})},
        "gradients and norm are equal but the updated top.0.bias are not: the optimiser differs",
    ),
    (
        {"gradients": None, "weights": compared({"C1": 1.1}), "duplicates_lost": ["C1"]},
        "losses are equal (gradients were not recorded) but C1 differs only in rows looked up more than "
        "once: lookups of one row are lost, or applied one after another",
    ),
    (
        {"logits": compared({"C1": 1.1})},
        "a step is equal, but logits without an update are not: evaluation looks up other rows",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), CASES, ids=[sentence[:50] for _, sentence in CASES])
def test_what_a_difference_is_called(changes: dict[str, Any], sentence: str) -> None:
    cause = explain(seen(**changes))
    assert cause is not None
    assert cause.sentence == sentence


def test_nothing_is_said_where_all_is_equal() -> None:
    assert explain(seen()) is None
    assert explain(seen(gradients=None, norm=None, states=None)) is None
