"""Converts a `config.json` to a shape and back, by the rules of its model type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from stretto.errors import Problem, StrettoError
from stretto.job.huggingface.fields import ShapeFields, differences, fields_by_name, shape_from_fields
from stretto.job.huggingface.keys import ConfigKeys, shown
from stretto.job.huggingface.model_types import MODEL_TYPES, ModelType
from stretto.job.huggingface.rules import Key, KeyValues
from stretto.job.huggingface.silent import SILENT, VISION
from stretto.job.shape import ModelShape

LARGEST = 16 * 2**20  # bytes of a config.json; published ones have some kilobytes


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A model as its `config.json` describes it.

    Attributes:
        kind: its `model_type`; for a multimodal model, that of its language model.
        unknown: keys that no rule reads; they may affect what the model computes.
        notes: sentences about parts that are left out.
    """

    shape: ModelShape
    kind: str
    unknown: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read_config(values: Mapping[str, Any]) -> Reading:
    """Read a parsed `config.json`.

    Raises:
        StrettoError: the kind of model or of a part is unknown, or a value has the wrong type or is one that
            Stretto's modules cannot compute.
    """
    name = values.get("model_type")
    if name == "gemma3" and "text_config" in values:
        return _read_gemma3(values)
    kind = MODEL_TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        built, planned = (
            ", ".join(kind.name for kind in MODEL_TYPES.values() if kind.planned_only is only)
            for only in (False, True)
        )
        raise StrettoError(  # names that are alike are other models: no nearest one is proposed
            f"model_type {shown(name)} is not one of {built}, nor of {planned}, which can only be planned",
            hint="`stretto train` takes its layers from a file: docs/do/own-model.md",
        )
    return _read(ConfigKeys(values), kind)


def shape_from_huggingface(values: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a `config.json` describes; see `read_config`."""
    return read_config(values).shape


def read_shape(path: Path) -> ModelShape:
    """Return the shape of a `config.json`; see `read_file`."""
    return read_file(path).shape


def read_file(path: Path) -> Reading:
    """Read a `config.json`, given as a file or its folder.

    Raises:
        StrettoError: the file does not exist, is not JSON or describes an unknown model.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        if (size := file.stat().st_size) > LARGEST:
            raise StrettoError(f"{file} has {size} bytes, too many for a config.json")
        content = file.read_bytes()
    except OSError as error:
        raise StrettoError(f"cannot read {file}: {error.strerror}", hint="check the file's name") from None
    return parse_config(content, str(file))


def parse_config(content: str | bytes, name: str) -> Reading:
    """Read the content of a `config.json`.

    Args:
        name: of the file, for messages.

    Raises:
        StrettoError: it is not JSON or describes an unknown model.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        raise StrettoError(f"{name} is not JSON", hint="use a config.json of Hugging Face") from None
    if not isinstance(values, dict):
        raise StrettoError(f"{name} is not a mapping", hint="use a config.json of Hugging Face")
    try:
        return read_config(cast("dict[str, Any]", values))
    except StrettoError as error:
        raise StrettoError(f"{name}: {error.message}", hint=error.hint) from None


def config_to_huggingface(shape: ModelShape) -> dict[str, Any]:
    """Return the `config.json` of a shape, without the tokeniser's special tokens. Its kind is that of the
    shape's family if this can express the shape, else the first that can.

    Raises:
        StrettoError: no kind of model in `transformers` computes the same function.
    """
    kind = kind_of(shape)
    about = {"model_type": kind.name, "architectures": [kind.architecture], **kind.also}
    return {**about, **_written(shape, kind)}


@lru_cache(maxsize=256)
def kind_of(shape: ModelShape) -> ModelType:
    """Return the kind of model that computes the same function as a shape: that of its family, or else the
    first in the table whose `config.json` reads back as the same function.

    Raises:
        StrettoError: no kind does; the message names a difference from the nearest one.
    """
    built = [kind for kind in MODEL_TYPES.values() if not kind.planned_only]
    order = sorted(built, key=lambda kind: kind.family != shape.family)
    nearest_kind: tuple[int, str, str] | None = None
    for kind in order:
        try:
            back = _read(ConfigKeys(_written(shape, kind)), kind).shape
        except StrettoError:
            continue
        lost = differences(shape, back)
        if kind.name == "gpt2":
            lost.pop("bias", None)  # biases of zero
            for name in ("attention.qkv_bias", "attention.proj_bias"):
                lost.pop(name, None)
        if not lost:
            return kind
        name, (value, nearest_value) = next(iter(lost.items()))
        if nearest_kind is None or len(lost) < nearest_kind[0]:
            message = f"{name} {value!r} has no counterpart in {kind.architecture}"
            nearest_kind = (len(lost), message, f"it needs {name}: {nearest_value!r}")
    if nearest_kind is None:
        raise StrettoError("no kind of model in transformers has these sizes")
    raise StrettoError(nearest_kind[1], hint=nearest_kind[2])


def _read_gemma3(values: Mapping[str, Any]) -> Reading:
    """Read the language model of a multimodal Gemma 3."""
    config = ConfigKeys(values)
    text = config.section("text_config")
    if text is None:
        raise StrettoError("text_config is missing in the model's config.json")
    kind = MODEL_TYPES["gemma3_text"]
    config.use(SILENT | VISION)
    inner = text.with_default("tie_word_embeddings", config.raw("tie_word_embeddings"))
    reading = _read(inner, kind)
    return Reading(
        shape=reading.shape,
        kind=kind.name,
        unknown=(*config.unused(), *reading.unknown),
        notes=(*reading.notes, "the language model only: its vision tower and projector are left out"),
    )


def _read(config: ConfigKeys, kind: ModelType) -> Reading:
    fields: ShapeFields = dict(kind.implied)
    for rule in kind.rules:
        rule.read(config, fields)
    config.use(SILENT | kind.silent)
    try:
        shape = shape_from_fields(fields, kind.family)
    except Problem as problem:
        keys = {rule.field.rpartition(".")[2]: rule.key for rule in kind.rules if isinstance(rule, Key)}
        key = keys.get(problem.field)
        name = f"{problem.field} ({key} in config.json)" if key else problem.field
        raise Problem(name, shown(problem.value), problem.rule, problem.fix) from None
    notes = list[str]()
    if (quantised := config.section("quantization_config")) is not None:
        method = quantised.raw("quant_method")
        quantised.use_all()
        notes.append(f"the weights are quantised ({shown(method)})")
    if config.raw("num_nextn_predict_layers"):
        notes.append("its layers that predict further tokens (MTP) are left out")
    return Reading(shape=shape, kind=kind.name, unknown=tuple(config.unused()), notes=tuple(notes))


def _written(shape: ModelShape, kind: ModelType) -> KeyValues:
    fields = fields_by_name(shape)
    config: KeyValues = {}
    for rule in kind.rules:
        rule.write(fields, config)
    return config
