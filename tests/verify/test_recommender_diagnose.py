"""Differences of placed tables and the words for them, from made-up evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stretto.recommender.placement import TableSpec
from stretto.verify.compare import Comparison
from stretto.verify.recommender.diagnose import TableEvidence, WrongShard, diagnose

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


def seen(**changes: Any) -> TableEvidence:
    """Evidence of two ranks where all is equal, but for some of it."""
    equal = TableEvidence(
        ranks=2,
        tables=_TABLES,
        features=_FEATURES,
        copied=["C2"],
        by_columns=["C1"],
        initial=[],
        loss=0.7,
        reference_loss=0.7,
        gradients=compared(),
        norm=2.0,
        reference_norm=2.0,
        copied_square=1.0,
        weights=compared(),
        states=compared(),
        predict=0.0,
    )
    return replace(equal, **changes)


BOTH = {"C1": 2.0, "C2": 2.0}
CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"gradients": compared(BOTH)},
        "the gradient of every table is 2 times the reference: scaled by the number of ranks (2), as losses "
        "that are means of each rank's samples",
    ),
    (
        {"gradients": compared(dict.fromkeys(_ALL, 0.5))},
        "the gradient of every table and the gradient of every dense parameter is 0.5 times the reference: "
        "divided by the number of ranks (2), as if averaged over them",
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
        {"gradients": compared({"C1": 0.9}, 0.1), "shards": [WrongShard("C1", 1, 2, 1)]},
        "the gradient of C1 differs in direction: gradients go to other rows, or some ranks' are missing "
        "(only part 1 of 2 of C1, on rank 1)",
    ),
    (
        {"gradients": compared({"top.0.weight": 0.5}, 0.2)},
        "the gradient of top.0.weight differs: it is not summed over all ranks",
    ),
    (
        {"gradients": compared({"top.0.weight": 0.6}, 0.2)},
        "the gradient of top.0.weight differs in direction: the backward of the dense networks differs",
    ),
    (
        {"gradients": compared({"top.0.weight": 20.0, "top.0.bias": 20.0}), "clipped": 0.05},
        "the gradient of every dense parameter is 20 times the reference: the inverse of the factor that "
        "clips, so the gradients of dense networks are not clipped",
    ),
    (
        {"weights": compared({"C1": 1.1}), "moves": compared({"C1": 20.0}), "clipped": 0.05, "states": None},
        "gradients are equal, but the rows of C1 are updated by more, by the inverse of the factor that "
        "clips: the gradients of tables are not clipped",
    ),
    (
        {"gradients": compared({"C1": 1.0 + 1e-7})},
        "the gradient of C1 is 1.0000001 times the reference: wrong gradient scale",
    ),
    (
        {
            "gradients": compared({"C3.quotient": 0.9}, 0.1),
            "tables": (*_TABLES, "C3.quotient"),
            "duplicates_lost": ["C3.quotient"],
        },
        "the gradient of C3.quotient differs in direction, and only quotient-remainder tables do: the "
        "gradient of each factor is that of the vector times the other factor",
    ),
    (
        {"loss": 0.71, "vectors": compared({"C3": 1.1})},
        "the loss is 1.014285714 times the reference: only what quotient-remainder tables return is wrong, "
        "C3: ids are split, or their two vectors are combined, in another way",
    ),
    (
        {"loss": 0.71, "vectors": compared({"C1": 1.1})},
        "the loss is 1.014285714 times the reference: only what hash tables return is wrong, C1: ids have "
        "other rows, or are admitted or evicted at another time",
    ),
    (
        {"loss": 0.71, "vectors": compared({"C2": 1.1})},
        "the loss is 1.014285714 times the reference: what C2 returns is wrong: other rows are looked up, or "
        "sums are wrong",
    ),
    (
        {"loss": 0.71, "vectors": compared()},
        "the loss is 1.014285714 times the reference, of equal vectors from all tables: the dense networks "
        "or the mean over the batch differ",
    ),
    ({"loss": 1.4}, "the loss is 2 times the reference: it is no mean over the global batch"),
    (
        {"loss": 0.71},
        "the loss is 1.014285714 times the reference: other rows are looked up, or sums are wrong",
    ),
    ({"loss": float("nan")}, "the loss is not finite"),
    (
        {"initial": ["C1"], "loss": 0.9, "shards": [WrongShard("C1", 0, 2, 0), WrongShard("C1", 1, 2, 1)]},
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
        "left out, or counted more than once",
    ),
    (
        {"states": Comparison({"C1.sum": 0.3}, {}, {}), "local_statistic": ["C1"]},
        "gradients are equal, but the row statistic of C1 is that of each shard's own columns: it is not the "
        "mean over all columns of the table",
    ),
    (
        {"states": Comparison({"C1.sum": 0.3}, {}, {})},
        "gradients are equal, but the states C1.sum are not: the update differs",
    ),
    (
        {"weights": compared({"C2": 1.1}), "shards": [WrongShard("C2", 1, 2, 1)]},
        "gradients are equal, but the updated rows of C2 are not (only part 1 of 2 of C2, on rank 1): the "
        "update differs",
    ),
    (
        {"weights": compared({"top.0.bias": 1.1})},
        "gradients are equal, but the updated top.0.bias is not: the dense optimiser differs",
    ),
    (
        {"gradients": None, "weights": compared({"C1": 1.1}), "duplicates_lost": ["C1"]},
        "without gradients being kept C1 differs only in rows looked up more than once: lookups of one row "
        "are lost, or applied one after another",
    ),
    (
        {"predict": 0.1},
        "a step is equal, but logits without an update are not: evaluation looks up other rows",
    ),
]


@pytest.mark.parametrize(("changes", "words"), CASES, ids=[words[:50] for _, words in CASES])
def test_what_a_difference_is_called(changes: dict[str, Any], words: str) -> None:
    assert diagnose(seen(**changes)) == words


def test_nothing_is_said_where_all_is_equal() -> None:
    assert diagnose(seen()) is None
    assert diagnose(seen(gradients=None, norm=None, states=None)) is None
