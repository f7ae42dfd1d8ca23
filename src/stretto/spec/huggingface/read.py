"""A `config.json` to a shape and back, by the description of its kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from stretto.errors import Problem, StrettoError, nearest
from stretto.spec.huggingface.facts import Facts, differences, facts_of, shape_of
from stretto.spec.huggingface.fields import Fields, shown
from stretto.spec.huggingface.kinds import KINDS, Kind
from stretto.spec.huggingface.parts import Config, Key
from stretto.spec.huggingface.silent import SILENT, VISION
from stretto.spec.shape import ModelShape

LARGEST = 16 * 2**20  # bytes of a config.json; published ones have kilobytes


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a `config.json` says.

    shape: of the model.
    kind: its `model_type`; of a model of language and pictures, that of its language model.
    unknown: keys that nothing here knows; they may change what the model computes.
    notes: what is left out, in sentences.
    """

    shape: ModelShape
    kind: str
    unknown: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read_config(values: Mapping[str, Any]) -> Reading:
    """What a `config.json`, read into a dictionary, says.

    Raises:
        StrettoError: a kind of model, or a part of one, that is not known here; a value of the wrong type, or
            one that our modules cannot compute.
    """
    name = values.get("model_type")
    if name == "gemma3" and "text_config" in values:
        return _read_gemma3(values)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        near = nearest(str(name)[:60], KINDS)
        hint = f"did you mean {near!r}?" if near else None
        raise StrettoError(f"model_type {shown(name)} is not one of {', '.join(KINDS)}", hint=hint)
    return _read(Fields(values), kind)


def shape_from_huggingface(values: Mapping[str, Any]) -> ModelShape:
    """The shape that a `config.json` describes; see `read_config`."""
    return read_config(values).shape


def read_shape(path: Path) -> ModelShape:
    """The shape of a `config.json`, or of the folder that it is in.

    Raises:
        StrettoError: no such file, no JSON, or a model that is not known here.
    """
    return read_file(path).shape


def read_file(path: Path) -> Reading:
    """What a `config.json` says, or that of a folder.

    Raises:
        StrettoError: no such file, no JSON, or a model that is not known here.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        if (size := file.stat().st_size) > LARGEST:
            raise StrettoError(f"{file} has {size} bytes, too many for a config.json")
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise StrettoError(f"cannot read {file}: {error.strerror}", hint="check the file's name") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, StrettoError):
            raise
        raise StrettoError(f"{file} is not JSON", hint="a config.json of Hugging Face is wanted") from None
    if not isinstance(values, dict):
        raise StrettoError(f"{file} is no mapping", hint="a config.json of Hugging Face is wanted")
    try:
        return read_config(cast("dict[str, Any]", values))
    except StrettoError as error:
        raise StrettoError(f"{file}: {error.message}", hint=error.hint) from None


def config_to_huggingface(shape: ModelShape) -> dict[str, Any]:
    """The `config.json` of a shape, without the tokeniser's special tokens. It is of the kind of the shape's
    family, or else of the first that expresses it.

    Raises:
        StrettoError: no kind of model in `transformers` computes the same.
    """
    kind = kind_of(shape)
    about = {"model_type": kind.name, "architectures": [kind.architecture], **kind.also}
    return {**about, **_written(shape, kind)}


@lru_cache(maxsize=256)
def kind_of(shape: ModelShape) -> Kind:
    """The kind of model that computes the same as a shape: that of its family, or else the first in the
    table. Reading what is written must give the same function, so nothing is lost.

    Raises:
        StrettoError: there is none; it names where the nearest differs.
    """
    order = sorted((kind for kind in KINDS.values() if not kind.planned_only), key=_of_family(shape))
    nearest_kind: tuple[int, str, str] | None = None
    for kind in order:
        try:
            back = _read(Fields(_written(shape, kind)), kind).shape
        except StrettoError:
            continue
        lost = differences(shape, back)
        if kind.name == "gpt2":
            lost.pop("bias", None)  # biases of zero
            for name in ("attention.qkv_bias", "attention.proj_bias"):
                lost.pop(name, None)
        if not lost:
            return kind
        name, (ours, theirs) = next(iter(lost.items()))
        if nearest_kind is None or len(lost) < nearest_kind[0]:
            what = f"{name} {ours!r} has no counterpart in {kind.architecture}"
            nearest_kind = (len(lost), what, f"it needs {name}: {theirs!r}")
    if nearest_kind is None:
        raise StrettoError("no kind of model in transformers has these sizes")
    raise StrettoError(nearest_kind[1], hint=nearest_kind[2])


def _of_family(shape: ModelShape) -> Any:
    return lambda kind: kind.family != shape.family


def _read_gemma3(values: Mapping[str, Any]) -> Reading:
    """The language model of a Gemma 3 that sees pictures too."""
    config = Fields(values)
    text = config.section("text_config")
    if text is None:
        raise StrettoError("text_config is missing in the model's config.json")
    kind = KINDS["gemma3_text"]
    config.use(SILENT | VISION)
    inner = text.with_usual("tie_word_embeddings", config.raw("tie_word_embeddings"))
    reading = _read(inner, kind)
    return Reading(
        shape=reading.shape,
        kind=kind.name,
        unknown=(*config.unused(), *reading.unknown),
        notes=(*reading.notes, "the language model only: its vision tower and projector are left out"),
    )


def _read(config: Fields, kind: Kind) -> Reading:
    facts: Facts = {}
    for part in kind.parts:
        part.read(config, facts)
    config.use(SILENT | kind.silent)
    try:
        shape = shape_of(facts, kind.family)
    except Problem as problem:
        theirs = {p.ours.rpartition(".")[2]: p.theirs for p in kind.parts if isinstance(p, Key)}
        name = theirs.get(problem.field)
        where = f"{problem.field} ({name} in config.json)" if name else problem.field
        raise Problem(where, shown(problem.value), problem.rule, problem.fix) from None
    notes = list[str]()
    if (quantised := config.section("quantization_config")) is not None:
        method = quantised.raw("quant_method")
        quantised.use_all()
        notes.append(f"the weights are quantised ({shown(method)})")
    if config.raw("num_nextn_predict_layers"):
        notes.append("its layers that predict further tokens (MTP) are left out")
    return Reading(shape=shape, kind=kind.name, unknown=tuple(config.unused()), notes=tuple(notes))


def _written(shape: ModelShape, kind: Kind) -> Config:
    facts = facts_of(shape)
    config: Config = {}
    for part in kind.parts:
        part.write(facts, config)
    return config
