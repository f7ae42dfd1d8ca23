"""torchtitan's models, microbatches, stages and schedules, by the names that it and torch have for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from math import ceil
from typing import Any

from stretto.errors import Problem, StrettoError
from stretto.job.data_parallel import DataParallelSettings
from stretto.job.initial import Initial
from stretto.job.job import Job
from stretto.job.presets import preset
from stretto.job.shape import ModelShape, fields_of
from stretto.program import PLAIN
from stretto.program.text import check_torch, from_csv, to_csv
from stretto.program.text.torchtitan import modules_of_stages, schedule_class
from stretto.run.config.job import program_file
from stretto_interop.frameworks.fields import JOB, MODEL, NAMES, RUN, JobValues, name_of, values_of
from stretto_interop.frameworks.mapping import Settings, Values, refused

# ------------------------------------------------------------------ models

BEGIN = tuple(f"model.{entry.name}" for entry in fields(Initial))
MODEL_FIELDS = tuple(name for name in NAMES if name.startswith("model.") and name not in BEGIN)
# flavours by the name of their module, and the presets of the same sizes
FLAVOURS: Mapping[tuple[str, str], str] = {
    ("llama3", "1B"): "llama3.2-1b",
    ("llama3", "3B"): "llama3.2-3b",
    ("llama3", "8B"): "llama3-8b",
    ("llama3", "70B"): "llama3-70b",
    ("llama3", "405B"): "llama3.1-405b",
    **{("qwen3", size): f"qwen3-{size.lower()}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    **{("qwen3", size): f"qwen3-{size.lower()}" for size in ("30B-A3B", "235B-A22B")},
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "671B"): "deepseek-v3",
}
# sizes of a model of the llama3 module that is no flavour, by the field of ours
_SIZES = {
    "layers": "n_layers",
    "hidden": "dim",
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "ffn": "hidden_dim",
    "vocab": "vocab_size",
    "rope_theta": "theta",
    "tied": "enable_weight_tying",
    "sequence": "max_seq_len",
}
_DEBUG = {  # its smallest flavour, which no preset has
    "layers": 6,
    "hidden": 256,
    "heads": 16,
    "ffn": 768,
    "vocab": 2048,
    "rope_theta": 500000.0,
    "sequence": 131072,
}


def write_model(values: JobValues) -> Settings:
    shape = replace(values.job.shape, lora=None)  # which another rule is about
    if shape.tied and values.job.layout.pp > 1:
        rule = "torchtitan's pipelines have no weights that stages share"
        raise Problem("model.tied", "true", rule, "model.tied=false, or layout.pp=1")
    for (module, flavour), name in FLAVOURS.items():
        shape_of_flavour = preset(name)
        if (
            replace(shape_of_flavour, **{**fields_of(shape), "sequence": shape_of_flavour.sequence})
            == shape_of_flavour
        ):
            return {"model.name": module, "model.flavor": flavour}
    _check_llama(shape)
    return {"model.name": "llama3", "model.sizes": {to: getattr(shape, of) for of, to in _SIZES.items()}}


def _check_llama(shape: ModelShape) -> None:
    """Raise Problem for what torchtitan's llama3 module does not build."""
    if not shape.rotary:
        raise refused(MODEL.family, shape.family, "torchtitan has no GPT-2", ["llama"])
    plain_llama = ModelShape(family="llama", **{name: getattr(shape, name) for name in _SIZES}, norm_eps=1e-5)
    rule = "torchtitan has experts in its own flavours only, and this model is none of them"
    if shape.moe is not None:
        raise Problem("model.moe.experts", shape.moe.experts, rule, "a preset such as qwen3-30b-a3b")
    for name, value in fields_of(shape).items():
        if value != getattr(plain_llama, name):
            rule = "torchtitan has it in its own flavours only, and this model is none of them"
            raise Problem(
                f"model.{name}", value, rule, f"model.{name}={getattr(plain_llama, name)}, or a preset"
            )


def read_model(settings: Settings) -> Values:
    sizes = settings.get("model.sizes")
    module, flavour = settings.get("model.name"), str(settings.get("model.flavor", "debugmodel"))
    if sizes is not None:
        return _model_choices({of: sizes[to] for of, to in _SIZES.items()})
    if module is not None and (module, flavour) in FLAVOURS:
        shape = preset(FLAVOURS[module, flavour])
        values = values_of(Job(shape=shape)).values
        return {name: values[name] for name in MODEL_FIELDS if values[name] is not None}
    if (module, flavour) == ("llama3", "debugmodel"):
        return _model_choices(_DEBUG)
    if module is None:
        return {}
    flavours = ", ".join(f"{entry} {size}" for entry, size in FLAVOURS)
    raise StrettoError(
        f"the model is {module} {flavour}: not known here", hint=f"what is: {flavours}; or --model"
    )


def _model_choices(sizes: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        MODEL.family: "llama",
        **{f"model.{'positions' if name == 'sequence' else name}": value for name, value in sizes.items()},
    }


OPTIONS = "chunks group waves vertical_sync memory placement split objective effort"
PIPELINE = (
    "pipeline_parallel_schedule pipeline_parallel_schedule_csv module_fqns_per_model_part "
    "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
    "pipeline_parallel_layers_per_stage pipeline_parallel_split_points"
)


def replicas(settings: Settings) -> int:
    shard = settings.get("parallelism.data_parallel_shard_degree", 1)
    return settings.get("parallelism.data_parallel_replicate_degree", 1) * shard


def read_batch(settings: Settings) -> Values:
    dp, local = replicas(settings), settings.get("training.local_batch_size", 8)
    global_batch = settings.get("training.global_batch_size", -1)
    if global_batch < 0:
        global_batch = local * dp
    pp = settings.get("parallelism.pipeline_parallel_degree", 1)
    if global_batch % (local * dp):
        rule = f"is no multiple of local_batch_size={local} x {dp} replicas"
        nearest_batch = max(1, round(global_batch / (local * dp))) * local * dp
        raise StrettoError(
            f"training.global_batch_size={global_batch} {rule}", hint=f"nearest: {nearest_batch}"
        )
    if pp > 1 and global_batch != local * dp:
        raise StrettoError(
            f"a step is {global_batch // (local * dp)} pipelines one after the other, "
            "which is not modelled here",
            hint=f"training.local_batch_size={global_batch // dp}: one pipeline of all microbatches",
        )
    micro = settings.get("parallelism.pipeline_parallel_microbatch_size", 1) if pp > 1 else local
    return {JOB.global_batch: global_batch, JOB.micro_batch: micro}


_SINGLE = {"1f1b": "1F1B", "gpipe": "GPipe"}
_MULTI = {
    "bfs": "LoopedBFS",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
_V = ("ZBVZeroBubble", "DualPipeV")


def write_pipeline(values: JobValues) -> Settings:
    job, file = values.job, values[RUN.schedule.file]
    if isinstance(file, str):
        try:
            job = replace(job, custom_program=program_file(file))
        except Problem as problem:
            raise problem.within("schedule") from None
    if job.layout.pp == 1:
        if job.custom_program is not None or job.schedule != PLAIN:
            raise refused(
                JOB.schedule, job.schedule_name, "without a pipeline microbatches run in turn", [PLAIN]
            )
        return {}
    if job.microbatches is None:
        return {}  # the rule of batches refuses it
    program = replace(job, dp=DataParallelSettings()).program()  # torch gathers by itself
    try:
        check_torch(program)
        kind = schedule_class(program)
    except StrettoError as error:
        raise Problem("schedule.name", job.schedule_name, error.message, error.hint) from None
    name = _torchs_name(job)
    counts = [len(stage) for stage in job.stages(program.depth)]
    if counts[0] == 1 and job.optimiser.weight_decay:
        rule = "torchtitan's optimiser wants a norm in each stage, and the first has the embedding alone"
        raise Problem("layout.stages", counts, rule, "another block in the first stage")
    return {
        "parallelism.pipeline_parallel_schedule": name or kind,
        **({} if name else {"parallelism.pipeline_parallel_schedule_csv": to_csv(program)}),
        "parallelism.module_fqns_per_model_part": modules_of_stages(counts),
    }


def _torchs_name(job: Job) -> str | None:
    """Return torch's name of the schedule that makes the same program, or None."""
    pp, count = job.layout.pp, job.microbatches or 0
    if job.custom_program is not None:
        return None
    name = job.schedule
    if name in _SINGLE:
        return _SINGLE[name]
    if name == "dualpipe-v" and count < 2 * pp:
        return None
    if name in ("interleaved", "interleaved-zb"):
        rounds = max(1, count // pp)
        group = job.options.get("group") or min(pp, count)
        if count % rounds or group != count // rounds:
            return None
    return _MULTI.get(name)


def read_pipeline(settings: Settings) -> Values:
    pp = settings.get("parallelism.pipeline_parallel_degree", 1)
    if pp == 1:
        return {}
    csv = settings.get("parallelism.pipeline_parallel_schedule_csv")
    name = settings.get("parallelism.pipeline_parallel_schedule", "1F1B")
    # 0 if the config does not name the model
    layers = int(read_model(settings).get(name_of(MODEL.layers), settings.get("model.layers", 0)))
    single = not csv and name.lower() in {s.lower() for s in _SINGLE.values()}
    stages = _stages(settings, layers, pp, single=single)
    values: dict[Any, Any] = {JOB.stage_layers: tuple(stages)}
    if csv:
        return {**values, RUN.schedule.file: from_csv(csv, name="csv")}
    schedules = {torchs.lower(): schedule_here for schedule_here, torchs in (_SINGLE | _MULTI).items()}
    if name.lower() not in schedules:
        raise StrettoError(
            f"parallelism.pipeline_parallel_schedule is {name}",
            hint=f"what is known: {', '.join(_MULTI.values())}",
        )
    values[JOB.schedule] = schedule_here = schedules[name.lower()]
    if schedule_here in ("bfs", "interleaved", "interleaved-zb"):
        values[RUN.schedule.chunks] = len(stages) // pp
    if schedule_here in ("interleaved", "interleaved-zb"):
        batch = read_batch(settings)
        count = batch[JOB.global_batch] // (replicas(settings) * batch[JOB.micro_batch])
        rounds = max(1, count // pp)
        if count // rounds != min(pp, count):
            values[RUN.schedule.group] = count // rounds
    return values


def _stages(settings: Settings, layers: int, pp: int, *, single: bool) -> list[int]:
    """Return the layers of each stage, embedding and head included, as torchtitan cuts the model."""
    names: Sequence[Sequence[str]] | None = settings.get("parallelism.module_fqns_per_model_part")
    if names is not None:
        order = [name for stage in names for name in stage if name.startswith("layers.")]
        if order != [f"layers.{layer}" for layer in range(len(order))]:
            raise StrettoError(
                "parallelism.module_fqns_per_model_part has layers out of order",
                hint="layers.0, layers.1, ... each once, stage after stage",
            )
        ends = ({"tok_embeddings"}, {"lm_head", "output"})
        return [
            sum(name.startswith("layers.") for name in stage) + sum(bool(end & set(stage)) for end in ends)
            for stage in names
        ]
    first = settings.get("parallelism.pipeline_parallel_first_stage_less_layers", 1)
    last = settings.get("parallelism.pipeline_parallel_last_stage_less_layers", 1)
    each = settings.get("parallelism.pipeline_parallel_layers_per_stage")
    points = settings.get("parallelism.pipeline_parallel_split_points")  # until 0.1
    if points:
        starts = [0, *(1 + int(point.rpartition(".")[2]) for point in points), layers + 2]
        return [stop - start for start, stop in pairwise(starts)]
    total = layers + first + last
    count = pp * (1 if single else 2) if each is None else ceil(total / each)
    size, more = divmod(total, count)
    sizes = [size + (at < more) for at in range(count)]
    sizes[0] += 1 - first
    sizes[-1] += 1 - last
    return sizes
