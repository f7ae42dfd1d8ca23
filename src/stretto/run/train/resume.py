"""Checks from manifests alone, without torch, that a run can resume from the checkpoint its config names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from stretto.engine.checkpoint.folder import checkpoints, is_checkpoint, resolve, runs_hint
from stretto.engine.checkpoint.index import OPTIM
from stretto.engine.checkpoint.manifest import quick_problems, read_manifest, read_tensors
from stretto.engine.checkpoint.metadata import is_of_run
from stretto.errors import StrettoError, nearest
from stretto.job.huggingface import config_names, differences
from stretto.job.job import Job
from stretto.job.shape import ModelShape, shape_from_record
from stretto.job.user_shape import UserShape
from stretto.run.data.boundaries import Boundaries, boundaries_of
from stretto.run.data.token_source import TokenData
from stretto.run.launch.restart import restart_count
from stretto.user_file import path_of

# Fields of a model that may differ from those of the checkpoint that a run resumes from, although its outputs
# in training, or its record, depend on them; each with the reason. All others of `differences` are compared.
MAY_DIFFER: Mapping[str, str] = {
    "dropout": "acts in training only, and may change between two stages of it",
    "positions": "limits the context; of learned positions it is a size, and compared",
    "unmodelled_features": "says what a model does that is planned and never built",
    "lora.dropout": "acts in training only",
}
# overrides that remove a part or a value
_NONE = {
    "attention.norm": "attention.norm=none",
    "attention.latent": "attention.latent.kv_rank=0",
    "rope": "rope.type=none",
    "moe": "moe={}",
} | {
    f"attention.{name}": f"attention.{name}=0" for name in ("window", "softcap", "query_scale", "local_theta")
}
_OTHER = "use another checkpoint"
_MOST_FIXES = 24  # overrides in a hint


def checkpoint_path(resume: str, run: Path) -> Path:
    """Return the path that `checkpoint.resume` stands for: one checkpoint, or a folder of checkpoints.

    Args:
        run: the run's folder.
    """
    if resume == "auto":
        return run / "checkpoints"
    named = Path(resume).expanduser()
    return named if is_checkpoint(named) else resolve(named)


def is_fresh_run(resume: str, run: Path) -> bool:
    """Return True if the run does not continue in its own folder. A job that was started again does."""
    if restart_count():
        return False
    return resume == "never" or (
        resume != "auto" and not checkpoint_path(resume, run).absolute().is_relative_to(run.absolute())
    )


def checkpoint_to_resume(resume: str, run: Path) -> Path | None:
    """Return the checkpoint to resume from, by a quick check of manifests, or None if the run begins.

    Raises:
        StrettoError: a path is named that has no checkpoint.
    """
    if resume == "never":
        return None
    path = checkpoint_path(resume, run)
    candidates = [path] if is_checkpoint(path) else checkpoints(path)
    if not candidates and resume != "auto":
        raise no_checkpoint_error(resume)
    return next((candidate for candidate in candidates if not quick_problems(candidate)), None)


def check_fits(path: Path, job: Job, source: TokenData, may_differ: Sequence[str]) -> dict[str, Any]:
    """Return the checkpoint's metadata, if it is of the job's model, tokenizer and optimiser.

    Args:
        may_differ: fields of the model that may have other values.

    Raises:
        StrettoError: it is not.
    """
    meta = check_model(path, job.shape, source, may_differ)
    if not is_base(meta, job.shape):
        _check_optimizer(path, meta, job)
    return meta


def is_base(meta: Mapping[str, Any], shape: ModelShape) -> bool:
    """Return True if the checkpoint is the base of a model with adapters: training starts with its weights,
    and with new adapters.
    """
    return shape.lora is not None and (meta.get("model") or {}).get("lora") is None


def read_meta(path: Path, counts: Sequence[str]) -> dict[str, Any]:
    """Return the metadata of a checkpoint, with all that a run needs to continue if it has states.

    Args:
        counts: fields that no checkpoint of a run lacks.

    Raises:
        StrettoError: it lacks some, or they make no sense (`engine.checkpoint.metadata`).
    """
    manifest = read_manifest(path)
    meta = manifest.meta
    if "step" not in meta and not any(name.startswith(OPTIM) for name in read_tensors(path, manifest)):
        return meta
    if not is_of_run(meta):
        raise StrettoError(f"checkpoint {path} does not say what model it is of", hint=_OTHER)
    if missing := [name for name in counts if name not in meta]:
        raise StrettoError(f"checkpoint {path} does not say its {missing[0]}", hint=_OTHER)
    return meta


def check_model(
    path: Path, shape: ModelShape, source: TokenData, may_differ: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the checkpoint's metadata, if it is of this model and tokenizer.

    Args:
        may_differ: fields of the model that may have other values.

    Raises:
        StrettoError: it is not.
    """
    meta = read_meta(path, ("step", "samples", "tokens"))
    _check_tokenizer(path, meta, source)
    _check_model(path, meta.get("model"), shape, may_differ)
    return meta


def _check_model(path: Path, record: object, shape: ModelShape, allowed: Sequence[str]) -> None:
    """Check that a checkpoint's model computes what the config's does."""
    if not isinstance(record, dict):
        return
    built: dict[str, Any] = cast("dict[str, Any]", record)
    sizes: dict[str, Any] | None = built.get("parameters")
    others: dict[str, Any] | None = shape.record()["parameters"] if isinstance(shape, UserShape) else None
    if sizes is not None and others is not None:  # both are models from files, of whatever names
        for name in dict.fromkeys([*sizes, *others]):
            if sizes.get(name) != others.get(name):
                raise another_model(path, name, sizes.get(name), others.get(name))
        return
    if sizes is not None or others is not None:
        raise another_model(path, "family", built.get("family"), shape.title)
    try:
        saved = shape_from_record(cast("dict[str, Any]", record))
    except (TypeError, StrettoError):
        raise StrettoError(f"checkpoint {path} does not say what model it is of", hint=_OTHER) from None
    if saved.lora is None:
        shape = replace(shape, lora=None)  # new adapters beside it change nothing
    fields = config_names(saved) | config_names(shape)
    if unknown := [name for name in allowed if not any(_within(field, name) for field in fields)]:
        suggestion = nearest(unknown[0], fields)
        raise StrettoError(
            f"checkpoint.may_differ names {unknown[0]}, which is no field of the model",
            hint=f"did you mean {suggestion}?"
            if suggestion
            else "fields are named as under `model`, such as rope.factor",
        )
    wrong = {
        name: both
        for name, both in differing(saved, shape).items()
        if not any(_within(name, field) for field in allowed)
    }
    if not wrong:
        return
    first, more = next(iter(wrong)), len(wrong) - 1
    fixes = list(dict.fromkeys(_fix(name, value) for name, (value, _) in wrong.items()))
    settings = " ".join(fixes[:_MOST_FIXES]) + " ..." * (len(fixes) > _MOST_FIXES)
    names = ",".join(dict.fromkeys(name.partition(".")[0] for name in wrong))
    raise another_model(
        path,
        first,
        *wrong[first],
        more=f", and {more} more field{'s' * (more > 1)} differ{'s' * (more == 1)}" if more else "",
        hint=f"{settings}, or the config of its run (config.yaml in the run's folder); to load its weights "
        f"into the model as configured: checkpoint.may_differ=[{names}]",
    )


def differing(saved: ModelShape, configured: ModelShape) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two models differ so that the same weights give other outputs, or do not
    fit, with both values.
    """
    allowed = set(MAY_DIFFER) - (set() if saved.rotary and configured.rotary else {"positions"})
    return {name: both for name, both in differences(saved, configured).items() if name not in allowed}


def _within(name: str, part: str) -> bool:
    """Return True if a field is `part`, or is in it."""
    return name == part or name.startswith(f"{part}.")


def _fix(name: str, value: Any) -> str:
    """Return the override that gives the config's model the checkpoint's value."""
    if _within(name, "lora"):
        return f"{name}={list(value) if isinstance(value, tuple) else value}".replace("'", '"')
    if value is None:
        absent = [fix for part, fix in _NONE.items() if _within(name, part)]
        return f"model.{absent[0] if absent else f'{name}=null'}"
    return f"model.{name}={str(value).lower() if isinstance(value, bool) else value}"


def no_checkpoint_error(wanted: str) -> StrettoError:
    """Return the error of a path that is named in the config and has no checkpoint."""
    otherwise = "name a run's folder, its checkpoints folder, or one step-... folder; or use auto"
    return StrettoError(
        f"checkpoint.resume is {wanted}: no checkpoint there", hint=runs_hint(Path(wanted), otherwise)
    )


def another_model(
    path: Path, name: str, saved: object, configured: object, *, more: str = "", hint: str | None = None
) -> StrettoError:
    """Return the error of a checkpoint whose model has another `name` than the config's; `more` ends the
    message.
    """
    return StrettoError(
        f"checkpoint {path} is of another model: its {name} is {saved}, the config's is {configured}{more}",
        hint=hint or "use the config of its run (config.yaml in the run's folder), or another run.name",
    )


def another_optimiser(path: Path, field: str, saved: object, configured: object) -> StrettoError:
    """Return the error of a checkpoint whose optimiser has another `field` than the config's."""
    return StrettoError(
        f"checkpoint {path} is of another optimiser: its {field} is {saved}, the config's is {configured}",
        hint=f"use {field}={saved}",
    )


def _check_optimizer(path: Path, meta: Mapping[str, Any], job: Job) -> None:
    """Check that the states are of the job's optimiser. Their type, sharding and place may change, and so may
    the weights' type: a checkpoint holds the optimiser's master values.
    """
    saved, configured = meta.get("config", {}).get("optim"), job.optimiser
    if saved is None:
        return
    same_name = _class_name(saved.get("name")) == _class_name(configured.name)
    if not same_name or (
        configured.name == "sgd" and bool(saved.get("momentum")) != bool(configured.momentum)
    ):
        field = "momentum" if same_name else "name"
        raise another_optimiser(path, f"optim.{field}", saved.get(field), getattr(configured, field))
    frozen = meta["config"].get("finetune", {}).get("freeze", [])
    freeze = list(job.trained.freeze)
    if "step" in meta and frozen != freeze:
        raise another_optimiser(path, "finetune.freeze", frozen, freeze)


def file_digests(parts: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of the file of each part of the user's, `TrainConfig.user_parts`, by field."""
    return {field: hashlib.sha256(path_of(part).read_bytes()).hexdigest() for field, part in parts.items()}


def file_copy(part: str, digest: str) -> str:
    """Return the path in a run's folder of the copy of a part's file, which no later version replaces."""
    path = path_of(part)
    return f"user_files/{path.stem}-{digest[:8]}{path.suffix}"


def changed_files(saved: Mapping[str, str], parts: Mapping[str, str], run: Path) -> list[str]:
    """Return a sentence for each file that is another than when a checkpoint was saved with these digests,
    in the folder of a run.
    """
    return [
        f"{field}={parts[field]}: the file has changed since the checkpoint was saved; as it was then: "
        f"{run / file_copy(parts[field], saved[field])}"
        for field, digest in file_digests(parts).items()
        if saved.get(field, digest) != digest
    ]


def _class_name(name: object) -> str:
    """Return an optimiser's name, without the file of a class, which may have moved."""
    return str(name).rpartition(":")[2]


def _check_tokenizer(path: Path, meta: Mapping[str, Any], source: TokenData) -> None:
    saved, configured = meta.get("tokenizer"), source.fingerprint
    if None not in (saved, configured) and saved != configured:
        raise StrettoError(
            f"checkpoint {path} was trained with another tokenizer",
            hint="train on its text with its data.vocab, or give its run's tokenizer.json as data.tokenizer",
        )
    trained_on = boundaries_of(meta)
    was_text = not meta.get("config", {}).get("data", {}).get("chat")
    if trained_on is None or source.endoftext is None or not was_text or source.trained is not None:
        return  # conversations end with their turns
    boundaries = Boundaries(source.endoftext, source.begin_of_text)
    if trained_on != boundaries:
        begin = "" if trained_on.begin is None else trained_on.begin
        raise StrettoError(
            f"checkpoint {path} was trained on other boundaries of texts: {trained_on.describe()} there, and"
            f" here {boundaries.describe()}",
            hint=f"data.end_of_text={trained_on.end} data.begin_of_text={begin!r}",
        )
