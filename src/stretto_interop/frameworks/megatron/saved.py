"""Megatron-LM's arguments as its checkpoints keep them: attributes of a namespace, after its parser."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stretto.errors import StrettoError
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.run.config.sources import megatron_prefix
from stretto_interop.frameworks.fields import job_from, values_of
from stretto_interop.frameworks.mapping import read_rule
from stretto_interop.frameworks.megatron.arguments import Argument, arguments
from stretto_interop.frameworks.megatron.model import MODEL_RULES
from stretto_interop.frameworks.megatron.training import TRAINING

# attributes that say the opposite of their argument
_OPPOSITE = {
    "disable-bias-linear": "add_bias_linear",
    "no-position-embedding": "add_position_embedding",
    "no-yarn-correction-range-round-to-int": "yarn_correction_range_round_to_int",
}
# arguments that no price depends on and the model's outputs do, and the only value that is the same here
_FIXED = {
    "rotary_percent": (1.0, "the whole head is rotated"),
    "rotary_seq_len_interpolation_factor": (None, "positions are not stretched"),
    "apply_residual_connection_post_layernorm": (False, "the residual stream is not normalised"),
    "no_rope_freq": (None, "every layer has positions"),
    "qk_l2_norm": (False, "queries and keys have no norm without weights"),
    "add_position_embedding": (True, "positions are embedded"),
    "mtp_num_layers": (None, "one token is predicted"),
}
_SECTIONS = ("data", "batch", "optim", "train")
TRIED_WITH = "core_v0.16.1"  # the version that has loaded checkpoints written here
_FILES = ("data.source", "data.tokenizer")
_TAKEN = (
    *_FILES,
    "data.split",
    "data.packing",
    "data.sequence",
    "optim.betas",
    "optim.eps",
    "optim.lr",
    "optim.weight_decay",
    "optim.clip",
    "train.steps",
    "train.dtype",
)


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What the arguments of a checkpoint say.

    Attributes:
        changes: by section of a config, fields of the run: sequence, batch, optimiser, learning rate, steps.
        notes: what is not the same here, a sentence each.
    """

    shape: ModelShape
    changes: Mapping[str, Mapping[str, Any]]
    notes: list[str]


def read_saved(args: Mapping[str, Any], source: str) -> SavedRun:
    """The model and the run that a checkpoint's arguments describe.

    Text and tokenizer are taken where this machine has their files.

    Args:
        args: attributes of the namespace; those that are no plain data may be missing.
        source: where they come from, for errors.

    Raises:
        StrettoError: they lack the sizes of a model, or are of a model that is not built here.
    """
    missing = [n for n in ("num_layers", "hidden_size", "num_attention_heads") if not args.get(n)]
    if missing:
        raise StrettoError(
            f"{source} does not say which model it is of: it lacks {', '.join(missing)}",
            hint="say it with --model: a name of `stretto catalogue`, a config.json, or a config of a run",
        )
    for name, (default, meaning) in _FIXED.items():
        value = args.get(name, default)
        if value != default and not (value is None and default is False):
            raise StrettoError(
                f"{source}: its argument {name} is {value!r}, a model that is not built here",
                hint=f"what is: {name} {default!r}, where {meaning}",
            )
    if args.get("apply_layernorm_1p") and args.get("normalization", "LayerNorm") == "LayerNorm":
        raise StrettoError(
            f"{source}: its argument apply_layernorm_1p is not read beside normalization LayerNorm",
            hint="what is: RMSNorm with it, or LayerNorm without",
        )
    rules = (*MODEL_RULES, *TRAINING)
    settings = _settings(args, {name for rule in rules for name in rule.settings} | {"global-batch-size"})
    settings.pop("mock-data", None)  # made-up tokens are no text to continue with
    values, notes = dict[str, Any](), list(_notes(args))
    for rule in rules:
        if rule.read is not None:
            try:
                values |= read_rule(rule, settings)
            except StrettoError as error:
                if not all(name.startswith("data.") for name in rule.fields):
                    raise
                notes.append(error.message)
    for name in _FILES:
        if name in values and (missing := _not_here(name, values[name])):
            notes.append(f"name {name}: {', '.join(missing)}, which it was there, is not on this machine")
            del values[name]
    shape = job_from({name: value for name, value in values.items() if name.startswith("model.")}).shape
    return SavedRun(shape=shape, changes=_changes(args, values), notes=notes)


def _not_here(field: str, value: Any) -> list[str]:
    """Of the files that a field names, those that this machine lacks."""
    names: list[str] = [] if value is None else [value] if isinstance(value, str) else list(value)
    if field == "data.source":
        return [name for name in names if megatron_prefix(name) is None]
    return [name for name in names if not os.path.exists(name)]


def _settings(args: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The arguments as a command line has them."""
    result, all_arguments = dict[str, Any](), arguments()
    for name in sorted(set(names)):
        argument = all_arguments.get(name)
        if argument is None:
            continue
        value = args.get(_OPPOSITE.get(argument.name, _attribute(argument.name)))
        if argument.name in _OPPOSITE:
            value = value is False
        if value is None or (argument.values == "flag" and value is not True):
            continue
        result[argument.name] = _as_argument(argument, value)
    return result


def _as_argument(argument: Argument, value: Any) -> Any:
    if argument.values in ("+", "*"):
        return list(value) if isinstance(value, list | tuple) else [value]
    if argument.kind == "str" and not isinstance(value, str):
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return value


def _attribute(name: str) -> str:
    return name.replace("-", "_")


def _changes(args: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Fields of the run, section by section."""
    result: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for name in _TAKEN:
        section, _, field = name.partition(".")
        if values.get(name) is not None and section in result:
            value = values[name]
            result[section][field] = list(value) if isinstance(value, tuple) else value
    rate = {n.removeprefix("optim.rate."): v for n, v in values.items() if n.startswith("optim.rate.")}
    if values.get("optim.lr") is not None:
        result["optim"]["rate"] = rate
    for name, field in (("global_batch_size", "global_size"), ("micro_batch_size", "micro_size")):
        if isinstance(size := args.get(name), int) and size > 0:
            result["batch"][field] = size
    return {name: section for name, section in result.items() if section}


def _notes(args: Mapping[str, Any]) -> Iterable[str]:
    gated = args.get("swiglu") or args.get("squared_relu")
    if not gated and args.get("bias_gelu_fusion") is False and not args.get("openai_gelu"):
        yield (
            "Megatron computed GELU by the error function (--no-bias-gelu-fusion), here it is the form with "
            "tanh: activations differ by up to 5e-4"
        )
    if (
        args.get("hidden_dropout")
        and args.get("position_embedding_type", "learned_absolute") != "learned_absolute"
    ):
        yield "dropout is left out: models with rotary positions have none here"


def saved_arguments(shape: ModelShape) -> dict[str, Any]:
    """The attributes that a checkpoint's namespace has for a model.

    Raises:
        StrettoError: Megatron-LM has no such model.
    """
    values, settings = values_of(Job(shape=shape)), dict[str, Any]()
    for rule in MODEL_RULES:
        settings |= rule.write(values)
    all_arguments = arguments()
    read = {name for rule in MODEL_RULES for name in rule.settings}
    result = {
        _attribute(name): False
        for name in read
        if name in all_arguments and all_arguments[name].values == "flag"
    }
    for name, value in settings.items():
        if name in _OPPOSITE:
            result[_OPPOSITE[name]] = False
        else:
            result[_attribute(name)] = value
    for name, attribute in _OPPOSITE.items():
        result.pop(_attribute(name), None)
        result.setdefault(attribute, True)
    return {**result, "padded_vocab_size": shape.vocab}
