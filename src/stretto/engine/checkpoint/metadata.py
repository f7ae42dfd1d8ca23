"""Check the metadata that a run records in a checkpoint: types, bounds, and consistent counts.

Metadata without a model's family does not come from a run, and is saved unchecked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Annotated, Any, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from stretto.engine.checkpoint.files import dump_json
from stretto.engine.checkpoint.index import MAX_SIZE, MODEL, Index
from stretto.errors import StrettoError
from stretto.job.families import FAMILIES
from stretto.job.parameters import parameter_shapes
from stretto.job.shape import ModelShape, shape_from_record

PER_RANK = "per_rank"  # prefix of the names of tensors that belong to a single rank
COUNTED_FROM = "counted_from"  # step and sample count from which on every step consumes a full batch
_MOST_PAIRS = 1_000_000
_STRICT = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)
_NO_OTHERS = ConfigDict(strict=True, allow_inf_nan=False, frozen=True, extra="forbid")
_SHARD = re.compile(r"shard-(\d+)[.]")
_OF_RANK = re.compile(rf"{PER_RANK}[.](\d+)[.](.*)", re.DOTALL)
_BLOCK = re.compile(rf"{re.escape(MODEL)}blocks[.](\d+)[.]")
_AXES = ("tp", "cp", "dp", "pp")  # experts share the ranks of these

Count = Annotated[int, Field(ge=0, lt=2**63)]


class _CountedFrom(BaseModel):
    model_config = _NO_OTHERS

    step: Count
    samples: Count


class _LossScale(BaseModel):
    model_config = _STRICT

    value: Annotated[float, Field(gt=0)]
    good: Count
    skipped: Count


class _Text(BaseModel):
    model_config = _STRICT

    mixture: list[dict[str, Any]] = []


class RunMetadata(BaseModel):
    """The metadata fields that are read back; older and imported checkpoints lack some."""

    model_config = _STRICT

    step: Count = 0
    samples: Count = 0
    counted_from: _CountedFrom = _CountedFrom(step=0, samples=0)
    tokens: Count = 0
    targets: Count = 0
    updates: Count = 0
    passed_over: Count = 0
    loss: float | None = None
    held_out_loss: float | None = None
    skipped: Annotated[list[tuple[Count, Count]], Field(max_length=_MOST_PAIRS)] = []
    history: Annotated[list[tuple[float, float | None]], Field(max_length=_MOST_PAIRS)] = []
    seed: Count = 0
    loss_scale: _LossScale | None = None
    tokenizer: str | None = None
    imported: str = ""
    layout: str = ""
    schedule: str = ""
    text: _Text = _Text()
    clicks: dict[str, Any] = {}
    config: dict[str, dict[str, Any]] = {}


def metadata_problem(meta: Mapping[str, Any], step: int, world: int) -> str | None:
    """Return a problem of the metadata of a checkpoint of this step, written by `world` ranks.

    Returns None if it has no problem, or does not come from a run.
    """
    if not is_of_run(meta):
        return None
    try:
        run = RunMetadata.model_validate_json(
            dump_json({name: meta[name] for name in RunMetadata.model_fields if name in meta})
        )
        model_shape(meta)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        title = [error.title] if error.title == "model" else []
        shown = repr(first["input"])
        return (
            f"{'.'.join(map(str, (*title, *first['loc'])))} is {shown[:80]}: {first['msg'].splitlines()[0]}"
        )
    except (TypeError, StrettoError) as error:
        return f"model.{str(error).splitlines()[0]}"
    present = run.model_fields_set
    if "step" in present and run.step != step:
        return f"its step is {run.step}, but the checkpoint is of step {step}"
    limits = {"passed_over": step}
    if (size := _number(run, "batch", "global_size")) is not None:
        limits["updates"] = step * size  # at most one per sample
    if "tokens" in present:
        limits["targets"] = run.tokens
    for name, limit in limits.items():
        if name in present and (count := getattr(run, name)) > limit:
            return f"{name} is {count}, more than the {limit} possible at step {step}"
    ranks, seed = _ranks(run), _number(run, "train", "seed")
    if ranks is not None and ranks != world:
        return f"its layout has {ranks} ranks, but {world} wrote it"
    if "seed" in present and seed is not None and run.seed != seed:
        return f"its seed is {run.seed}, but {seed} in its config"
    return _miscounted(run, step) if "samples" in present else None


def is_of_run(meta: Mapping[str, Any]) -> bool:
    """True if the metadata comes from a run: it has the model's family."""
    model = meta.get("model")
    return isinstance(model, dict) and isinstance(cast("dict[str, Any]", model).get("family"), str)


def model_shape(meta: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of a run's language model; None for another kind of model.

    Raises:
        ValidationError, TypeError, StrettoError: the recorded shape is invalid.
    """
    model: dict[str, Any] = meta["model"]
    if model["family"] not in FAMILIES and "layers" not in model:
        _check_bounds(model)
        return None
    record_schema().model_validate_json(dump_json(model))
    return shape_from_record(model)


@cache
def record_schema() -> type[BaseModel]:
    """Return a schema of `shape_to_record`, from the types of `ModelShape`; left-out fields are defaults."""
    fields: dict[str, Any] = {name: (kind, None) for name, kind in get_type_hints(ModelShape).items()}
    return create_model("model", __config__=_NO_OTHERS, **fields)


def _check_bounds(value: object, name: str = "") -> None:
    """Raise StrettoError if the recorded sizes of another kind of model are out of range."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(cast("list[object]", value))
        for key, inner in cast("Any", pairs):
            _check_bounds(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, int) and not 0 <= value <= MAX_SIZE:
        raise StrettoError(f"{name} is {value}, which is no valid tensor size")


def _miscounted(run: RunMetadata, step: int) -> str | None:
    """Return a problem of the sample count or of a skipped range; None if both fit the steps."""
    size, since = _number(run, "batch", "global_size"), run.counted_from
    if COUNTED_FROM in run.model_fields_set and size is not None:
        samples = since.samples + (step - since.step) * size
        if since.step > step or run.samples != samples:
            return (
                f"samples is {run.samples} at step {step}, but steps of {size} from {since.samples} at step "
                f"{since.step} add up to {samples}"
            )
    end = 0
    for first, last in run.skipped:
        if not end <= first < last <= run.samples:
            return f"invalid range of skipped samples, {first} to {last} of {run.samples}"
        end = last
    return None


def _number(run: RunMetadata, section: str, name: str) -> int | None:
    value = run.config.get(section, {}).get(name)
    return value if type(value) is int else None


def _ranks(run: RunMetadata) -> int | None:
    """Return the number of ranks of the config's layout; None if it does not set one."""
    if (ranks := _number(run, "layout", "ranks")) is not None:
        return ranks
    sizes = [_number(run, "layout", axis) for axis in _AXES]
    return None if None in sizes else prod(cast("list[int]", sizes))


def index_problem(meta: Mapping[str, Any], world: int, index: Index) -> str | None:
    """Return how the tensors contradict the metadata; None if they do not.

    Checks files and per-rank tensors against the number of ranks, and parameters against the model's shape.
    """
    ranks: dict[str, set[int]] = {}
    for name, saved in index.items():
        if match := _OF_RANK.fullmatch(name):
            ranks.setdefault(match[2], set()).add(int(match[1]))
        files = (_SHARD.match(piece.file) for piece in saved.pieces)
        if any(file and int(file[1]) >= world for file in files):
            return f"{name} is in the file of a rank outside the {world} ranks of the checkpoint"
    for name, those in ranks.items():
        if those != set(range(world)):
            return f"ranks {sorted(those)[:8]} have {name}, but {world} ranks wrote the checkpoint"
    shape = model_shape(meta) if is_of_run(meta) else None
    blocks = (_BLOCK.match(name) for name in index)
    if shape is not None and any(block and int(block[1]) >= shape.layers for block in blocks):
        return f"it has more blocks than model.layers={shape.layers}"
    if shape is not None and shape.tied and f"{MODEL}head.out.weight" in index:
        return "it has a separate head, but model.tied is true"
    for name, sizes in ({} if shape is None else parameter_shapes(shape)).items():
        saved = index.get(MODEL + name)
        if saved is None or saved.shape != tuple(sizes):
            difference = "is missing" if saved is None else f"has shape {list(saved.shape)}"
            return f"{MODEL}{name} {difference}, but the model's has shape {list(sizes)}"
    return None
