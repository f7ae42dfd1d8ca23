"""torchtitan's models: its flavours by the presets of the same sizes, and Llamas of other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from stretto.errors import Problem, StrettoError
from stretto.spec.initial import Initial
from stretto.spec.job import Job
from stretto.spec.presets import preset
from stretto.spec.shape import ModelShape, fields_of
from stretto_interop.frameworks.fields import MODEL, NAMES, JobValues, values_of
from stretto_interop.frameworks.mapping import Settings, Values, refused

BEGIN = tuple(f"model.{entry.name}" for entry in fields(Initial))
MODEL_FIELDS = tuple(name for name in NAMES if name.startswith("model.") and name not in BEGIN)
# flavours by the name of their module, and the presets of the same sizes
FLAVOURS: Mapping[tuple[str, str], str] = {
    ("llama3", "1B"): "llama3.2-1b",
    ("llama3", "3B"): "llama3.2-3b",
    ("llama3", "8B"): "llama3-8b",
    ("llama3", "70B"): "llama3-70b",
    ("llama3", "405B"): "llama3.1-405b",
    **{("qwen3", size): f"qwen3-{size.lower()}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    **{("qwen3", size): f"qwen3-{size.lower()}" for size in ("30B-A3B", "235B-A22B")},
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "671B"): "deepseek-v3",
}
# sizes of a model of the llama3 module that is no flavour, by the field of ours
_SIZES = {
    "layers": "n_layers",
    "hidden": "dim",
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "ffn": "hidden_dim",
    "vocab": "vocab_size",
    "rope_theta": "theta",
    "tied": "enable_weight_tying",
    "sequence": "max_seq_len",
}
_DEBUG = {  # its smallest flavour, which no preset has
    "layers": 6,
    "hidden": 256,
    "heads": 16,
    "ffn": 768,
    "vocab": 2048,
    "rope_theta": 500000.0,
    "sequence": 131072,
}


def write_model(values: JobValues) -> Settings:
    shape = replace(values.job.shape, lora=None)  # which another rule is about
    if shape.tied and values.job.layout.pp > 1:
        rule = "torchtitan's pipelines have no weights that stages share"
        raise Problem("model.tied", "true", rule, "model.tied=false, or layout.pp=1")
    for (module, flavour), name in FLAVOURS.items():
        shape_of_flavour = preset(name)
        if (
            replace(shape_of_flavour, **{**fields_of(shape), "sequence": shape_of_flavour.sequence})
            == shape_of_flavour
        ):
            return {"model.name": module, "model.flavor": flavour}
    _check_llama(shape)
    return {"model.name": "llama3", "model.sizes": {to: getattr(shape, of) for of, to in _SIZES.items()}}


def _check_llama(shape: ModelShape) -> None:
    """Raise Problem for what torchtitan's llama3 module does not build."""
    if not shape.rotary:
        raise refused(MODEL.family, shape.family, "torchtitan has no GPT-2", ["llama"])
    plain = ModelShape(
        family="llama",
        **{name: getattr(shape, name) for name in (*_SIZES, "norm_eps") if name != "kv_heads"},
        kv_heads=shape.kv_heads,
    )
    plain_llama = replace(plain, norm_eps=1e-5)
    rule = "torchtitan has experts in its own flavours only, and this model is none of them"
    if shape.moe is not None:
        raise Problem("model.moe.experts", shape.moe.experts, rule, "a preset such as qwen3-30b-a3b")
    for name, value in fields_of(shape).items():
        if value != getattr(plain_llama, name):
            rule = "torchtitan has it in its own flavours only, and this model is none of them"
            raise Problem(
                f"model.{name}", value, rule, f"model.{name}={getattr(plain_llama, name)}, or a preset"
            )


def read_model(settings: Settings) -> Values:
    sizes = settings.get("model.sizes")
    module, flavour = settings.get("model.name"), str(settings.get("model.flavor", "debugmodel"))
    if sizes is not None:
        return _model_choices({of: sizes[to] for of, to in _SIZES.items()})
    if module is not None and (module, flavour) in FLAVOURS:
        shape = preset(FLAVOURS[module, flavour])
        return {name: value for name, value in _values_of_shape(shape).items() if value is not None}
    if (module, flavour) == ("llama3", "debugmodel"):
        return _model_choices(_DEBUG)
    if module is None:
        return {}
    shape_of_flavour = ", ".join(f"{entry} {size}" for entry, size in FLAVOURS)
    raise StrettoError(
        f"the model is {module} {flavour}: not known here", hint=f"what is: {shape_of_flavour}; or --model"
    )


def _model_choices(sizes: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        MODEL.family: "llama",
        **{f"model.{'positions' if name == 'sequence' else name}": value for name, value in sizes.items()},
    }


def _values_of_shape(shape: ModelShape) -> Mapping[str, Any]:
    values = values_of(Job(shape=shape)).values
    return {name: values[name] for name in MODEL_FIELDS}
