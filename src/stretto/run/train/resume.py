"""Whether a run can resume from the checkpoint its config names: reads manifests only, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from stretto.engine.checkpoint.folder import checkpoints, is_checkpoint, resolve
from stretto.engine.checkpoint.manifest import quick_problems, read_manifest
from stretto.errors import StrettoError
from stretto.run.config.schema import JobConfig, TrainConfig
from stretto.run.data.token_folder import TokenFolder
from stretto.spec.shape import ModelShape, shape_to_record

_SAME = ("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "bias")
_SAME_OF_EXPERTS = ("experts", "ffn", "shared_ffn")  # how they are chosen may change


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


def check_resume(config: TrainConfig, shape: ModelShape, folder: TokenFolder) -> None:
    """Check by manifests, before ranks are started, that the run can resume as its config says.

    Raises:
        StrettoError: no checkpoint where one is named, or one of another model or tokenizer.
    """
    whole = wanted_checkpoint(config)
    if whole is not None:
        check_fits(whole, config, shape, folder)


def check_fits(path: Path, config: TrainConfig, shape: ModelShape, folder: TokenFolder) -> dict[str, Any]:
    """The checkpoint's facts, if it is of this model, tokenizer and optimiser.

    Raises:
        StrettoError: it is not.
    """
    meta = check_model(path, shape, folder)
    _check_optimizer(path, meta, config)
    return meta


def check_model(path: Path, shape: ModelShape, folder: TokenFolder) -> dict[str, Any]:
    """The checkpoint's facts, if it is of this model and tokenizer.

    Raises:
        StrettoError: it is not.
    """
    meta = read_manifest(path).meta
    _check_tokenizer(path, meta, folder)
    sizes = meta.get("model")
    known = _sizes(cast("dict[str, Any]", sizes)) if isinstance(sizes, dict) else {}
    wanted = _sizes(shape_to_record(shape))
    for name, theirs in known.items():
        ours = wanted[name]
        if theirs != ours:
            raise another_model(path, name, theirs, ours)
    return meta


def _sizes(record: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for weights to fit, by the name in the config."""
    experts: Mapping[str, Any] = record.get("moe") or {}
    sizes = {name: record.get(name) for name in _SAME}
    return sizes | {f"moe.{name}": experts.get(name) for name in _SAME_OF_EXPERTS}


def none_at(wanted: str) -> StrettoError:
    """The error for a path that was named and holds no checkpoint."""
    return StrettoError(
        f"checkpoint.resume is {wanted}: no checkpoint there",
        hint="name a run's folder, its checkpoints folder, or one step-... folder; or use auto",
    )


def another_model(path: Path, name: str, theirs: object, ours: object) -> StrettoError:
    """The error of a checkpoint whose model has another size `name` than the config's."""
    return StrettoError(
        f"checkpoint {path} is of another model: its {name} is {theirs}, the config's is {ours}",
        hint="use the config of its run (config.yaml in the run's folder), or another run.name",
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


def _check_tokenizer(path: Path, meta: Mapping[str, Any], folder: TokenFolder) -> None:
    if meta.get("tokenizer", folder.index.tokenizer) != folder.index.tokenizer:
        raise StrettoError(
            f"checkpoint {path} was trained with another tokenizer",
            hint="train on its text with its data.vocab, or give its run's tokenizer.json as data.tokenizer",
        )
