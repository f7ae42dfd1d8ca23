"""The jobs to prove: a config's own, all layouts that a number of ranks can take, or those of a YAML file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import yaml

from stretto.errors import StrettoError, nearest
from stretto.job.data_parallel import DataParallelSettings
from stretto.job.job import Job, Recompute
from stretto.job.rules import problems
from stretto.job.shape import ModelShape
from stretto.layout.layout import AXES
from stretto.program import PLAIN, names, options
from stretto.program.schedules.traits import updates_within
from stretto.program.schedules.user_schedule import is_file
from stretto.run.config.job import job_of
from stretto.run.config.model import ModelConfig
from stretto.run.config.schema import LayoutConfig, ScheduleConfig, TrainConfig
from stretto.run.config.section import allowed, config_fields
from stretto.run.config.validation import wrong_fields

SHARDING = {
    setting.name: setting.default for setting in fields(DataParallelSettings) if setting.name != "path"
}
"""Settings of data parallelism that a proof varies, with their defaults."""

LEAST_EPS = 1e-8
"""Adam and LAMB divide a gradient by its own size plus eps. A gradient that is zero but for rounding, like
that of the bias of attention keys, differs between layouts in every digit; without an eps far above float64's
rounding error, so would its update."""


def vary(job: Job, **changes: Any) -> Job:
    """The job with other settings, by the keys of a file of layouts.

    Another `recompute` or `mode` starts from the defaults of all that belongs to it; another schedule or
    number of pipeline ranks cuts the stages by their cost and drops a custom program. A schedule that updates
    within the step has no clipping. Files go to the system's temporary folder where the job names none, for a
    proof needs a file, not a fast one.

    Args:
        changes: axes, `expert_tp`, `encoder_pp`, `sequence_parallel`, `context`; `recompute` (the mode),
            `shard_inputs`; fields of `DataParallelSettings`; `schedule` (the name) and its `options`.

    Raises:
        StrettoError: sizes that make no layout.
    """
    if {"schedule", "options"} & changes.keys() or changes.get("pp", job.layout.pp) != job.layout.pp:
        changes = {"encoder_pp": None, **changes, "stage_layers": None, "custom_program": None}
    sizes = {axis: changes.pop(axis) for axis in AXES if axis in changes}
    sharding = {name: changes.pop(name) for name in SHARDING if name in changes}
    mode = changes.pop("recompute", job.recompute.mode)
    recompute = job.recompute if mode == job.recompute.mode else Recompute(mode=mode)
    if "shard_inputs" in changes:
        recompute = replace(recompute, shard_inputs=changes.pop("shard_inputs"))
    varied = replace(job, recompute=recompute, dp=_vary_sharding(job.dp, sharding), **changes)
    if updates_within(varied.schedule):
        varied = replace(varied, optimiser=replace(varied.optimiser, clip=None))
    expert_tp = varied.expert_tp if sizes.get("ep", job.layout.ep) > 1 else None
    return replace(varied, layout=replace(job.layout, **sizes, expert_tp=expert_tp))


def _vary_sharding(dp: DataParallelSettings, changes: Mapping[str, Any]) -> DataParallelSettings:
    base = dp if changes.get("mode", dp.mode) == dp.mode else DataParallelSettings(path=dp.path)
    varied = replace(base, **changes)
    if varied.path is None and "nvme" in (varied.offload, varied.offload_parameters):
        return replace(varied, path=tempfile.gettempdir())
    return varied


def one_process(job: Job, **sizes: int) -> Job:
    """The job in one process, or on these axes, without anything that spreads, shards or recomputes."""
    plain: dict[str, Any] = {"ep": 1, "expert_tp": None, "sequence_parallel": False, "context": "ring"}
    plain |= {"recompute": "none", **SHARDING, "schedule": PLAIN, "options": {}}
    return vary(job, **{**dict.fromkeys(AXES, 1), **plain, **sizes})


def describe(job: Job) -> str:
    """Return the sizes of axes, settings other than the default, the schedule and its options."""
    options = [
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in job.options.items()
    ]
    return " ".join([describe_layout(job), job.schedule_name, *options])


def describe_layout(job: Job) -> str:
    """Return the sizes of axes and settings other than the default, without the schedule."""
    layout, recompute = job.layout, job.recompute
    sizes = [f"tp{layout.tp}", *([f"cp{layout.cp}"] if layout.cp > 1 else [])]
    sizes += [f"dp{layout.dp}", f"pp{layout.pp}", *([f"ep{layout.ep}"] if layout.ep > 1 else [])]
    sizes += [] if job.expert_tp is None else [f"expert_tp{job.expert_tp}"]
    stages = job.stage_layers
    used = {
        "stages=" + "-".join(map(str, stages or ())): stages is not None,
        f"encoder_pp={job.encoder_pp}": job.encoder_pp is not None,
        "sp": job.sequence_parallel,
        job.context: job.context != "ring",
        f"recompute={recompute.mode}": recompute.mode != "none",
        "shard_inputs": recompute.shard_inputs,
        f"loss_chunk={job.loss_chunk}": bool(job.loss_chunk),
        job.dp.mode: job.dp.mode != "ddp",
        **{f"{name}={value}": True for name, value in unusual_sharding(job).items() if name != "mode"},
    }
    return " ".join([*sizes, *(name for name, on in used.items() if on)])


def unusual_sharding(job: Job) -> dict[str, Any]:
    """The settings of data parallelism that are not the default, by name."""
    return {
        name: getattr(job.dp, name) for name, default in SHARDING.items() if getattr(job.dp, name) != default
    }


def configured_job(config: TrainConfig) -> Job:
    """The config's job as it is proved: in float64 on the CPU, optimiser states too, with an `eps` of at
    least LEAST_EPS.

    Raises:
        StrettoError: the model's sizes or the layout's order do not fit together.
    """
    job = job_of(config)
    return vary(
        replace(
            job,
            layout=replace(job.layout, order=_order(config.layout)),
            precision=replace(job.precision, dtype="float64"),
            optimiser=replace(job.optimiser, states="float32", eps=max(job.optimiser.eps, LEAST_EPS)),
            unified_memory=True,
            graphs="off",  # which CPUs have not
        )
    )


def _order(layout: LayoutConfig) -> str:
    """The config's order of axes, with those that it leaves out before pp."""
    order = layout.order.split("-")
    at = order.index("pp") if "pp" in order else len(order)
    return "-".join([*order[:at], *(axis for axis in AXES if axis not in order), *order[at:]])


def every_layout(config: TrainConfig, ranks: int) -> list[Job]:
    """Return every tp x dp x pp that the config can take on this number of ranks, with all else unchanged."""
    configured = configured_job(config)
    # a search need not be a good one to say whether it can
    quickly = vary(configured, options={**configured.options, **quick(configured.schedule)})
    sizes = [(tp, dp, pp) for tp, cp, dp, pp in dense_layouts(ranks) if cp == configured.layout.cp]
    varied = list[Job]()
    for tp, dp, pp in sizes:
        with suppress(StrettoError):  # the axes of experts do not fit all sizes
            varied.append(vary(quickly, tp=tp, dp=dp, pp=pp))
    return [vary(case, options=configured.options) for case in varied if not problems(case)]


def dense_layouts(ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """Every tp, cp, dp, pp whose product is `ranks`."""
    for tp in divisors(ranks):
        for cp in divisors(ranks // tp):
            for dp in divisors(ranks // tp // cp):
                yield tp, cp, dp, ranks // tp // cp // dp


def quick(name: str) -> dict[str, Any]:
    """Return the options of least effort of a schedule that is searched."""
    return {"effort": 0.0} if "effort" in options(name) else {}


def divisors(n: int) -> list[int]:
    """Return the divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def smaller(config: TrainConfig, ranks: int) -> TrainConfig:
    """As little of the model and the batch as proves as much: as many heads, experts and entries of the
    vocabulary, but narrow ones; no more layers than any schedule can tell apart; two microbatches for each
    rank, which every layout can share, of two samples (one would hide what mixes them up) of at most 31
    tokens, an odd number, so that context-parallel ranks pad them. Nothing is recomputed or sharded, for the
    cases say what is. Clipping, if the job has any, clips.
    """
    if config.model.build is not None:
        raise StrettoError(
            f"every layout is proved with a narrow model, and {config.model.build} is from a file",
            hint="verify the config's own layout, or --layouts FILE, a list such as - {pp: 2, dp: 2}",
        )
    batch = replace(config.batch, global_size=_SAMPLES * 2 * ranks, micro_size=_SAMPLES)
    tokens = min(config.data.sequence, _TOKENS)
    data = replace(config.data, sequence=tokens - (tokens > 3 and tokens % 2 == 0))
    model = _narrow(config.model, config.shape(), ranks)
    sections: dict[str, Any] = {"recompute": Recompute(), "dp": DataParallelSettings(path=config.dp.path)}
    if config.optim.clip is not None:
        sections["optim"] = replace(config.optim, clip=min(config.optim.clip, _CLIP))
    sections["layout"] = replace(config.layout, stages=None, encoder_pp=None)
    if config.schedule.file is not None:
        sections["schedule"] = ScheduleConfig()
    parts = {"batch": batch, "data": data, "model": model, **sections}
    return replace(config, **parts)


_SAMPLES = 2  # of a microbatch
_TOKENS = 31
_CLIP = 0.05  # below every gradient norm of a new model
_HEAD = 16
_WIDTH = 64  # of a sample, features of a head, inner width of an MLP
_CHUNKS = 4  # stages of a rank, at most


def _narrow(model: ModelConfig, shape: ModelShape, ranks: int) -> ModelConfig:

    def width(size: int) -> int:
        """Return a small width that the same numbers of ranks divide."""
        return min(size, _WIDTH + (size - _WIDTH) % ranks)

    narrow: dict[str, Any] = {
        "positions": shape.sequence,
        "layers": min(shape.layers, _CHUNKS * ranks),
        "encoder_layers": min(shape.encoder_layers, _CHUNKS * ranks),
        "hidden": min(shape.hidden, shape.heads * _HEAD),
        "kv_heads": shape.kv_heads,
        "head_dim": min(shape.head_dim, _HEAD),
        "ffn": width(shape.ffn),
    }
    if shape.moe is not None:
        widths = {"ffn": width(shape.expert_ffn), "shared_ffn": width(shape.moe.shared_ffn)}
        experts = {name: getattr(shape.moe, name) for name in config_fields(type(model.moe))}
        narrow["moe"] = replace(model.moe, **{**experts, **widths})
    return replace(model, **narrow)


_EXAMPLE = "write lines such as: - {tp: 2, dp: 2, pp: 1}"
_LAYOUT = (*AXES, "expert_tp", "encoder_pp", "sequence_parallel", "context")
_RECOMPUTE = {"recompute": "mode", "shard_inputs": "shard_inputs"}  # the key, and the config's field


def cases_from_file(path: Path, config: TrainConfig) -> list[Job]:
    """Jobs from a YAML list of mappings with the keys of `layout`, `recompute` (its mode), `shard_inputs`,
    those of `dp` but its path, `schedule` (its name) and the schedule's options.

    Axes that are left out are 1, all else is the config's; what belongs to a mode, if the mode is.

    Raises:
        StrettoError: not such a list, an unknown key, a layout that is not legal, or layouts of different
            sizes.
    """
    keys = (*_LAYOUT, *_RECOMPUTE, *SHARDING, "schedule", *ScheduleConfig.option_names())
    rows = read_cases(path, kind="layout", example=_EXAMPLE, keys=keys)
    configured = configured_job(config)
    cases = [_case(keys, location, configured) for location, keys in rows]
    sizes = sorted({case.layout.world for case in cases})
    if len(sizes) > 1:
        raise StrettoError(f"{path}: layouts of {sizes} ranks", hint="one file for each number of ranks")
    return cases


def read_cases(
    path: Path, *, kind: str, example: str, keys: Sequence[str]
) -> list[tuple[str, dict[str, Any]]]:
    """The mappings of a YAML list, each with words for where it stands.

    Args:
        kind: what a mapping describes, such as "layout".
        example: the hint of errors.
        keys: those that a mapping may have.

    Raises:
        StrettoError: the file cannot be read, is not such a list, or has an unknown key.
    """
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StrettoError(
            f"{path}: cannot be read: {error.strerror}", hint="all, product, or a file's name"
        ) from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise StrettoError(f"{path}: no YAML: {error}", hint=example) from None
    if not isinstance(rows, list) or not rows:
        raise StrettoError(f"{path}: no list of {kind}s", hint=example)
    listed = [(f"{path}: {kind} {at}", row) for at, row in enumerate(cast("list[Any]", rows), 1)]
    for location, row in listed:
        if not isinstance(row, dict):
            raise StrettoError(f"{location} is {row!r}", hint=example)
        for key in cast("dict[Any, Any]", row):
            if key not in keys:
                suggestion = nearest(str(key), keys)
                raise StrettoError(
                    f"{location} has the key {key!r}",
                    hint=f"did you mean {suggestion!r}?" if suggestion else f"keys: {', '.join(keys)}",
                )
    return listed


def check_value(section: type, name: str, key: str, value: Any, *, location: str, example: str) -> None:
    """Raise StrettoError unless the field `name` of a section, which a case calls `key`, takes the value."""
    if wrong_fields(section, {name: value}):
        legal = allowed(config_fields(section)[name])
        raise StrettoError(f"{location}: {key} is {value!r}, must be {legal}", hint=example)


def _case(keys: dict[str, Any], location: str, configured: Job) -> Job:
    layout = {key: keys[key] for key in _LAYOUT if key in keys}
    recompute = {key: keys[key] for key in _RECOMPUTE if key in keys}
    sharding = {key: keys[key] for key in SHARDING if key in keys}
    options = {key: v for key, v in keys.items() if key not in (*_LAYOUT, *_RECOMPUTE, *SHARDING, "schedule")}
    for section, values in (
        (LayoutConfig, layout),
        (Recompute, recompute),
        (DataParallelSettings, sharding),
        (ScheduleConfig, options),
    ):
        for key, value in values.items():
            name = _RECOMPUTE.get(key, key)
            check_value(section, name, key, value, location=location, example=_EXAMPLE)
    changes: dict[str, Any] = {**dict.fromkeys(AXES, 1), "expert_tp": None, **layout, **recompute, **sharding}
    if "schedule" in keys or options or configured.options:
        changes["schedule"] = _schedule(keys.get("schedule", configured.schedule), location)
        changes["options"] = {key: value for key, value in options.items() if value is not None}
    try:
        case = vary(configured, **changes)
    except StrettoError as error:
        raise StrettoError(f"{location}: {error.message}", hint=error.hint) from None
    if broken := problems(case):
        raise StrettoError(f"{location} ({describe(case)}): {broken[0].message}", hint=broken[0].fix)
    return case


def _schedule(name: Any, location: str) -> str:
    if not isinstance(name, str):
        raise StrettoError(f"{location}: schedule is {name!r}, must be the name of a schedule", hint=_EXAMPLE)
    if name not in names() and not is_file(name):
        suggestion = nearest(name, names())
        raise StrettoError(
            f"{location}: there is no schedule {name!r}",
            hint=f"did you mean {suggestion!r}?" if suggestion else f"one of {', '.join(names())}",
        )
    return name
