"""A recommender's config: what it takes, what it makes of it, what it refuses and how it says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from recommender_job import folder_of
from stretto.cli.jobs import load_language, reference
from stretto.errors import StrettoError
from stretto.recommender.config.check import find_problems
from stretto.recommender.config.load import is_recommender, load_config, parse_config
from stretto.recommender.config.model import Feature
from stretto.recommender.config.placement import configured_placements
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import Placements, TablePlacement, TableSpec
from stretto.recommender.shape import DLRM_PRESETS
from stretto.run.config.load import dump
from stretto.run.config.schema import TrainConfig
from stretto.run.config.section import config_fields, fields_of, item_of

SMALL = """
model:
  family: dlrm
  bottom: [32, 16]
  top: [32, 1]
  tables:
    - {rows: 100, pooling: mean, hot: 3}
    - {name: shop, rows: 30, ids: hash}
    - {rows: 1000, ids: quotient-remainder, divisor: 10}
layout: {ranks: 2}
"""


def config(*overrides: str, text: str = SMALL) -> RecommenderConfig:
    parsed = parse_config(text, "job.yaml", overrides)
    assert isinstance(parsed, RecommenderConfig)
    return parsed


def fails(*overrides: str, text: str = SMALL) -> StrettoError:
    with pytest.raises(StrettoError) as caught:
        config(*overrides, text=text)
    return caught.value


def problems(*overrides: str) -> list[str]:
    return [problem.message for problem in find_problems(config(*overrides))]


def test_a_family_or_a_preset_makes_it_a_recommender() -> None:
    assert is_recommender({"model": {"family": "dlrm"}})
    assert is_recommender({"model": {"preset": "DLRM_dcnv2"}})
    assert is_recommender({}, ["model.preset=dlrm-kaggle"])
    assert not is_recommender({"model": {"preset": "gpt2"}})
    assert not is_recommender({"model": {"family": "dlrm"}}, ["model.family=gpt"])
    assert not is_recommender({"model": None})
    assert isinstance(parse_config("model: {preset: gpt2}"), TrainConfig)
    assert all(is_recommender({"model": {"preset": name}}) for name in DLRM_PRESETS)


def test_a_command_for_language_models_says_that_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "dlrm.yaml").write_text(SMALL)
    (tmp_path / "gpt.yaml").write_text("model: {preset: gpt2}")
    with pytest.raises(StrettoError, match="is the config of a recommender"):
        load_language(tmp_path / "dlrm.yaml")
    with pytest.raises(StrettoError, match="is the config of a recommender"):
        load_language(tmp_path / "gpt.yaml", ["model.preset=dlrm-dot"])
    assert isinstance(load_config(tmp_path / "dlrm.yaml"), RecommenderConfig)
    assert load_config(tmp_path / "dlrm.yaml").run.name == "dlrm"


def test_tables_have_their_names_their_width_and_what_was_said() -> None:
    tables = config().table_specs()
    assert [(t.name, t.rows, t.dim, t.pooling, t.hot) for t in tables] == [
        ("C1", 100, 16, "mean", 3.0),
        ("shop", 30, 16, "sum", 1.0),
        ("C3", 1000, 16, "sum", 1.0),
    ]
    assert [t.ids for t in tables] == ["modulo", "hash", "quotient-remainder"]
    shape = config().shape()
    assert (shape.dim, shape.vectors, shape.top, shape.dense) == (16, 4, (32, 1), 13)
    assert parse_config(dump(config())) == config()


def test_rows_are_those_of_the_model_else_the_presets_else_the_datas() -> None:
    plain = ["model.tables=null"]
    assert [t.rows for t in config(*plain, "model.rows=[5, 6]").table_specs()] == [5, 6]
    few = config("model={preset: dlrm-dcnv2, max_rows: 1000}").table_specs()
    assert (len(few), few[0].rows, few[5].rows) == (26, 1000, 3)
    assert few[20].hot == 100
    drawn = config(*plain, "data.synthetic={features: 3, rows: [10, 1000], hot: 2}").table_specs()
    assert [(t.rows, t.hot) for t in drawn] == [(10, 2), (100, 2), (1000, 2)]
    of_data = config(*plain).table_specs([Feature("a", 7, 1.5), Feature("b", 8, 1.0)])
    assert [(t.name, t.rows, t.hot) for t in of_data] == [("a", 7, 1.5), ("b", 8, 1.0)]
    with pytest.raises(StrettoError, match="3 tables, the data 2"):
        config().table_specs([7, 8])
    with pytest.raises(StrettoError, match="no bound in the data"):
        config(*plain).table_specs([Feature("a", None)])
    with pytest.raises(StrettoError, match="known only with the data"):
        config(*plain, "data.source=clicks").table_specs()


def test_the_dense_optimiser_is_built_as_for_language_models() -> None:
    optimiser = config("optim.dense={name: lamb, lr: 0.5, weight_decay: 0.25}").dense_optimiser()
    assert (optimiser.name, optimiser.lr, optimiser.weight_decay, optimiser.betas) == (
        "lamb",
        0.5,
        0.25,
        (0.9, 0.999),
    )


@pytest.mark.parametrize(
    ("override", "says", "hint"),
    [
        ("model.tables=[{row: 1}]", "there is no field model.tables.0.row", None),
        (
            "model.tables=[{rows: 0}]",
            "model.tables.0.rows is 0, must be a whole number above 0, or null",
            None,
        ),
        ("model.tables=[{pooling: max}]", "model.tables.0.pooling is 'max'", "did you mean mean"),
        ("model.tables=[]", "model has tables: []", None),
        ("model.tables=[{name: a}, {name: a}]", "two tables of the name a", None),
        ("model.rows=[3]", "model has rows and tables", None),
        ("model.top=[8, 2]", "top network that ends with 2", "top: [8, 1]"),
        ("model.top=null", "model has no top", None),
        ("model.bottom=[0]", "has bottom: [0]", None),
        ("model.cross_rank=3", "has cross_rank: 3 and interaction: dot", "interaction: dcn"),
        ("model.preset=dlrm-dcn", "model.preset", None),
        ("optim.tables.name=adam", "optim.tables.name is 'adam'", None),
        ("layout.tp=2", "there is no field layout.tp", None),
        ("batch.micro_size=2", "there is no field batch.micro_size", None),
        ("data.synthetic.rows=[9, 3]", "data.synthetic has rows: [9, 3]", "the smaller first"),
        ("train.dtype=bfloat16", "train.dtype is 'bfloat16'", None),
    ],
)
def test_what_is_wrong_is_said(override: str, says: str, hint: str | None) -> None:
    error = fails(override)
    assert says in error.message or override.startswith("model.preset")
    assert hint is None or hint in str(error.hint)


def test_an_error_of_a_table_has_its_line() -> None:
    error = fails(text=SMALL.replace("rows: 30,", "rows: 30, admits: 3,"))
    assert error.message == "job.yaml:8: there is no field model.tables.1.admits"


def test_a_job_without_fault_has_no_problem() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["tables.placement=rwo"], "tables.placement is rwo: there is no such file"),
        (["tables.placement=data"], "data-parallel with ids: hash"),
        (["tables.placement={C1: {split: row, ranks: [0, 5]}}"], "placement of table C1: ranks has 5"),
        (["tables.placement={C1: {split: row, ranks: all}}"], "table shop has no placement"),
        (["tables.placement=row", "tables.place=cpu"], "place of table shop is cpu"),
        (["tables.placement={C9: {split: data}}"], "placement of C9, which is not a table"),
        (["layout.ranks_per_node=3"], "it must divide layout.ranks=2"),
        (["batch.global_size=1"], "every one of layout.ranks=2 needs a sample"),
        (["optim.dense.momentum=0.9"], "optim.dense.momentum is 0.9: adamw has none"),
        (["optim.tables.betas=[0.9, 1.0]"], "optim.tables.betas"),
        (["optim.tables.name=split_sgd", "train.dtype=float64"], "train.dtype is float64"),
        (["tables.wire=bfloat16", "train.dtype=float64"], "tables.wire is bfloat16"),
        (["data.valid=0", "eval.every=5"], "data.valid is 0"),
        (["data.split=last-part"], "synthetic clicks have no parts"),
        (["data.source=none/at/all"], "data.source is none/at/all: there is no such file or folder"),
        (["data.source='*.none'"], "the pattern matches no file"),
        (["checkpoint.resume=atuo"], "checkpoint.resume is atuo: there is no such folder"),
        (["model.tables=[{rows: 3, ids: hash, evict: age}]"], "max_age of table C1"),
        (["tables.folder=job.yaml/there"], "job.yaml is a file"),
        ([f"run.dir={'x' * 300}"], "names have at most 255 bytes"),
        ([f"tables.placement={'x' * 300}"], "there is no such file"),
        (
            ["data.threshold=5"],
            "data.threshold is 5: it is for files of a log, and data.source=synthetic",
        ),
        (["data.source=made", "data.hash_rows=9"], "data.source=made is a click folder, which was made with"),
    ],
)
def test_what_cannot_be_is_known_before_ranks_start(
    overrides: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("")
    folder_of(tmp_path / "made", 3)
    assert any(says in problem for problem in problems(*overrides)), problems(*overrides)


def test_ranks_of_torchrun_and_gpus_bound_the_job() -> None:
    assert "torchrun has started 4" in str(find_problems(config(), world=4)[0])
    assert "there are 1" in str(find_problems(config(), devices=1)[0])
    assert find_problems(config(), world=2, devices=2) == []


def placements_of(config: RecommenderConfig, tables: list[TableSpec]) -> Placements | None:
    return configured_placements(config.tables, config.layout, tables)


def test_placements_come_from_a_name_a_mapping_or_a_file(tmp_path: Path) -> None:
    tables = config().table_specs()
    assert placements_of(config(), tables) is None
    by_rows = placements_of(config("tables.placement=row"), tables)
    assert by_rows is not None
    assert list(by_rows) == ["C1", "shop", "C3.quotient", "C3.remainder"]
    assert {each.split for each in by_rows.values()} == {"row"}
    text = "{C1: {split: column, ranks: [1, 0]}, shop: {split: table, ranks: [1]}, C3: {split: data}}"
    named = placements_of(config(f"tables.placement={text}"), tables)
    assert named is not None
    assert named["C1"] == TablePlacement("column", (1, 0))
    assert named["C3.quotient"] == named["C3.remainder"] == TablePlacement("data")
    path = tmp_path / "placement.yaml"
    path.write_text(text.strip("{}").replace("}, ", "}\n").replace("data", "data}"))
    assert placements_of(config(f"tables.placement={path}"), tables) == named


def test_every_field_is_described() -> None:
    text = reference()
    for path, field in fields_of(RecommenderConfig):
        assert field.field is not None
        assert field.field.doc.endswith("."), path
        assert f"| `{path[-1]}` |" in text
        item = item_of(field)
        for name in config_fields(item) if item is not None else ():
            assert f"| `{name}` |" in text
