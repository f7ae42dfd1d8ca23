"""Weights go on only into a model that computes the same: every field of a shape is compared, but a few."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from stretto.engine.checkpoint.files import FileEntry
from stretto.engine.checkpoint.index import INDEX
from stretto.engine.checkpoint.manifest import Manifest, write_manifest
from stretto.errors import StrettoError
from stretto.run.config.load import parse
from stretto.run.config.schema import TrainConfig
from stretto.run.train import resume
from stretto.run.train.resume import MAY_DIFFER, check_fits, differences
from stretto.spec.attention import AttentionShape, LatentShape, RopeScaling
from stretto.spec.experts import ExpertShape
from stretto.spec.lora import LoraShape
from stretto.spec.shape import ModelShape, shape_to_record

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


def changed(part: Any, name: str) -> Any:
    """The shape with another value of the field, allowed or not."""
    first, _, rest = name.partition(".")
    other = copy(part)
    object.__setattr__(other, first, changed(getattr(part, first), rest) if rest else "another")
    return other


@pytest.mark.parametrize("name", names_in(FULL))
def test_every_field_is_compared_or_said_to_change_no_function(name: str) -> None:
    other = changed(FULL, name)
    differing = [one.name for one in differences(FULL, other)]
    assert (name in differing) == (name not in MAY_DIFFER or (name == "sequence" and not FULL.rotary))


def test_the_list_of_exceptions_names_fields_that_exist() -> None:
    assert set(names_in(FULL)) >= set(MAY_DIFFER)


def test_a_field_of_tomorrow_is_compared_by_default() -> None:
    @dataclass(frozen=True)
    class Tomorrow:
        layers: int
        twist: float
        rotary: bool = True

    (one,) = differences(Tomorrow(2, 0.5), Tomorrow(2, 0.25))  # pyright: ignore[reportArgumentType]
    assert (one.name, one.theirs, one.ours) == ("twist", 0.5, 0.25)


def test_learned_positions_are_weights() -> None:
    gpt = ModelShape(family="gpt", layers=2, hidden=16, heads=2, vocab=31, sequence=12)
    (one,) = differences(gpt, replace(gpt, sequence=24))
    assert (one.name, one.theirs, one.ours) == ("positions", 12, 24)


def config_of(*overrides: str) -> TrainConfig:
    text = "model: {family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, vocab: 300, positions: 64}\n"
    return parse(text, overrides=overrides)


class Index:
    tokenizer = "same"


class Folder:
    index = Index()


def check(tmp_path: Path, theirs: ModelShape, *overrides: str) -> None:
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
        files={INDEX: FileEntry(0, 0)},
        meta={"model": shape_to_record(theirs)},
    )
    write_manifest(path, manifest)
    config = config_of(*overrides)
    check_fits(path, config, config.shape(), Folder())  # pyright: ignore[reportArgumentType]


PLAIN = config_of().shape()


@pytest.mark.parametrize(
    ("theirs", "says", "hint"),
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
    tmp_path: Path, theirs: dict[str, Any], says: str, hint: str
) -> None:
    with pytest.raises(StrettoError) as caught:
        check(tmp_path, replace(PLAIN, **theirs))
    assert says in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    "theirs",
    [
        {"rope": RopeScaling(type="llama3", factor=8.0, original_positions=16), "rope_theta": 5e5},
        {"attention": AttentionShape(window=16, softcap=50.0, norm="head")},
        {"moe": ExpertShape(experts=4, top_k=1, scale=2.5)},
    ],
)
def test_the_overrides_of_the_hint_fix_it(tmp_path: Path, theirs: dict[str, Any]) -> None:
    shape = replace(PLAIN, **theirs)
    with pytest.raises(StrettoError) as caught:
        check(tmp_path, shape)
    fix = (caught.value.hint or "").partition(", or the config")[0].split()
    assert not differences(shape, config_of(*fix).shape())
    # and from the other side: the config has the part, and the checkpoint has none of it
    (tmp_path / "other").mkdir()
    with pytest.raises(StrettoError) as caught:
        check(tmp_path / "other", PLAIN, *fix)
    back = (caught.value.hint or "").partition(", or the config")[0].split()
    assert not differences(PLAIN, config_of(*fix, *back).shape())


def test_a_field_that_may_differ_on_purpose(tmp_path: Path) -> None:
    longer = replace(PLAIN, rope_theta=5e5, rope=RopeScaling(type="linear", factor=2.0))
    check(tmp_path, longer, "checkpoint.may_differ=[rope_theta, rope]")
    (tmp_path / "again").mkdir()
    with pytest.raises(StrettoError, match=r"rope_thetta.*no field") as caught:
        check(tmp_path / "again", longer, "checkpoint.may_differ=[rope_thetta]")
    assert caught.value.hint == "did you mean rope_theta?"


def test_parts_of_shapes_are_dataclasses() -> None:
    """`_flat` looks into dataclasses: a part of another kind would be compared as one value."""
    hints = get_type_hints(ModelShape)
    parts = {one for hint in hints.values() for one in (get_args(hint) or (hint,)) if is_dataclass(one)}
    assert parts == {ExpertShape, AttentionShape, LoraShape, RopeScaling}
    assert resume._flat(FULL)["attention.latent.kv_rank"] == 16
