"""A shape as a flat mapping of fields, and the fields in which the functions of two shapes differ."""

from __future__ import annotations

from typing import Any

from stretto.job.attention import AttentionShape, LatentShape, RopeScaling
from stretto.job.experts import ExpertShape
from stretto.job.families import Family
from stretto.job.field import declared
from stretto.job.shape import ModelShape, fields_of

ShapeFields = dict[str, Any]  # fields of a shape by name; names in parts have a dot: `moe.experts`

_PARTS = {"attention": AttentionShape, "latent": LatentShape, "moe": ExpertShape, "rope": RopeScaling}
# defaults of fields that a description does not set, for all families
_DEFAULTS: ShapeFields = {
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
_TRAINING = ("balance", "z", "capacity", "drop", "correction_rate")  # `moe` fields outside the function
_OF_TYPE = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "truncate")}


def fields_by_name(shape: ModelShape) -> ShapeFields:
    """Return every field of the shape and of its parts, with the effective value where None is a default."""
    named = {
        name: value
        for name, value in fields_of(shape).items()
        if name not in ("family", "attention", "moe", "rope")
    }
    attention = shape.attention
    parts = {"attention": attention, "latent": attention.latent, "rope": shape.rope, "moe": shape.moe}
    for part, instance in parts.items():
        if instance is not None:
            named |= {f"{part}.{name}": getattr(instance, name) for name in declared(type(instance))}
    del named["attention.latent"]
    named |= {"attention.qkv_bias": shape.qkv_bias, "attention.proj_bias": shape.proj_bias}
    named["attention.query_scale"] = attention.query_scale or float(shape.head_dim)
    return named | ({} if shape.moe is None else {"moe.ffn": shape.expert_ffn})


def shape_from_fields(named: ShapeFields, family: Family) -> ModelShape:
    """Return the shape with these fields; other fields have defaults that do not depend on the family.

    Raises:
        StrettoError: the values contradict each other.
    """
    values = {**_DEFAULTS, **{name: value for name, value in named.items() if "." not in name}}
    parts = {
        part: {name: named[f"{part}.{name}"] for name in declared(kind) if f"{part}.{name}" in named}
        for part, kind in _PARTS.items()
    }
    attention = parts["attention"]
    for name in ("qkv_bias", "proj_bias"):
        if attention.get(name) == values["bias"]:
            attention[name] = None
    if attention.get("query_scale") == values.get("head_dim"):
        attention["query_scale"] = None
    if parts["moe"] and parts["moe"].get("ffn") == values["ffn"]:
        parts["moe"]["ffn"] = None
    if attention.get("window") is None:
        attention |= {"full_every": 0, "local_theta": None}
    latent = LatentShape(**parts["latent"]) if parts["latent"] else None
    return ModelShape(
        family=family,
        **values,
        attention=AttentionShape(**attention, latent=latent),
        moe=ExpertShape(**parts["moe"]) if parts["moe"] else None,
        rope=RopeScaling(**parts["rope"]) if parts["rope"] else None,
    )


def differences(shape: ModelShape, other: ModelShape) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which the functions of two shapes with the same weights differ, with both values,
    by their names under `model` in a config.
    """
    functions = _function(shape), _function(other)
    every = fields_by_name(shape), fields_by_name(other)
    differing = dict[str, tuple[Any, Any]]()
    for name in functions[0] | functions[1]:
        values = functions[0].get(name), functions[1].get(name)
        # if all blocks of one shape have experts and those of the other do not, `moe` shows it
        if values[0] == values[1] or (name == "ffn" and None in values):
            continue
        source = every if name in _DETERMINED_BY else functions
        for field in _DETERMINED_BY.get(name, (name,)):
            values = source[0].get(field), source[1].get(field)
            if values[0] != values[1]:
                differing[_config_name(field)] = values
    return differing


# entries of `_function`, and the fields that determine them
_DETERMINED_BY = {
    "attention.window": ("attention.window", "attention.full_every"),
    "moe.dense_layers": ("moe.dense_layers", "moe.every"),
    "rope.magnitude": ("rope.attention_factor", "rope.mscale", "rope.mscale_all_dim"),
    "rope.score_factor": ("rope.mscale_all_dim",),
}


def config_names(shape: ModelShape) -> set[str]:
    """Return the names of fields and parts under `model` in a config that `differences` may contain."""
    names = {_config_name(name) for name in (*fields_by_name(shape), *_adapters(shape))}
    return names | {"attention", "attention.latent", "moe", "rope", "lora"}


def _config_name(field: str) -> str:
    if field.startswith("latent."):
        return f"attention.{field}"
    return "positions" if field == "sequence" else field


def _adapters(shape: ModelShape) -> ShapeFields:
    lora = shape.lora
    return {} if lora is None else {f"lora.{name}": getattr(lora, name) for name in declared(type(lora))}


def _function(shape: ModelShape) -> ShapeFields:
    """Return the values that determine the shape's function, in a canonical form."""
    values = fields_by_name(shape) | _adapters(shape)
    del values["lora"]
    blocks = [shape.block(i) for i in range(shape.layers)]
    windows = tuple(block.attention.window for block in blocks)
    values |= {"attention.window": windows[0] if len(set(windows)) == 1 else windows}
    del values["attention.full_every"]
    if not any(windows):
        del values["attention.local_theta"]
    if not shape.rotary:
        for name in [name for name in values if name.startswith("rope")]:
            del values[name]
    if shape.relative:
        del values["sequence"]
    else:
        del values["attention.buckets"], values["attention.max_distance"]
    if (rope := shape.rope) is not None:
        unused = {name for names in _OF_TYPE.values() for name in names} - set(_OF_TYPE.get(rope.type, ()))
        unused |= {"attention_factor", "mscale", "mscale_all_dim"}
        unused |= {"original_positions"} if rope.type == "linear" else set()
        values |= {f"rope.{name}": None for name in unused}
        values["rope.magnitude"] = rope.magnitude
        values["rope.score_factor"] = rope.score_factor if shape.latent is not None else 1.0
    if (moe := shape.moe) is not None:
        sparse = tuple(block.moe is not None for block in blocks)
        values["moe.dense_layers"] = 0 if all(sparse) else tuple(i for i, it in enumerate(sparse) if not it)
        for name in ("every", *_TRAINING):
            del values[f"moe.{name}"]
        if moe.groups == moe.top_groups:
            values |= {"moe.groups": 1, "moe.top_groups": 1, "moe.group_score": "max"}
        if all(sparse):
            del values["ffn"]
    return values
