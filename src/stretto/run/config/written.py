"""A planned job as a config that training takes."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import yaml

from stretto.errors import StrettoError
from stretto.job.job import Job
from stretto.job.rules import problems
from stretto.layout.layout import ORDER
from stretto.program.schedules.traits import updates_within
from stretto.run.config.job import job_of
from stretto.run.config.model import model_section
from stretto.run.config.required import FIELDS, comment_required_markers, set_required_markers
from stretto.run.config.schema import ScheduleConfig, TrainConfig
from stretto.run.config.section import plain_section
from stretto.run.config.source import CoreDumper
from stretto.run.config.validation import read_section
from stretto.versions import CONFIG

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
    values: dict[str, Any] = {} if base is None else plain_section(base, defaults=False)
    if base is None or base.shape() != job.shape:
        values["model"] = model_section(job.shape, job.initial)
    for section, fields in _sections(job, base).items():
        # null is every field's usual value, and only needs saying where the base has another
        laid = {**values.get(section, {}), **fields}
        values[section] = {
            k: v for k, v in laid.items() if v is not None or (section, k) == ("optim", "clip")
        }
    try:
        config = read_section(TrainConfig, values)
    except StrettoError as error:
        raise StrettoError(f"training has no such job: {error.message}") from None
    wrong = problems(job_of(config))
    if wrong:
        raise wrong[0]
    head = "".join(f"# {line}\n" for line in about.splitlines())
    values = {"version": CONFIG.version, **set_required_markers(values, required_fields(base))}
    text = yaml.dump(values, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=100)
    return head + comment_required_markers(text)


def laid_over(job: Job, base: TrainConfig) -> TrainConfig:
    """The base with the layout, the schedule, the microbatches and the savings of a job that was planned for
    it; all else is as it is there.
    """
    changes = dict[str, Any]()
    for name, fields in _planned_sections(job).items():
        section = getattr(base, name)
        values = {**plain_section(section, defaults=False), **fields}
        changes[name] = read_section(type(section), {k: v for k, v in values.items() if v is not None})
    return replace(base, **changes)


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
