"""Weights go on only into a model that computes the same: every field of a shape is compared, but a few."""

from __future__ import annotations

from copy import copy
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.engine.checkpoint.index import INDEX, write_index
from stretto.engine.checkpoint.manifest import Manifest, write_manifest
from stretto.engine.checkpoint.save import save
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.errors import StrettoError
from stretto.job.attention import AttentionShape, LatentShape, RopeScaling
from stretto.job.experts import ExpertShape
from stretto.job.huggingface import config_names
from stretto.job.lora import LoraShape
from stretto.job.shape import ModelShape, shape_to_record
from stretto.run.config.job import job_of
from stretto.run.config.load import parse
from stretto.run.config.schema import TrainConfig
from stretto.run.train.resume import MAY_DIFFER, check_fits, differing, read_meta

# a model with every part
FULL = ModelShape(
    family="deepseek_v3",
    layers=6,
    hidden=64,
    heads=4,
    head_dim=24,
    vocab=512,
    sequence=128,
    rope=RopeScaling(type="yarn", factor=4.0, original_positions=32),
    attention=AttentionShape(latent=LatentShape(kv_rank=16, rope_dim=8, value_dim=12)),
    moe=ExpertShape(experts=8),
    lora=LoraShape(rank=4, alpha=8.0),
)


def names_in(part: Any, prefix: str = "") -> list[str]:
    """The names of all fields of a shape and of the parts in it."""
    names = list[str]()
    for field in fields(part):
        value = getattr(part, field.name)
        inner = names_in(value, f"{prefix}{field.name}.") if is_dataclass(value) else [prefix + field.name]
        names += inner
    return names


def another(value: Any) -> Any:
    """Another value of the type, allowed or not."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return (*value, "another") if isinstance(value, tuple) else 3 if value is None else "another"


def changed(part: Any, name: str) -> Any:
    """The shape with another value of the field."""
    first, _, rest = name.partition(".")
    value, other = getattr(part, first), copy(part)
    object.__setattr__(other, first, changed(value, rest) if rest else another(value))
    return other


NO_FUNCTION = {
    "family",  # names usual values, and each of these is compared itself
    "rope.low_freq_factor",  # of llama3 positions
    "rope.high_freq_factor",
    "rope.mscale",  # of one with mscale_all_dim alone
    *("attention.full_every", "attention.local_theta"),  # of windows
    *("attention.buckets", "attention.max_distance"),  # of relative positions
    *("moe.balance", "moe.z", "moe.capacity", "moe.drop", "moe.correction_rate"),  # of training
    "moe.group_score",  # of one group
}
NAMED = {"sequence": "positions", "ffn": "moe.ffn"}  # where all blocks have experts, `ffn` is their width


@pytest.mark.parametrize("name", names_in(FULL))
def test_every_field_is_compared_or_said_to_change_no_function(name: str) -> None:
    named = NAMED.get(name, name)
    found = differing(FULL, changed(FULL, name))
    assert (named in found) == (named not in MAY_DIFFER and name not in NO_FUNCTION), found


def test_what_computes_the_same_may_be_said_in_another_way() -> None:
    same = replace(PLAIN, attention=AttentionShape(qkv_bias=False, query_scale=float(PLAIN.head_dim)))
    assert same != PLAIN
    assert not differing(PLAIN, same)
    windowed = replace(PLAIN, attention=AttentionShape(window=4, full_every=7))  # beyond the last layer
    assert not differing(windowed, replace(PLAIN, attention=AttentionShape(window=4)))
    assert set(differing(windowed, replace(PLAIN, attention=AttentionShape(window=4, full_every=2)))) == {
        "attention.full_every"
    }


def test_the_list_of_exceptions_names_fields_that_exist() -> None:
    assert config_names(FULL) >= set(MAY_DIFFER)


def test_learned_positions_are_weights() -> None:
    gpt = ModelShape(family="gpt", layers=2, hidden=16, heads=2, vocab=31, sequence=12)
    assert differing(gpt, replace(gpt, sequence=24)) == {"positions": (12, 24)}


def config_of(*overrides: str) -> TrainConfig:
    text = "model: {family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, vocab: 300, positions: 64}\n"
    return parse(text, overrides=overrides)


class Text:
    """A source of tokens, as the check sees it."""

    fingerprint = "same"


def check(tmp_path: Path, saved: ModelShape, *overrides: str) -> None:
    """Compare a checkpoint of the model with the config."""
    path = tmp_path / "step-00000000"
    path.mkdir()
    manifest = Manifest(
        step=0,
        world=1,
        tensors=0,
        dtypes={},
        saved="",
        stretto="",
        torch="",
        files={INDEX: write_index(path, {})},
        meta={"step": 0, "samples": 0, "tokens": 0, "model": shape_to_record(saved)},
    )
    write_manifest(path, manifest)
    config = config_of(*overrides)
    text: Any = Text()
    check_fits(path, job_of(config), text, config.checkpoint.may_differ)


PLAIN = config_of().shape()


@pytest.mark.parametrize(
    ("changes", "says", "hint"),
    [
        (
            {"rope_theta": 5e5},
            "its rope_theta is 500000.0, the config's is 10000.0",
            "model.rope_theta=500000.0,",
        ),
        ({"norm_eps": 1e-6}, "its norm_eps is 1e-06, the config's is 1e-05", "model.norm_eps=1e-06"),
        (
            {"rope": RopeScaling(type="llama3", factor=8.0, original_positions=16)},
            "its rope.type is llama3, the config's is None, and ",
            "model.rope.type=llama3 model.rope.factor=8.0 model.rope.original_positions=16",
        ),
        (
            {"attention": AttentionShape(window=16)},
            "its attention.window is 16, the config's is None",
            "model.attention.window=16",
        ),
        ({"tied": True}, "its tied is True", "model.tied=true"),
    ],
)
def test_the_field_both_values_and_the_fix_are_named(
    tmp_path: Path, changes: dict[str, Any], says: str, hint: str
) -> None:
    with pytest.raises(StrettoError) as caught:
        check(tmp_path, replace(PLAIN, **changes))
    assert says in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": RopeScaling(type="llama3", factor=8.0, original_positions=16), "rope_theta": 5e5},
        {"attention": AttentionShape(window=16, softcap=50.0, norm="head")},
        {"moe": ExpertShape(experts=4, top_k=1, scale=2.5)},
    ],
)
def test_the_overrides_of_the_hint_fix_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    shape = replace(PLAIN, **changes)
    with pytest.raises(StrettoError) as caught:
        check(tmp_path, shape)
    fix = (caught.value.hint or "").partition(", or the config")[0].split()
    assert not differing(shape, config_of(*fix).shape())
    # and from the other side: the config has the part, and the checkpoint has none of it
    (tmp_path / "other").mkdir()
    with pytest.raises(StrettoError) as caught:
        check(tmp_path / "other", PLAIN, *fix)
    back = (caught.value.hint or "").partition(", or the config")[0].split()
    assert not differing(PLAIN, config_of(*fix, *back).shape())


def test_a_field_that_may_differ_on_purpose(tmp_path: Path) -> None:
    longer = replace(PLAIN, rope_theta=5e5, rope=RopeScaling(type="linear", factor=2.0))
    check(tmp_path, longer, "checkpoint.may_differ=[rope_theta, rope]")
    (tmp_path / "again").mkdir()
    with pytest.raises(StrettoError, match=r"rope_thetta.*no field") as caught:
        check(tmp_path / "again", longer, "checkpoint.may_differ=[rope_thetta]")
    assert caught.value.hint == "did you mean rope_theta?"


META = {"step": 3, "samples": 12, "tokens": 48, "loss": 1.5, "model": shape_to_record(PLAIN)}


def states(tmp_path: Path, meta: dict[str, Any], name: str = "optim.exp_avg.w") -> Path:
    """A checkpoint of step 3 with a tensor of that name."""
    value = torch.zeros(2)
    return save(tmp_path, 3, {name: (value, ShardPlacement.unsharded(name, (2,)))}, meta)


def test_facts_to_go_on_with_are_there(tmp_path: Path) -> None:
    counts = ("step", "samples", "tokens")
    assert read_meta(states(tmp_path, META), counts) == META
    imported = states(tmp_path, {"imported": True}, name="model.w")  # weights alone
    assert read_meta(imported, counts) == {"imported": True}
    for name in ("samples", "tokens"):
        with pytest.raises(StrettoError, match=f"does not say its {name}"):
            read_meta(states(tmp_path, {key: value for key, value in META.items() if key != name}), counts)
    for meta in ({}, META | {"model": None}):
        with pytest.raises(StrettoError, match="what model it is of"):
            read_meta(states(tmp_path, meta), counts)
