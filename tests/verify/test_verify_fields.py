"""Fields that a proof would not see: other values are chosen, or it says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stretto.job.rules import problems
from stretto.recommender.config.load import parse_config
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import TablePlacement, physical_tables
from stretto.run.config.schema import TrainConfig
from stretto.verify.language import fields
from stretto.verify.language.cases import configured_job, smaller
from stretto.verify.language.every import Every
from stretto.verify.language.fields import set_fields, with_effect, without_effect, without_ranks
from stretto.verify.language.proof import batches
from stretto.verify.language.reference import Trial
from stretto.verify.recommender.cases import configured_case
from stretto.verify.recommender.proof import job_fields, recommender_proof
from stretto.verify.run import run_proof
from texts import open_tokens
from tiny_job import LLAMA, job

HIDDEN = (
    *("model.attention.window=64", "model.attention.full_every=9", "model.attention.softcap=50"),
    *("model.logit_softcap=30", "lora.rank=4", "lora.alpha=4", "model.rope.type=dynamic"),
    *("model.rope.factor=4", "model.rope.original_positions=16"),
)


@pytest.fixture
def hidden(tmp_path: Path) -> TrainConfig:
    """A job with values at which fields do nothing on samples of 16 tokens."""
    return job(tmp_path, *HIDDEN, "optim.clip=100", "model.rope_theta=500", model=LLAMA)


def trial_of(config: TrainConfig) -> Trial:
    samples = batches(config, open_tokens(config), 2)
    return Trial(batches=samples, seed=1, total_steps=6)


def test_values_that_hide_a_field_are_changed_and_named(hidden: TrainConfig) -> None:
    shape, notes = with_effect(hidden.shape(300), 16)
    assert shape.attention.window == 5
    assert (shape.attention.full_every, shape.attention.softcap, shape.logit_softcap) == (2, 0.05, 0.05)
    assert shape.rope is not None
    assert shape.rope.original_positions == 8
    assert shape.lora is not None
    assert shape.lora.scale == 1.5
    assert "model.attention.window is 5 in place of 64" in notes
    assert "lora.alpha is 6 in place of 4" in notes
    assert with_effect(shape, 16) == (shape, [])


def test_fields_without_effect_are_found(hidden: TrainConfig) -> None:
    shape = hidden.shape(300)
    before = replace(configured_job(hidden), shape=shape)
    silent = without_effect(before, trial_of(hidden))
    assert {"model.attention.window=64", "model.rope.original_positions=16", "optim.clip=100"} <= {*silent}
    assert "model.rope_theta=500" not in silent
    after = without_effect(replace(before, shape=with_effect(shape, 16)[0]), trial_of(hidden))
    assert after == ["optim.clip=100"]


def test_fields_at_their_defaults_and_sizes_are_not_looked_at(tmp_path: Path) -> None:
    config = job(tmp_path, "optim.betas=[0.9, 0.9]", "model.norm_eps=1e-6", "model.dropout=0")
    named = {name: value for name, value, _ in set_fields(configured_job(config))}
    assert named["optim.betas"] == (0.9, 0.9)
    assert named["model.norm_eps"] == 1e-6
    assert not {"model.layers", "model.dropout", "optim.lr", "optim.clip"} & named.keys()


def test_choices_and_what_is_off_get_another_value(tmp_path: Path) -> None:
    config = job(tmp_path, "model.tied=false", model=LLAMA)
    before = configured_job(config)
    changed = {name: other for name, _, other in set_fields(before)}
    for name, value in (("norm", before.shape.norm), ("tied", False), ("mlp", before.shape.mlp)):
        other = changed[f"model.{name}"]
        assert other is not None
        assert getattr(other.shape, name) != value
        assert not problems(other)


def test_a_field_without_another_legal_value_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tmp_path, "optim.betas=[0.9, 0.9]", model=LLAMA)
    monkeypatch.setattr(fields, "problems", lambda job: [job])
    silent = without_effect(configured_job(config), trial_of(config))
    assert silent == ["optim.betas=[0.9, 0.9] (no other value is legal here)"]


def test_fields_of_a_recommender_without_effect_are_found() -> None:
    config = parse_config(
        """
        model:
          family: dlrm
          interaction: dot
          bottom: [8, 4]
          top: [4, 1]
          tables:
            - {rows: 30, pooling: mean}
            - {rows: 9, ids: quotient-remainder}
            - {rows: 8, ids: hash, evict_every: 50}
        optim: {dense: {weight_decay: 0.1}, tables: {name: adagrad, betas: [0.8, 0.9]}, clip: 100}
        train: {device: cpu}
        """,
        overrides=["batch.global_size=16"],
    )
    assert isinstance(config, RecommenderConfig)
    features = tuple(config.table_specs())
    named = {name: value for name, value, _ in job_fields((config, features))}
    assert {"model.tables.C2.ids", "optim.dense.weight_decay", "optim.tables.name"} <= named.keys()
    placements = {table.name: TablePlacement("table", (0,)) for table in physical_tables(features)}
    case = replace(configured_case(config, features, placements), samples="ragged")
    proof = recommender_proof(config, features, [case], 2, fields=True)
    assert run_proof(proof).unproved == [
        "model.tables.C3.evict_every=50",
        "optim.clip=100",
        "optim.tables.betas=[0.8, 0.9]",
    ]


def test_all_layouts_pad_samples_and_compute_the_loss_in_chunks(tmp_path: Path) -> None:
    config = smaller(job(tmp_path, "data.sequence=64", "train.loss_chunk=null", model=LLAMA), 2)
    assert config.data.sequence % 4
    cases = Every(configured_job(config), 2).cases
    assert {case.loss_chunk for case in cases} == {0, 13}
    assert {refusal.reason for refusal in without_ranks(cases)} == {
        "shards over some of the ranks with the same parameters need 4 ranks"
    }
    assert not [*without_ranks(Every(configured_job(smaller(config, 4)), 4).cases)]
