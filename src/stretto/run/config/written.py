"""A planned job as a config that training takes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import yaml
from pydantic import ValidationError

from stretto.errors import StrettoError
from stretto.layout.layout import ORDER
from stretto.program.schedules.traits import updates_within
from stretto.run.config.job import job_of
from stretto.run.config.model import AttentionConfig, ExpertConfig, ModelConfig, RopeConfig
from stretto.run.config.required import FIELDS, explain_marks, lay_marks
from stretto.run.config.schema import ScheduleConfig, TrainConfig
from stretto.run.config.section import Section
from stretto.run.config.source import CoreDumper
from stretto.spec.attention import AttentionShape
from stretto.spec.families import FAMILY_DEFAULTS
from stretto.spec.initial import Initial
from stretto.spec.job import Job
from stretto.spec.presets import PRESETS, preset
from stretto.spec.rules import problems
from stretto.spec.shape import ModelShape, check_built

_LEAST_VOCAB = 257  # of a tokenizer that is trained where none is given


def required_fields(base: TrainConfig | None) -> tuple[str, ...]:
    """The fields that `written` marks: all that a plan does not know, or those that the base leaves open."""
    return tuple(FIELDS) if base is None else base.required


def written(job: Job, base: TrainConfig | None = None, about: str = "") -> str:
    """The YAML of a config with the job's layout.

    Args:
        base: a config to lay it over; None: the usual values, and what they cannot know is marked REQUIRED.
        about: first lines, as comments.

    Raises:
        StrettoError: training has no such model.
    """
    values: dict[str, Any] = {} if base is None else base.model_dump(mode="json", exclude_defaults=True)
    if base is None or base.shape() != job.shape:
        values["model"] = model_section(job.shape) | _initial(job.initial)
    for section, fields in _sections(job, base).items():
        # null is every field's usual value, and only needs saying where the base has another
        laid = {**values.get(section, {}), **fields}
        values[section] = {
            k: v for k, v in laid.items() if v is not None or (section, k) == ("optim", "clip")
        }
    try:
        config = TrainConfig.model_validate(values)
    except ValidationError as error:
        raise StrettoError(f"training has no such job: {error.errors()[0]['msg']}") from None
    wrong = problems(job_of(config))
    if wrong:
        raise wrong[0]
    head = "".join(f"# {line}\n" for line in about.splitlines())
    lay_marks(values, required_fields(base))
    text = yaml.dump(values, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=100)
    return head + explain_marks(text)


def laid_over(job: Job, base: TrainConfig) -> TrainConfig:
    """The base with the layout, the schedule, the microbatches and the savings of a job that was planned for
    it; all else is as it is there.
    """
    changes = dict[str, Section]()
    for name, fields in _planned_sections(job).items():
        section: Section = getattr(base, name)
        values = {**section.model_dump(exclude_defaults=True), **fields}
        changes[name] = section.model_validate({k: v for k, v in values.items() if v is not None})
    return base.model_copy(update=changes)


def _sections(job: Job, base: TrainConfig | None) -> dict[str, dict[str, Any]]:
    data: dict[str, Any] = {"sequence": job.sequence}
    if job.shape.encoder_layers:
        data["target_sequence"] = job.target_sequence
    if base is None:
        data["vocab"] = max(_LEAST_VOCAB, job.shape.vocab)
    # a text at the end would load the whole model in one process
    sample: dict[str, Any] = {"sample": {"tokens": 0}} if base is None else {}
    train: dict[str, Any] = {
        "dtype": job.precision.dtype,
        "loss_chunk": job.loss_chunk,
        "vocab_multiple": job.vocab_multiple,
    }
    optim: dict[str, Any] = {"clip": None} if updates_within(job.schedule) else {}
    return {
        "data": data,
        **_planned_sections(job),
        **({"optim": optim} if optim else {}),
        "train": {**train, "attention": job.attention, "compile": job.compile, "graphs": job.graphs},
        **sample,
    }


def _planned_sections(job: Job) -> dict[str, dict[str, Any]]:
    """What a plan chooses; None: the field's usual value."""
    layout = job.layout
    dp = job.dp
    return {
        "layout": {
            **{axis: getattr(layout, axis) for axis in ("tp", "cp", "ep", "dp", "pp")},
            "order": None if layout.order == ORDER else layout.order,
            "expert_tp": job.expert_tp,
            "sequence_parallel": job.sequence_parallel,
            "context": job.context,
            "encoder_pp": job.encoder_pp,
            "stages": None if job.stage_layers is None else list(job.stage_layers),
        },
        "dp": {
            "mode": dp.mode,
            **dp.shards,
            "reduce": dp.reduce,
            "gather": dp.gather,
            "offload": dp.offload,
            "offload_parameters": dp.offload_parameters,
        },
        "recompute": asdict(job.recompute),
        "schedule": {
            "name": job.schedule,
            "file": None,
            **{name: job.options.get(name) for name in ScheduleConfig.option_names()},
        },
        "batch": {"global_size": job.global_batch, "micro_size": job.micro_batch},
    }


def model_section(shape: ModelShape) -> dict[str, Any]:
    """The section `model` of a config: a preset's name with the vocabulary, or all sizes.

    Raises:
        StrettoError: training has no such model.
    """
    check_built(shape)
    section = _model(shape)
    if ModelConfig.model_validate(section).shape(vocab=shape.vocab, sequence=shape.sequence) != shape:
        raise StrettoError(
            "training has no model of this shape", hint="plan a preset, or a model that a config describes"
        )
    return section


def _model(shape: ModelShape) -> dict[str, Any]:
    for name in PRESETS:
        if preset(name) == shape:
            return {"preset": name, "vocab": shape.vocab}
    beside = ("preset", "positions", *_PARTS, *asdict(Initial()))
    names = [name for name in ModelConfig.model_fields if name not in beside]
    fields = {name: getattr(shape, name) for name in names}
    if not shape.rotary:
        del fields["rope_theta"]
    usual = FAMILY_DEFAULTS[shape.family]
    attention = usual.shape.get("attention", AttentionShape())
    parts = {
        "attention": _changes(shape.attention, attention, AttentionConfig),
        "rope": {} if shape.rope is None else _changes(shape.rope, None, RopeConfig),
        "moe": {} if shape.moe is None else _changes(shape.moe, None, ExpertConfig),
    }
    return {**fields, "positions": shape.sequence, **{name: part for name, part in parts.items() if part}}


_PARTS = ("attention", "rope", "moe")
_OFF: dict[str, Any] = {"norm": "none", "window": 0, "softcap": 0, "query_scale": 0, "local_theta": 0}


def _initial(initial: Initial) -> dict[str, Any]:
    """How weights begin, where it is not the usual way."""
    usual = asdict(Initial())
    return {name: value for name, value in asdict(initial).items() if value != usual[name]}


def _changes(part: Any, usual: Any, section: type[Section]) -> dict[str, Any]:
    """The fields of a part of a shape as its section of a config has them; all, or the unusual ones."""
    changes: dict[str, Any] = {}
    for name in section.model_fields:
        value, known = getattr(part, name), getattr(usual, name, None)
        if value == known:
            continue
        if name == "latent":
            changes[name] = (
                {"kv_rank": 0} if value is None else {**asdict(value), "q_rank": value.q_rank or 0}
            )
        elif value is not None or usual is not None:
            changes[name] = _OFF.get(name) if value is None else value
    return changes
