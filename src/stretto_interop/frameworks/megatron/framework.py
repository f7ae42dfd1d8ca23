"""Megatron-LM as a framework that jobs are written for and read from.

Its arguments are those of core_v0.19.0 (`megatron.command_line`). What it computes differs from Stretto where
notes say so: initial values and the order of samples always do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError, read_text
from stretto.job.framework import CORE, OPERATORS, Operator, framework_behaviour
from stretto.job.framework import Framework as Ways
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.run.config.sources import megatron_prefix
from stretto_interop.frameworks.deepspeed import DEEPSPEED
from stretto_interop.frameworks.fields import PRICED, RUN_DEFAULTS, job_from, reading, values_of
from stretto_interop.frameworks.mapping import (
    ExternalFramework,
    FileSettings,
    Rule,
    Settings,
    Start,
    Values,
    read_rule,
    rule,
    shown,
)
from stretto_interop.frameworks.megatron.command_line import (
    JSON_FILE,
    NEEDLESS,
    UNPRICED,
    UNREAD,
    VERSION,
    arguments,
    is_default,
    lost,
    parse,
    render,
    with_reasons,
)
from stretto_interop.frameworks.megatron.model import MODEL_RULES, positions_of
from stretto_interop.frameworks.megatron.ranks import RANKS
from stretto_interop.frameworks.megatron.training import TRAINING

# ------------------------------------------------------------------ the JSON of Megatron-DeepSpeed

_TAKEN = ("batch.", "dp.", "precision.", "train.dtype", "train.bucket_mib", "optim.clip", "optim.rate.")
_SCALE = ("precision.loss_scale", "precision.loss_scale_steps")
# of three sizes two make the third
_SIZES = {"batch.global_size": "train_batch_size", "batch.micro_size": "train_micro_batch_size_per_gpu"}


def read_json(path: str, values: Mapping[str, Any], mapped: Collection[str]) -> FileSettings:
    """Read DeepSpeed's JSON, and where it contradicts the arguments.

    Args:
        values: values of fields by the arguments.
        mapped: fields that the arguments set.
    """
    added = FileSettings()
    try:
        assert DEEPSPEED.parse is not None
        with reading(path):
            text = read_text(Path(path).expanduser())
            settings = DEEPSPEED.parse(text, path, Start(devices=values["layout.dp"])).settings
    except StrettoError as error:
        added.lost[JSON_FILE] = error.message
        return added
    read = set[str]()
    for mapping in DEEPSPEED.rules:
        present = [name for name in mapping.settings if name in settings and name != "data_parallel_size"]
        if not present or mapping.read is None or not mapping.fields:
            continue
        read |= set(present)
        try:
            taken = read_rule(mapping, settings)
        except StrettoError as error:
            added.lost[f"{JSON_FILE} {present[0]}"] = error.message
            continue
        for field, value in taken.items():
            if not field.startswith(_TAKEN) or (field == "optim.clip" and "gradient_clipping" not in present):
                continue
            if field in _SIZES and _SIZES[field] not in present and len(present) < 2:
                continue  # which the arguments say
            added.fields[field] = value
            if field in mapped and values.get(field) != value:
                added.differs[f"{JSON_FILE} {field}"] = (
                    f"it is {shown(value)} in {path}, which is taken, and {shown(values.get(field))} "
                    "by the arguments"
                )
    if added.fields.get("train.dtype") in ("bfloat16", "float32"):  # which need no scale of the loss
        added.fields |= {name: RUN_DEFAULTS[name] for name in _SCALE if name in values}
    if "optimizer.type" in settings:
        added.differs[f"{JSON_FILE} optimizer"] = (
            "the script makes the optimiser of its own arguments: they are taken"
        )
    added.lost |= {
        f"{JSON_FILE} {name}": reason
        for name in settings
        if name not in read and (reason := DEEPSPEED.why_unread(name)) is not None
    }
    return added


def _read_loss(_: Settings) -> Values:
    return {}  # no choice of a job: `as_run` takes it


# a price depends on them, and nothing of a job says them
_LOSS_FUSION = rule((), "cross-entropy-loss-fusion", read=_read_loss)
RULES: tuple[Rule, ...] = (*MODEL_RULES, *RANKS, *TRAINING, _LOSS_FUSION)
_PRICED = {
    name: rule
    for rule in RULES
    if rule.read is not None and (not rule.fields or not PRICED.isdisjoint(rule.fields))
    for name in rule.settings
}

# what a search for it is fixed to; anything else would be refused when it is written
PLANS = ("schedule=1f1b,interleaved",)


def as_run(job: Job, settings: Settings) -> Job:
    """Return the job with what Megatron-LM keeps, fuses and recomputes."""
    modules = settings.get("recompute-modules", list(CORE))
    if "moe-layer-recompute" in settings:
        modules = ["moe"] if settings.get("recompute-granularity") != "selective" else [*modules, "moe"]
    operators: tuple[Operator, ...] = tuple(name for name in OPERATORS if name in modules) or CORE
    ways = framework_behaviour(
        "megatron", dp=job.dp, precision=job.precision, recompute=Ways(operators=operators)
    )
    fused = "cross-entropy-loss-fusion" in settings
    return replace(job, framework=ways, fused_loss=fused, loss_chunk=0)


def remarks(settings: Settings) -> Iterator[str]:
    """Yield what the price of these arguments leaves out."""
    if positions_of(settings) == "rotary" and settings.get("hidden-dropout", 0.1):
        yield "dropout is left out: models with rotary positions have none here (--hidden-dropout 0)"
    if settings.get("recompute-method") == "uniform" and settings.get("recompute-num-layers", 1) > 1:
        yield "each block's input is taken to be kept, not that of each --recompute-num-layers"
    if "fp8-format" in settings and settings.get("fp8-recipe", "delayed") not in ("delayed", "tensorwise"):
        yield f"--fp8-recipe {settings['fp8-recipe']} is priced as one scale for each tensor"
    if settings.get("transformer-impl", "transformer_engine") != "transformer_engine":
        yield f"--transformer-impl {settings['transformer-impl']} is priced with Transformer Engine's kernels"
    if "reset-attention-mask" in settings:
        yield "attention is priced over whole samples: --reset-attention-mask saves what documents allow"
    if "rampup-batch-size" in settings:
        yield "the price is that of the full batch, after --rampup-batch-size"
    if settings.get("make-vocab-size-divisible-by") is None and "padded-vocab-size" in settings:
        yield "--padded-vocab-size is padded once more, to --make-vocab-size-divisible-by"


def overlaps(settings: Settings) -> bool:
    """True if gradients are reduced while the backward computes."""
    return bool(settings.keys() & {"overlap-grad-reduce", "use-megatron-fsdp", "use-torch-fsdp2"})


def differs(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield how a run differs from the arguments, beyond rounding and random numbers."""
    dropout, of_scores = (settings.get(f"{kind}-dropout", 0.1) for kind in ("hidden", "attention"))
    if positions_of(settings) == "rotary":
        for name, value in (("hidden-dropout", dropout), ("attention-dropout", of_scores)):
            if value:
                yield name, f"it is {value}, and models with rotary positions have no dropout here"
    elif dropout != of_scores:
        yield (
            "attention-dropout",
            f"it is {of_scores}; there is one probability, that of --hidden-dropout",
        )
    for name in ("min-lr", "lr-warmup-init"):
        if settings.get(name) and "lr" not in settings:
            yield name, "it is a part of --lr, which nothing tells: set it in optim.rate"
    for name, kinds in _OTHERWISE.items():
        if name in settings and (reason := kinds(settings[name], settings)) is not None:
            yield name, reason


_LATEST = "latest_checkpointed_iteration.txt"  # of a folder with checkpoints of Megatron-LM


def _load(folder: str, settings: Settings) -> str | None:
    if folder == settings.get("save") and not (Path(folder).expanduser() / _LATEST).is_file():
        return None
    command = f"`stretto checkpoint import {folder} --format megatron --out RUN`"
    return f"a checkpoint of Megatron-LM: {command} brings it over, RUN/config.yaml continues from it"


# of arguments that rules read, what they say beyond their values, by value and settings
_OTHERWISE: Mapping[str, Callable[[Any, Settings], str | None]] = {
    "moe-router-load-balancing-type": lambda kinds, _: (
        None
        if kinds in (["none"], ["seq_aux_loss"])
        else "the loss that balances experts is of each sequence here (seq_aux_loss)"
    ),
    "moe-expert-capacity-factor": lambda *_: "the capacity is of each sequence, not of a rank's microbatch",
    "recompute-modules": lambda modules, _: (
        None if modules == ["core_attn"] else "selective recomputation is of the core of attention here"
    ),
    "loss-scale": lambda _, settings: (
        "the scale begins there, and is not kept fixed" if "fp16" in settings else None
    ),
    "hysteresis": lambda steps, settings: (
        "the scale is halved at the first overflow" if steps > 1 and "fp16" in settings else None
    ),
    "load": _load,
    "mock-data": lambda *_: "tokens are made up there; here they are of the source of Python's library",
    "dataloader-type": lambda kind, _: (
        "a loader of the script's own is not read: data.source is" if kind == "external" else None
    ),
    **dict.fromkeys(
        ("train-data-path", "per-split-data-args-path"),
        lambda *_: "all of it is trained on, as there, so that nothing is held out for evaluations",
    ),
    "apply-layernorm-1p": lambda _, settings: (
        None if settings.get("normalization") == "RMSNorm" else "a LayerNorm of gain 1 + weight is not built"
    ),
    "fp8-recipe": lambda kind, _: None if kind == "tensorwise" else "scales are of a whole tensor now",
    "fp8-format": lambda kind, _: None if kind == "hybrid" else "formats are hybrid: E4M3, gradients in E5M2",
}


MEGATRON = ExternalFramework(
    name="megatron",
    title=f"Megatron-LM {VERSION}",
    rules=RULES,
    render=render,
    parse=lambda text, source, start: parse(text, source, start, _PRICED),
    unpriced=with_reasons(UNPRICED),
    unread=with_reasons(UNREAD),
    as_run=as_run,
    remarks=remarks,
    software=lambda _: "tuned",
    overlaps=overlaps,
    plans=PLANS,
    needless=with_reasons(NEEDLESS),
    lost=lost,
    is_default=is_default,
    differs=differs,
    files={JSON_FILE: read_json},
)


# ------------------------------------------------------------------ arguments that checkpoints have

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
_SAVED_FIELDS = (
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
    """The model and run that a checkpoint's arguments describe.

    Attributes:
        changes: fields of the run by section of a config: sequence, batch, optimiser, learning rate, steps.
        notes: differences, a sentence each.
    """

    shape: ModelShape
    changes: Mapping[str, Mapping[str, Any]]
    notes: list[str]


def read_saved(args: Mapping[str, Any], source: str) -> SavedRun:
    """Return the model and the run that a checkpoint's arguments describe.

    Data and tokenizer are included if their files are on this machine.

    Args:
        args: attributes of the namespace; those that are not plain data may be missing.
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
    for each in rules:
        if each.read is not None:
            try:
                values |= read_rule(each, settings)
            except StrettoError as error:
                if not all(name.startswith("data.") for name in each.fields):
                    raise
                notes.append(error.message)
    for name in _FILES:
        value = values.get(name)
        files: list[str] = [] if value is None else [value] if isinstance(value, str) else list(value)
        is_data = name == "data.source"
        missing = [f for f in files if (megatron_prefix(f) is None if is_data else not os.path.exists(f))]
        if missing:
            notes.append(f"name {name}: {', '.join(missing)}, which it was there, is not on this machine")
            del values[name]
    shape = job_from({name: value for name, value in values.items() if name.startswith("model.")}).shape
    return SavedRun(shape=shape, changes=_changes(args, values), notes=notes)


def _settings(args: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments as on a command line."""
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
        if argument.values in ("+", "*"):
            value = list(value) if isinstance(value, list | tuple) else [value]
        elif argument.kind == "str" and not isinstance(value, str):
            value = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        result[argument.name] = value
    return result


def _attribute(name: str) -> str:
    return name.replace("-", "_")


def _changes(args: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields of the run, by section."""
    result: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for name in _SAVED_FIELDS:
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
    """Return the attributes of a checkpoint's namespace for a model.

    Raises:
        StrettoError: Megatron-LM has no such model.
    """
    values, settings = values_of(Job(shape=shape)), dict[str, Any]()
    for each in MODEL_RULES:
        settings |= each.write(values)
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
