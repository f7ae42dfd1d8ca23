"""Megatron-LM as a framework that jobs are written for and read from.

Its arguments are those of core_v0.19.0 (`megatron.arguments`). What it computes differs from Stretto where
notes say so: initial values and the order of samples always do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError, read_text
from stretto.job.framework import CORE, OPERATORS, Operator, framework_behaviour
from stretto.job.framework import Framework as Ways
from stretto.job.job import Job
from stretto_interop.frameworks.deepspeed import DEEPSPEED
from stretto_interop.frameworks.fields import PRICED, RUN_DEFAULTS, reading
from stretto_interop.frameworks.mapping import (
    ExternalFramework,
    FileSettings,
    ParsedSettings,
    Rule,
    Settings,
    Start,
    Values,
    read_rule,
    rule,
    shown,
)
from stretto_interop.frameworks.megatron.arguments import (
    JSON_FILE,
    VERSION,
    is_default,
    lost,
    needless,
    unpriced,
    unread,
)
from stretto_interop.frameworks.megatron.model import MODEL_RULES, positions_of
from stretto_interop.frameworks.megatron.ranks import RANKS
from stretto_interop.frameworks.megatron.script import parse, render
from stretto_interop.frameworks.megatron.training import TRAINING

# ------------------------------------------------------------------ the JSON of Megatron-DeepSpeed

_TAKEN = ("batch.", "dp.", "precision.", "train.dtype", "train.bucket_mib", "optim.clip", "optim.rate.")
_SCALE = ("precision.loss_scale", "precision.loss_scale_steps")
# of three sizes two make the third
_SIZES = {"batch.global_size": "train_batch_size", "batch.micro_size": "train_micro_batch_size_per_gpu"}


def read_json(path: str, values: Mapping[str, Any], mapped: Collection[str]) -> FileSettings:
    """What the JSON says of the run, and where it contradicts the arguments.

    Args:
        values: of fields, as the arguments have them.
        mapped: fields that the arguments name.
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
    """The job with what Megatron-LM keeps, fuses and recomputes."""
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
    """What the price of these arguments leaves out."""
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
    """In what a run here is not as the arguments say, beyond rounding and random numbers."""
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


def _balance(kinds: list[str], _: Settings) -> str | None:
    if kinds in (["none"], ["seq_aux_loss"]):
        return None
    return "the loss that balances experts is of each sequence here (seq_aux_loss)"


def _modules(modules: list[str], _: Settings) -> str | None:
    return None if modules == ["core_attn"] else "selective recomputation is of the core of attention here"


def _scale(_value: float, settings: Settings) -> str | None:
    return "the scale begins there, and is not kept fixed" if "fp16" in settings else None


def _overflows(steps: int, settings: Settings) -> str | None:
    return "the scale is halved at the first overflow" if steps > 1 and "fp16" in settings else None


def _loader(kind: str, _: Settings) -> str | None:
    return "a loader of the script's own is not read: data.source is" if kind == "external" else None


_LATEST = "latest_checkpointed_iteration.txt"  # of a folder with checkpoints of Megatron-LM


def _load(folder: str, settings: Settings) -> str | None:
    if folder == settings.get("save") and not (Path(folder).expanduser() / _LATEST).is_file():
        return None
    command = f"`stretto checkpoint import {folder} --format megatron --out RUN`"
    return f"a checkpoint of Megatron-LM: {command} brings it over, RUN/config.yaml continues from it"


# of arguments that rules read, what they say beyond their values, by value and settings
_OTHERWISE: Mapping[str, Callable[[Any, Settings], str | None]] = {
    "moe-router-load-balancing-type": _balance,
    "moe-expert-capacity-factor": lambda *_: "the capacity is of each sequence, not of a rank's microbatch",
    "recompute-modules": _modules,
    "loss-scale": _scale,
    "hysteresis": _overflows,
    "load": _load,
    "mock-data": lambda *_: "tokens are made up there; here they are of the source of Python's library",
    "dataloader-type": _loader,
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


def read_script(text: str, source: str, start: Start) -> ParsedSettings:
    """As `script.parse`."""
    return parse(text, source, start, _PRICED)


MEGATRON = ExternalFramework(
    name="megatron",
    title=f"Megatron-LM {VERSION}",
    rules=RULES,
    render=render,
    parse=read_script,
    unpriced=unpriced(),
    unread=unread(),
    as_run=as_run,
    remarks=remarks,
    software=lambda _: "tuned",
    overlaps=overlaps,
    plans=PLANS,
    needless=needless(),
    lost=lost,
    is_default=is_default,
    differs=differs,
    files={JSON_FILE: read_json},
)
