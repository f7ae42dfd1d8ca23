"""Whether a run can resume from the checkpoint its config names: reads manifests only, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from stretto.engine.checkpoint.folder import checkpoints, is_checkpoint, resolve
from stretto.engine.checkpoint.manifest import quick_problems, read_manifest
from stretto.errors import StrettoError, nearest
from stretto.run.config.schema import JobConfig, TrainConfig
from stretto.run.data.token_source import TokenData
from stretto.spec.shape import ModelShape, shape_from_record

# Fields of a model's shape, and of the parts in it, that may differ from those of the checkpoint that a run
# goes on from, each with the reason. Every other field is compared, those of tomorrow too.
MAY_DIFFER: Mapping[str, str] = {
    "family": "names usual values, and each of these is compared itself",
    "dropout": "acts in training only, and may change between two stages of it",
    "sequence": "limits the context; of learned positions it is a size, and compared",
    "beyond": "says what a model does that is planned and never built",
    "lora.dropout": "acts in training only",
    "moe.balance": "weighs a loss of training",
    "moe.z": "weighs a loss of training",
    "moe.capacity": "drops tokens in training only",
    "moe.drop": "drops tokens in training only",
    "moe.correction_rate": "is how fast training moves the correction",
}
_CONFIG_NAMES = {"sequence": "positions"}  # where the config calls a field something else
# what a config says for a part or a value that is not there
_NONE = {
    "attention.norm": "attention.norm=none",
    "attention.latent": "attention.latent.kv_rank=0",
    "rope": "rope.type=none",
    "moe": "moe={}",
} | {
    f"attention.{name}": f"attention.{name}=0" for name in ("window", "softcap", "query_scale", "local_theta")
}
_MOST_FIXES = 24  # overrides in a hint


def place_of(config: JobConfig) -> Path:
    """The path that `checkpoint.resume` stands for: one checkpoint, or a folder of checkpoints."""
    wanted = config.checkpoint.resume
    if wanted == "auto":
        return config.run.folder / "checkpoints"
    named = Path(wanted).expanduser()
    return named if is_checkpoint(named) else resolve(named)


def starts_afresh(config: JobConfig) -> bool:
    """Whether the run does not continue in its folder."""
    wanted, folder = config.checkpoint.resume, config.run.folder.absolute()
    return wanted == "never" or (wanted != "auto" and not place_of(config).absolute().is_relative_to(folder))


def wanted_checkpoint(config: JobConfig) -> Path | None:
    """The checkpoint to resume from, by a quick check of manifests; None where the run begins.

    Raises:
        StrettoError: none where one is named.
    """
    wanted = config.checkpoint.resume
    if wanted == "never":
        return None
    place = place_of(config)
    candidates = [place] if is_checkpoint(place) else checkpoints(place)
    if not candidates and wanted != "auto":
        raise none_at(wanted)
    return next((path for path in candidates if not quick_problems(path)), None)


def check_resume(config: TrainConfig, shape: ModelShape, source: TokenData) -> None:
    """Check by manifests, before ranks are started, that the run can resume as its config says.

    Raises:
        StrettoError: no checkpoint where one is named, or one of another model or tokenizer.
    """
    whole = wanted_checkpoint(config)
    if whole is not None:
        check_fits(whole, config, shape, source)


def check_fits(path: Path, config: TrainConfig, shape: ModelShape, source: TokenData) -> dict[str, Any]:
    """The checkpoint's facts, if it is of this model, tokenizer and optimiser.

    Raises:
        StrettoError: it is not.
    """
    meta = check_model(path, shape, source, config.checkpoint.may_differ)
    if not is_base(meta, shape):
        _check_optimizer(path, meta, config)
    return meta


def is_base(meta: Mapping[str, Any], shape: ModelShape) -> bool:
    """Whether the checkpoint is the base of a model with adapters: training starts with its weights, and with
    new adapters.
    """
    return shape.lora is not None and (meta.get("model") or {}).get("lora") is None


def check_model(
    path: Path, shape: ModelShape, source: TokenData, may_differ: Sequence[str] = ()
) -> dict[str, Any]:
    """The checkpoint's facts, if it is of this model and tokenizer.

    Args:
        may_differ: fields of the model that may have other values.

    Raises:
        StrettoError: it is not.
    """
    meta = read_manifest(path).meta
    _check_tokenizer(path, meta, source)
    _check_model(path, meta.get("model"), shape, may_differ)
    return meta


def _check_model(path: Path, record: object, shape: ModelShape, allowed: Sequence[str]) -> None:
    """Check that a checkpoint's model computes what the config's does."""
    if not isinstance(record, dict):
        return
    try:
        theirs = shape_from_record(cast("dict[str, Any]", record))
    except (TypeError, StrettoError):
        raise StrettoError(
            f"checkpoint {path} does not say what model it is of", hint="use another checkpoint"
        ) from None
    if theirs.lora is None:
        shape = replace(shape, lora=None)  # new adapters beside it change nothing
    known = {_CONFIG_NAMES.get(name, name) for flat in (_flat(theirs), _flat(shape)) for name in flat}
    if unknown := [name for name in allowed if not any(_within(one, name) for one in known)]:
        near = nearest(unknown[0], known)
        raise StrettoError(
            f"checkpoint.may_differ names {unknown[0]}, which is no field of the model",
            hint=f"did you mean {near}?"
            if near
            else "fields are named as under `model`, such as rope.factor",
        )
    differing = [
        one for one in differences(theirs, shape) if not any(_within(one.name, name) for name in allowed)
    ]
    if not differing:
        return
    first, more = differing[0], len(differing) - 1
    fixes = list(dict.fromkeys(map(_fix, differing)))
    settings = " ".join(fixes[:_MOST_FIXES]) + " ..." * (len(fixes) > _MOST_FIXES)
    names = ",".join(dict.fromkeys(one.name.partition(".")[0] for one in differing))
    raise another_model(
        path,
        first.name,
        first.theirs,
        first.ours,
        more=f", and {more} more field{'s' * (more > 1)} differ{'s' * (more == 1)}" if more else "",
        hint=f"{settings}, or the config of its run (config.yaml in the run's folder); to load its weights "
        f"into the model as configured: checkpoint.may_differ=[{names}]",
    )


@dataclass(frozen=True)
class Difference:
    """A field in which two shapes differ: its name in the config, such as `rope.factor`, and both values."""

    name: str
    theirs: Any
    ours: Any


def differences(theirs: ModelShape, ours: ModelShape) -> list[Difference]:
    """The fields in which two models differ so that the same weights give other outputs, or do not fit."""
    there, here = _flat(theirs), _flat(ours)
    names = [name for name in dict.fromkeys((*there, *here)) if name not in MAY_DIFFER]
    if not (theirs.rotary and ours.rotary):
        names.append("sequence")
    # a part that is only in one of them is its fields there, and not its name here
    whole = [n for n in names if not any(other.startswith(f"{n}.") for other in names)]
    return [
        Difference(_CONFIG_NAMES.get(name, name), there.get(name), here.get(name))
        for name in whole
        if there.get(name) != here.get(name)
    ]


def _flat(part: Any, prefix: str = "") -> dict[str, Any]:
    """The fields of a shape and of the parts in it, by names such as `attention.latent.kv_rank`."""
    values: dict[str, Any] = {}
    for field in fields(part):
        name, value = prefix + field.name, getattr(part, field.name)
        values |= _flat(value, f"{name}.") if is_dataclass(value) else {name: value}
    return values


def _within(name: str, part: str) -> bool:
    """Whether a field is `part`, or is in it."""
    return name == part or name.startswith(f"{part}.")


def _fix(difference: Difference) -> str:
    """The override that gives the config's model the checkpoint's value."""
    name, value = difference.name, difference.theirs
    if _within(name, "lora"):
        return f"{name}={list(value) if isinstance(value, tuple) else value}".replace("'", '"')
    if value is None:
        absent = [fix for part, fix in _NONE.items() if _within(name, part)]
        return f"model.{absent[0] if absent else f'{name}=null'}"
    return f"model.{name}={str(value).lower() if isinstance(value, bool) else value}"


def none_at(wanted: str) -> StrettoError:
    """The error for a path that was named and holds no checkpoint."""
    return StrettoError(
        f"checkpoint.resume is {wanted}: no checkpoint there",
        hint="name a run's folder, its checkpoints folder, or one step-... folder; or use auto",
    )


def another_model(
    path: Path, name: str, theirs: object, ours: object, *, more: str = "", hint: str | None = None
) -> StrettoError:
    """The error of a checkpoint whose model has another `name` than the config's; `more` ends the message."""
    return StrettoError(
        f"checkpoint {path} is of another model: its {name} is {theirs}, the config's is {ours}{more}",
        hint=hint or "use the config of its run (config.yaml in the run's folder), or another run.name",
    )


def another_optimiser(path: Path, field: str, theirs: object, ours: object) -> StrettoError:
    """The error of a checkpoint with another optimiser's states than the config's, as `field` says."""
    return StrettoError(
        f"checkpoint {path} is of another optimiser: its {field} is {theirs}, the config's is {ours}",
        hint=f"use {field}={theirs}",
    )


def _check_optimizer(path: Path, meta: Mapping[str, Any], config: TrainConfig) -> None:
    """Check that the states are of this optimiser. Their type, sharding and place may change, and so may the
    weights' type: a checkpoint holds the optimiser's master values.
    """
    theirs, ours = meta.get("config", {}).get("optim"), config.optim
    if theirs is None:
        return
    same = theirs["name"] == ours.name
    if not same or (ours.name == "sgd" and bool(theirs["momentum"]) != bool(ours.momentum)):
        field = "momentum" if same else "name"
        raise another_optimiser(path, f"optim.{field}", theirs[field], getattr(ours, field))
    frozen = meta["config"].get("finetune", {}).get("freeze", [])
    if "step" in meta and frozen != config.finetune.freeze:
        raise another_optimiser(path, "finetune.freeze", frozen, config.finetune.freeze)


def _check_tokenizer(path: Path, meta: Mapping[str, Any], source: TokenData) -> None:
    theirs, ours = meta.get("tokenizer"), source.fingerprint
    if None not in (theirs, ours) and theirs != ours:
        raise StrettoError(
            f"checkpoint {path} was trained with another tokenizer",
            hint="train on its text with its data.vocab, or give its run's tokenizer.json as data.tokenizer",
        )
