"""Placements on real ranks beside one process, and faults that are planted: verify must name each."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto.recommender.optim.updater as updater_module
import stretto.recommender.train.engine as dense_module
from ranks import on_ranks
from stretto.engine import loops
from stretto.recommender.config.load import parse_config
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.optim.rules import Sgd
from stretto.recommender.optim.updater import PoolSquares, RowMeanSquares, TableUpdater
from stretto.recommender.placement import TablePlacement, physical_tables
from stretto.recommender.tables.ids.hash import HashIds
from stretto.recommender.tables.kernels import cpu
from stretto.recommender.tables.sharded import ShardedTables, TableBatch
from stretto.recommender.train.engine import DenseReplica, Recommender
from stretto.verify.evidence import Verdict
from stretto.verify.recommender.cases import PlacementCase
from stretto.verify.recommender.every import AllCases, small
from stretto.verify.recommender.proof import proof_of
from stretto.verify.recommender.prove import TableReferences, prove
from stretto.verify.run import run_proof

_JOB = """
model: {family: dlrm, bottom: [8, 4], top: [4, 1], rows: [10]}
layout: {ranks: 2}
train: {device: cpu, seed: 3}
optim: {dense: {lr: 0.02}, tables: {lr: 0.05}}
"""


def job() -> RecommenderConfig:
    parsed = parse_config(_JOB)
    assert isinstance(parsed, RecommenderConfig)
    return small(parsed, 2)


def run_cases(cases: list[PlacementCase]) -> list[Verdict]:
    """On every rank: the proof, whose verdicts are the same on all."""
    config = job()
    with tempfile.TemporaryDirectory() as folder:
        return prove(TableReferences(config, config.table_specs(), 3), cases, Path(folder))


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_placements_equal_one_process(step: int) -> None:
    """One case of each placement, or of every third, with optimisers, samples and all else in turn."""
    every = AllCases(job().table_specs(), 2).cases
    chosen = [every[15 * at + (4 * at) % 15] for at in range(len(every) // 15)]
    assert len({case.name for case in chosen}) == 16
    chosen = chosen[::step]
    assert len({case.rule for case in chosen}) == 5
    for verdict in on_ranks(2, run_cases, chosen)[0]:
        assert verdict.equal, f"{verdict.layout}: {verdict.diagnosis}"
        assert verdict.error("weights") < 1e-10


def without_numba(cases: list[PlacementCase]) -> list[Verdict]:
    """As `run_cases`, with torch's operations for tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "has_numba", lambda: False)
        return run_cases(cases)


def test_placements_equal_one_process_without_numba() -> None:
    every = [case for case in AllCases(job().table_specs(), 2).cases if "mix" in case.name]
    chosen = [every[16 * at] for at in (1, 3)]
    for verdict in on_ranks(2, without_numba, chosen)[0]:
        assert verdict.equal, f"{verdict.layout}: {verdict.diagnosis}"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_case_of_all_equals_one_process(ranks: int) -> None:
    for verdict in run_proof(proof_of(job(), "all", ranks=ranks)).verdicts:
        assert verdict.equal, f"{verdict.layout}: {verdict.diagnosis}"


def scale_table_gradients(patch: pytest.MonkeyPatch, rank: int) -> None:
    original = TableBatch.send_gradient
    patch.setattr(TableBatch, "send_gradient", lambda self, gradient: original(self, 2 * gradient))


def keep_own_statistic(patch: pytest.MonkeyPatch, rank: int) -> None:
    def local_means(self: RowMeanSquares, squares_of: Sequence[PoolSquares]) -> list[Tensor]:
        return [part.squares / part.pool.width for part in squares_of]

    patch.setattr(RowMeanSquares, "means", local_means)


def lose_duplicates(patch: pytest.MonkeyPatch, rank: int) -> None:
    def first_only(
        self: Any, gradient: Tensor, offsets: Tensor, grouped: Any, scale: Tensor | None = None
    ) -> Tensor:
        first = grouped.order[grouped.starts[:-1]]
        first_gradients = gradient[torch.repeat_interleave(torch.diff(offsets))[first]]
        return first_gradients if scale is None else first_gradients * scale[first].unsqueeze(1)

    patch.setattr(type(cpu.kernels_for("cpu", torch.float64)), "segment_sum", first_only)


def begin_elsewhere(patch: pytest.MonkeyPatch, rank: int) -> None:
    original = ShardedTables._initial_values  # pyright: ignore[reportPrivateUsage]

    def values(self: Any, table: Any, rows: Tensor, *rest: Any) -> dict[str, Tensor]:
        return original(self, table, rows + (table.name == "C1" and rank == 1), *rest)

    patch.setattr(ShardedTables, "_initial_values", values)


def count_copies_twice(patch: pytest.MonkeyPatch, rank: int) -> None:
    def squares(self: Any, summed: Any) -> Tensor:
        return torch.stack([part.gradient.double().square().sum() for part in summed]).sum()

    patch.setattr(TableUpdater, "norm_squared", squares)


def forget_to_reduce(patch: pytest.MonkeyPatch, rank: int) -> None:
    patch.setattr(dense_module._Bucket, "reduce", lambda self: None)  # pyright: ignore[reportPrivateUsage]


def update_one_rank_faster(patch: pytest.MonkeyPatch, rank: int) -> None:
    original = Sgd.apply

    def apply(self: Any, *tensors: Any, lr: float, mean_square: Tensor | None):
        original(self, *tensors, lr=lr * (1.5 if rank == 1 else 1.0), mean_square=mean_square)

    patch.setattr(Sgd, "apply", apply)


def update_at_once_wrongly(patch: pytest.MonkeyPatch, rank: int) -> None:
    original = updater_module.update_rows

    def update(rule: Any, kernels: Any, weight: Tensor, *rest: Any, **more: Any) -> None:
        before = weight.clone()
        original(rule, kernels, weight, *rest, **more)
        weight.copy_(before + 1.1 * (weight - before))

    patch.setattr(updater_module, "update_rows", update)


def evaluate_what_was_trained(patch: pytest.MonkeyPatch, rank: int) -> None:
    patch.setattr(HashIds, "peek", lambda self, ids: torch.full_like(ids, -1))


def update_what_is_read(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Dense weights miss half of an update that follows another one without evaluation in between."""
    update, predict = DenseReplica.update, Recommender.predict
    unread = list[int]()

    def halved(self: DenseReplica, factor: float, scale: float = 1.0) -> None:
        unread.append(1)
        update(self, factor if len(unread) == 1 else factor / 2, scale)

    def reading(self: Recommender, batch: Any) -> Tensor:
        unread.clear()
        return predict(self, batch)

    patch.setattr(DenseReplica, "update", halved)
    patch.setattr(Recommender, "predict", reading)


Fault = tuple[Callable[[pytest.MonkeyPatch, int], None], str, dict[str, Any], str]
FAULTS: list[Fault] = [
    (
        scale_table_gradients,
        "row",
        {},
        "the gradient of every table is 2 times the reference: wrong gradient scale, as if summed twice over "
        "the 2 ranks",
    ),
    (
        keep_own_statistic,
        "column",
        {"rule": "rowwise_adagrad"},
        "gradients and norm are equal but the row statistic of .* is that of each shard's own columns",
    ),
    (lose_duplicates, "row", {}, "differs only in rows that were looked up more than once: .*lost"),
    (
        begin_elsewhere,
        "row",
        {},
        r"the rows of C1 begin with other values \(only part 1 of 2 of C1, on rank 1",
    ),
    (count_copies_twice, "data", {"clip": 0.05}, "tables that every rank copies are counted 2 times"),
    (
        forget_to_reduce,
        "table",
        {},
        "the gradient of every dense parameter differs between the 2 ranks, and their sum is the reference",
    ),
    (
        update_one_rank_faster,
        "row",
        {},
        r"the updated rows of .* are not \(only part 1 of 2 of .*, on rank 1",
    ),
    (
        update_at_once_wrongly,
        "table",
        {},
        r"losses are equal \(gradients were not recorded\) but the updated rows of .* are not",
    ),
    (
        update_what_is_read,
        "table",
        {},
        "equal when tables are read after every step, but different from step 3 on when nothing is read",
    ),
    (evaluate_what_was_trained, "table", {}, "a step is equal, but logits without an update are not"),
]


def run_faults() -> list[Verdict]:
    """On every rank: each fault planted, proved, and taken out again."""
    config, verdicts = job(), list[Verdict]()
    rank = torch.distributed.get_rank()
    every = AllCases(config.table_specs(), 2)
    placements = dict(every.placements())
    references = TableReferences(config, config.table_specs(), 3)
    for plant, name, changes, _ in FAULTS:
        defaults: dict[str, Any] = {"rule": "sgd", "dense": "sgd", "samples": "ragged"}
        case = PlacementCase(name=name, placements=placements[name], ranks=2, **{**defaults, **changes})
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            plant(patch, rank)
            verdicts += prove(references, [case], Path(folder))
    return verdicts


def test_planted_faults_are_seen_and_named() -> None:
    for (plant, _, _, pattern), verdict in zip(FAULTS, on_ranks(2, run_faults)[0], strict=True):
        assert not verdict.equal, plant.__name__
        assert verdict.diagnosis is not None
        assert re.search(pattern, verdict.diagnosis), f"{plant.__name__}: {verdict.diagnosis}"


def test_one_rank_holds_everything() -> None:
    """Without a group, all tables whole."""
    verdict = on_ranks(1, run_alone)[0][0]
    assert verdict.equal, verdict.diagnosis


def run_alone() -> list[Verdict]:
    config = replace(job(), layout=replace(job().layout, ranks=1))
    names = [table.name for table in physical_tables(job().table_specs())]
    case = PlacementCase(
        name="table",
        placements={name: TablePlacement("table", (0,)) for name in names},
        ranks=1,
        rule="adagrad",
        dense="adamw",
        samples="ragged",
    )
    with tempfile.TemporaryDirectory() as folder:
        return prove(TableReferences(config, config.table_specs(), 3), [case], Path(folder))
