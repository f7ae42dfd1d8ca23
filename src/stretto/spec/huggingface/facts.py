"""A shape as a flat record of facts, and where two shapes compute different functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from stretto.spec.attention import AttentionShape, LatentShape, RopeScaling
from stretto.spec.experts import ExpertShape
from stretto.spec.families import Family
from stretto.spec.lora import LoraShape
from stretto.spec.shape import ModelShape, fields_of

Facts = dict[str, Any]  # fields of a shape by name, those of its parts with a dot: `moe.experts`

_PARTS = {"attention": AttentionShape, "latent": LatentShape, "moe": ExpertShape, "rope": RopeScaling}
# what a shape has where a description says nothing
_PLAIN: Facts = {
    "position_embedding": "rotary",
    "mlp": "swiglu",
    "norm": "rms",
    "block_norms": "pre",
    "bias": False,
    "embedding_scale": 1.0,
    "logit_softcap": 0.0,
    "embedding_norm": False,
    "logit_scale": 1.0,
    "encoder_layers": 0,
}
_TRAINING = ("balance", "z", "capacity", "drop", "correction_rate")  # of experts: no part of the function
_OF_TYPE = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "truncate")}


def facts_of(shape: ModelShape) -> Facts:
    """Every fact of the shape, what is left to a usual value resolved."""
    facts = {name: value for name, value in fields_of(shape).items() if name not in ("family", "moe", "rope")}
    attention: AttentionShape = facts.pop("attention")
    latent = attention.latent
    facts |= _part("attention", attention)
    facts |= {"attention.qkv_bias": shape.qkv_bias, "attention.proj_bias": shape.proj_bias}
    facts["attention.query_scale"] = attention.query_scale or float(shape.head_dim)
    del facts["attention.latent"]
    facts |= {} if latent is None else _part("latent", latent)
    facts |= {} if shape.rope is None else _part("rope", shape.rope)
    if shape.moe is not None:
        facts |= {**_part("moe", shape.moe), "moe.ffn": shape.expert_ffn}
    return facts


def shape_of(facts: Facts, family: Family) -> ModelShape:
    """The shape with these facts; what is not said takes its plain value, whatever the family.

    Raises:
        StrettoError: the values do not fit each other.
    """
    values = {**_PLAIN, **{name: value for name, value in facts.items() if "." not in name}}
    parts = {part: _of_part(facts, part) for part in _PARTS}
    latent = LatentShape(**parts["latent"]) if parts["latent"] else None
    attention = parts["attention"]
    for name, usual in (("qkv_bias", values["bias"]), ("proj_bias", values["bias"])):
        attention[name] = None if attention.get(name) in (None, usual) else attention[name]
    if attention.get("query_scale") == values.get("head_dim"):
        attention["query_scale"] = None
    if parts["moe"] and parts["moe"].get("ffn") == values["ffn"]:
        parts["moe"]["ffn"] = None
    if attention.get("window") is None:
        attention |= {"full_every": 0, "local_theta": None}
    return ModelShape(
        family=family,
        **values,
        attention=AttentionShape(**attention, latent=latent),
        moe=ExpertShape(**parts["moe"]) if parts["moe"] else None,
        rope=RopeScaling(**parts["rope"]) if parts["rope"] else None,
    )


def differences(one: ModelShape, other: ModelShape) -> dict[str, tuple[Any, Any]]:
    """The facts in which the functions of two shapes with the same weights differ, and both values, by the
    names of fields under `model` in a config.
    """
    functions = _function(one), _function(other)
    plain = facts_of(one), facts_of(other)
    differing = dict[str, tuple[Any, Any]]()
    for name in dict.fromkeys((*functions[0], *functions[1])):
        one_of, other_of = _both(name, functions)
        # where all blocks of one have experts and those of the other have not, `moe` says so
        if one_of == other_of or (name == "ffn" and None in (one_of, other_of)):
            continue
        of = plain if name in _MADE_OF else functions  # fields that make up a fact are shown themselves
        for field in _MADE_OF.get(name, (name,)):
            values = _both(field, of)
            if values[0] != values[1]:
                differing[_config_name(field)] = values
    return differing


# a fact of the function, and the fields that it follows from
_MADE_OF = {
    "attention.window": ("attention.window", "attention.full_every"),
    "moe.dense_layers": ("moe.dense_layers", "moe.every"),
    "rope.magnitude": ("rope.attention_factor", "rope.mscale", "rope.mscale_all_dim"),
    "rope.score_factor": ("rope.mscale_all_dim",),
}


def config_names(shape: ModelShape) -> set[str]:
    """Names of fields under `model` in a config, and of the parts that hold some, that `differences` may
    name.
    """
    names = {_config_name(name) for name in (*facts_of(shape), *_lora(shape))}
    return names | {"attention", "attention.latent", "moe", "rope", "lora"}


def _config_name(fact: str) -> str:
    if fact.startswith("latent."):
        return f"attention.{fact}"
    return "positions" if fact == "sequence" else fact


def _both(name: str, facts: tuple[Facts, Facts]) -> tuple[Any, Any]:
    return facts[0].get(name), facts[1].get(name)


def _lora(shape: ModelShape) -> Facts:
    return {} if shape.lora is None else _part("lora", shape.lora)


def _function(shape: ModelShape) -> Facts:
    """The facts that its function depends on, each in one form only."""
    facts = facts_of(shape) | _lora(shape)
    del facts["lora"]
    blocks = [shape.block(i) for i in range(shape.layers)]
    windows = tuple(block.attention.window for block in blocks)
    facts |= {"attention.window": windows[0] if len(set(windows)) == 1 else windows}
    del facts["attention.full_every"]
    if not any(windows):
        del facts["attention.local_theta"]
    if not shape.rotary:
        for name in [name for name in facts if name.startswith("rope")]:
            del facts[name]
    if shape.relative:
        del facts["sequence"]
    else:
        del facts["attention.buckets"], facts["attention.max_distance"]
    if shape.rope is not None:
        facts |= _function_of_rope(shape, shape.rope)
    moe = shape.moe
    if moe is not None:
        sparse = tuple(block.moe is not None for block in blocks)
        facts["moe.dense_layers"] = 0 if all(sparse) else tuple(i for i, it in enumerate(sparse) if not it)
        for name in ("every", *_TRAINING):
            del facts[f"moe.{name}"]
        if moe.groups == moe.top_groups:
            facts |= {"moe.groups": 1, "moe.top_groups": 1, "moe.group_score": "max"}
        if all(sparse):
            del facts["ffn"]
    return facts


def _function_of_rope(shape: ModelShape, rope: RopeScaling) -> Facts:
    kept = _OF_TYPE.get(rope.type, ())
    unused = {name for names in _OF_TYPE.values() for name in names} - set(kept)
    unused |= {"attention_factor", "mscale", "mscale_all_dim"}
    unused |= {"original_positions"} if rope.type == "linear" else set()
    scores = rope.score_factor if shape.latent is not None else 1.0
    return {
        **{f"rope.{name}": None for name in unused},
        "rope.magnitude": rope.magnitude,
        "rope.score_factor": scores,
    }


def _part(name: str, part: AttentionShape | LatentShape | ExpertShape | RopeScaling | LoraShape) -> Facts:
    return {f"{name}.{field.name}": getattr(part, field.name) for field in fields(part)}


def _of_part(facts: Mapping[str, Any], part: str) -> dict[str, Any]:
    names = {field.name for field in fields(_PARTS[part])}
    return {name: facts[f"{part}.{name}"] for name in names if f"{part}.{name}" in facts}
