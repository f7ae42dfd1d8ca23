"""What `--layouts all` proves of a recommender, and placements from a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.errors import StrettoError
from stretto.recommender.config.load import parse_config
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import Placements, check_placements, physical_tables
from stretto.recommender.planner.uniform import uniform
from stretto.recommender.tables.ids import hash as hash_module
from stretto.recommender.tables.ids.hash import HashIds, lowest
from stretto.recommender.tables.splitmix import owner
from stretto.verify.recommender.cases import PlacementCase, cases_from_file, configured_case
from stretto.verify.recommender.every import KINDS, AllCases, draw, small
from stretto.verify.recommender.proof import recommender_proof
from stretto.verify.run import run_proof

_JOB = """
model: {family: dlrm, bottom: [8, 4], top: [4, 1], rows: [10, 20]}
layout: {ranks: 2}
tables: {placement: row}
train: {device: cpu}
optim: {dense: {lr: 0.02}, tables: {lr: 0.05, name: adagrad}, clip: 2.0}
"""


def job(*overrides: str) -> RecommenderConfig:
    parsed = parse_config(_JOB, "job", overrides)
    assert isinstance(parsed, RecommenderConfig)
    return parsed


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_value_meets_every_placement_and_every_optimiser(ranks: int) -> None:
    cases = AllCases(small(job(), ranks).table_specs(), ranks).cases
    names = {case.name for case in cases}
    assert {"table", "column", "row", "data", "row cpu", "column disk", "mix 1"} <= names
    assert ("table-row" in names) == (ranks == 4)

    def values(field: str) -> set[Any]:
        return {getattr(case, field) for case in cases}

    assert len({(c.name, c.rule, c.dense) for c in cases}) == len(cases) == len(names) * 15
    for first, second in product(("name", "rule", "dense"), ("samples", "overlap", "clip", "interaction")):
        met = {(getattr(c, first), getattr(c, second)) for c in cases}
        assert len(met) == len(values(first)) * len(values(second)), (first, second)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_of_them_are_placements_of_all_tables(ranks: int) -> None:
    tables = small(job(), ranks).table_specs()
    assert {table.ids for table in tables} == {"modulo", "quotient-remainder", "hash"}
    assert {table.pooling for table in tables} == {"sum", "mean"}
    for _, placements in AllCases(tables, ranks).placements():
        check_placements(physical_tables(tables), placements, ranks)


def test_the_product_has_each_with_each() -> None:
    tables = small(job(), 2).table_specs()
    assert len(AllCases(tables, 2, full=True).cases) == 24 * len(AllCases(tables, 2).cases)


def test_small_keeps_rates_and_makes_a_batch_that_ranks_do_not_divide() -> None:
    config = small(job("optim.tables.eps=1e-3"), 4)
    assert config.batch.global_size % 4
    assert config.optim.tables.eps == 1e-3
    assert config.optim.dense.lr == 0.02
    assert config.model.dim % 4


def test_more_memory_than_there_is_is_refused() -> None:
    config = job("model.rows=[2000000000]")
    tables = config.table_specs()
    case = configured_case(config, tables, uniform(tables, "row", 2))
    with pytest.raises(StrettoError, match=r"proving tables of 59\.6 GiB in float64 on 2 ranks takes about"):
        run_proof(recommender_proof(config, tables, [case]))


def own_of(config: RecommenderConfig) -> tuple[Any, PlacementCase]:
    tables = config.table_specs()
    placements: Placements = uniform(physical_tables(tables), "row", 2)
    return tables, configured_case(config, tables, placements)


def read(tmp_path: Path, text: str) -> list[PlacementCase]:
    path = tmp_path / "cases.yaml"
    path.write_text(text)
    config = job()
    return cases_from_file(path, config, *own_of(config))


def test_a_file_changes_what_it_says_and_nothing_else(tmp_path: Path) -> None:
    configured = own_of(job())[1]
    first, second, third = read(
        tmp_path,
        "- {rule: lazy_adam, clip: null, samples: ragged}\n"
        "- {placement: column, place: cpu, cache: 0.5}\n"
        "- {placement: {C1: {split: data}, C2: {split: table, ranks: 1}}, overlap: false, dense: lamb}\n",
    )
    assert (configured.rule, configured.dense, configured.clip, configured.samples) == (
        "adagrad",
        "adamw",
        2.0,
        "data",
    )
    assert str(configured) == "row adagrad+adamw dot data overlap clip=2"
    assert (first.name, first.rule, first.clip, first.samples) == ("row", "lazy_adam", None, "ragged")
    assert first.placements == configured.placements
    assert second.placement_words == {
        "C1": "column on 0 cpu",
        "C2": "column on 1 cpu",
    }  # too narrow for parts
    assert (second.name, second.rule) == ("column cpu", "adagrad")
    assert third.placement_words == {"C1": "data", "C2": "table on 1"}
    assert str(third) == "placement 3 adagrad+lamb dot data clip=2"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("{}", "no list of placements", "write lines such as"),
        ("- row", "placement 1 is 'row'", "write lines such as"),
        ("- {placment: row}", "placement 1 has the key 'placment'", "did you mean 'placement'"),
        ("- {rule: adam}", "placement 1: rule is 'adam', must be", "write lines"),
        ("- {clip: -1}", "placement 1: clip is -1, must be", "write lines"),
        ("- {samples: few}", "placement 1: samples is 'few'", "one of one, fixed, ragged, data"),
        (
            "- {placement: rows}",
            "placement 1: tables.placement is rows: there is no such file",
            "did you mean row",
        ),
        (
            "- {placement: {C9: {split: data}}}",
            "placement 1: placement of C9, which is not a table",
            "C1, C2",
        ),
        ("- {placement: auto}", "placement 1: placement is auto", "left out"),
        ("- {a: [", "no YAML", "write lines"),
    ],
)
def test_errors_in_a_file_are_named(tmp_path: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(StrettoError) as error:
        read(tmp_path, text)
    assert message in error.value.message
    assert error.value.hint is not None
    assert hint in error.value.hint


def test_drawn_samples_have_what_data_may_lack() -> None:
    tables = small(job(), 2).table_specs()
    (ragged,) = draw(features=tables, numbers=4, samples=40, count=1, kind="ragged", seed=1)
    assert {0, 3} <= set(ragged.ids.lengths.flatten().tolist())
    assert ragged.ids.weights is not None
    assert int(ragged.ids.ids.max()) > 2**40
    for spec, feature_ids in zip(tables, ragged.ids.ids.split(ragged.ids.counts()), strict=True):
        rows = feature_ids % spec.rows if spec.ids != "hash" else feature_ids
        assert len(rows.unique()) < len(rows), spec.name
    (batch,) = draw(features=tables, numbers=4, samples=7, count=1, kind="one", seed=1)
    assert batch.ids.hot == (1,) * len(tables)
    (fixed,) = draw(features=tables, numbers=4, samples=7, count=1, kind="fixed", seed=1)
    assert fixed.ids.hot is not None
    assert set(fixed.ids.hot) == {1, 2, 3}


def rows_of(config: RecommenderConfig, older: int = 0) -> list[list[list[int]]]:
    """By hash table and kind of samples: the ids with rows after the steps of a proof.

    Args:
        older: how much older than `max_age` ids get.
    """
    tables, size = config.table_specs(), config.batch.global_size
    rows_by_table = list[list[list[int]]]()
    for number, spec in enumerate(tables):
        if spec.ids != "hash":
            continue
        rows_by_table.append([])
        for kind in KINDS:
            ids = HashIds(replace(spec, max_age=None if spec.max_age is None else spec.max_age + older))
            drawn = draw(features=tables, numbers=4, samples=size, count=3, kind=kind, seed=KINDS.index(kind))
            for step, batch in enumerate(drawn):
                ids.evict(step)
                ids.rows(batch.ids.ids.split(batch.ids.counts())[number], step)
            state = ids.state()
            rows_by_table[-1].append(state["ids"][state["rows"] >= 0].tolist())
    return rows_by_table


Lowest = Callable[[Sequence[Tensor], int, Any], Tensor]


def in_order(order: Sequence[int]) -> Lowest:
    return lambda keys, k, group: lowest([keys[at] for at in order], k, group)


def newest(keys: Sequence[Tensor], k: int, group: Any) -> Tensor:
    return ~lowest(keys, len(keys[0]) - k, group)


def of_each_shard(keys: Sequence[Tensor], k: int, group: Any) -> Tensor:
    """As if each of two shards evicted half of them."""
    gone = torch.zeros(len(keys[0]), dtype=torch.bool)
    for part in (0, 1):
        shard = torch.nonzero(owner(keys[-1], 2) == part).flatten()
        gone[shard] = lowest([key[shard] for key in keys], min(k // 2, len(shard)), group)
    return gone


WRONG: dict[str, Lowest] = {
    **{f"order {order}": in_order(order) for order in permutations(range(3)) if order != (0, 1, 2)},
    "newest": newest,
    "each shard by itself": of_each_shard,
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("policy", ["least-frequent", "age"])
def test_all_cases_evict_among_equals(monkeypatch: pytest.MonkeyPatch, ranks: int, policy: str) -> None:
    """Any other choice of what to evict leaves other ids, under either policy."""
    config = small(job(), ranks)
    right = rows_of(config)
    tables = [spec for spec in config.table_specs() if spec.ids == "hash"]
    for name, wrong in WRONG.items():
        monkeypatch.setattr(hash_module, "lowest", wrong)
        rows_by_table = rows_of(config)
        assert any(
            rows != expected
            for spec, rows, expected in zip(tables, rows_by_table, right, strict=True)
            if spec.evict == policy
        ), name


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_cases_evict_by_age_alone(ranks: int) -> None:
    config = small(job(), ranks)
    aged = [spec.max_age is not None for spec in config.table_specs() if spec.ids == "hash"]
    differ = [rows != expected for rows, expected in zip(rows_of(config, 1), rows_of(config), strict=True)]
    assert differ == aged
