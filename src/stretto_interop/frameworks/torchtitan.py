"""torchtitan's configs, of 0.3.0: a function that returns a `Trainer.Config` (torchtitan/trainer.py,
torchtitan/config/configs.py). Settings have the dotted names of its command line, which until 0.2 were those
of its TOML files too; both can be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from math import ceil, inf
from typing import Any

from stretto.errors import Problem, StrettoError
from stretto.job.data_parallel import KEEP, DataParallelSettings, Precision
from stretto.job.framework import framework_behaviour
from stretto.job.initial import Initial
from stretto.job.job import Job
from stretto.job.presets import preset
from stretto.job.shape import ModelShape, fields_of
from stretto.layout.layout import ORDER
from stretto.program import PLAIN
from stretto.program.text import check_torch, from_csv, to_csv
from stretto.program.text.torchtitan import modules_of_stages, schedule_class
from stretto.run.config.job import program_file
from stretto_interop.frameworks.fields import (
    DEGREES,
    JOB,
    LEARNING_RATE,
    LORA,
    LORA_RANK,
    MODEL,
    NAMES,
    OPTIMISER,
    RATE,
    RUN,
    SHARDS,
    JobValues,
    name_of,
    values_of,
)
from stretto_interop.frameworks.mapping import (
    AROUND,
    USER_MODEL,
    ExternalFramework,
    Settings,
    Unset,
    Values,
    absent,
    check_batch,
    ignored,
    next_token,
    others,
    refused,
    renamed,
    require,
    restricted,
    rule,
    under,
    unsplit_experts,
    without_encoder,
)
from stretto_interop.frameworks.torchtitan_text import parse, render

# ------------------------------------------------------------------ models

_INITIAL = tuple(f"model.{entry.name}" for entry in fields(Initial))
_MODEL_FIELDS = tuple(n for n in NAMES if n.startswith("model.") and n not in (*_INITIAL, *USER_MODEL))
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


def _write_model(values: JobValues) -> Settings:
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
        family = "GPT-2" if shape.family == "gpt" else shape.family
        raise refused(MODEL.family, shape.family, f"torchtitan has no {family}", ["llama"])
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


def _read_model(settings: Settings) -> Values:
    sizes = settings.get("model.sizes")
    module, flavour = settings.get("model.name"), str(settings.get("model.flavor", "debugmodel"))
    if sizes is not None:
        return _model_choices({of: sizes[to] for of, to in _SIZES.items()})
    if module is not None and (module, flavour) in FLAVOURS:
        shape = preset(FLAVOURS[module, flavour])
        values = values_of(Job(shape=shape)).values
        return {name: values[name] for name in _MODEL_FIELDS if values[name] is not None}
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


_OPTIONS = "chunks group waves vertical_sync memory placement split objective effort"
_PIPELINE = (
    "pipeline_parallel_schedule pipeline_parallel_schedule_csv module_fqns_per_model_part "
    "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
    "pipeline_parallel_layers_per_stage pipeline_parallel_split_points"
)


def _replicas(settings: Settings) -> int:
    shard = settings.get("parallelism.data_parallel_shard_degree", 1)
    return settings.get("parallelism.data_parallel_replicate_degree", 1) * shard


def _read_batch(settings: Settings) -> Values:
    dp, local = _replicas(settings), settings.get("training.local_batch_size", 8)
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


def _write_pipeline(values: JobValues) -> Settings:
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


def _read_pipeline(settings: Settings) -> Values:
    pp = settings.get("parallelism.pipeline_parallel_degree", 1)
    if pp == 1:
        return {}
    csv = settings.get("parallelism.pipeline_parallel_schedule_csv")
    name = settings.get("parallelism.pipeline_parallel_schedule", "1F1B")
    # 0 if the config does not name the model
    layers = int(_read_model(settings).get(name_of(MODEL.layers), settings.get("model.layers", 0)))
    single = not csv and name.lower() in {s.lower() for s in _SINGLE.values()}
    stages = _stages(settings, layers, pp, single=single)
    values: dict[Any, Any] = {JOB.stage_layers: tuple(stages)}
    if csv:
        return {**values, RUN.schedule.file: from_csv(csv, name="csv")}
    schedules = {torchs.lower(): schedule_here for schedule_here, torchs in (_SINGLE | _MULTI).items()}
    if name.lower() not in schedules:
        raise StrettoError(
            f"parallelism.pipeline_parallel_schedule is {name}",
            hint=f"allowed: {', '.join((_SINGLE | _MULTI).values())}",
        )
    values[JOB.schedule] = schedule_here = schedules[name.lower()]
    if schedule_here in ("bfs", "interleaved", "interleaved-zb"):
        values[RUN.schedule.chunks] = len(stages) // pp
    if schedule_here in ("interleaved", "interleaved-zb"):
        batch = _read_batch(settings)
        count = batch[JOB.global_batch] // (_replicas(settings) * batch[JOB.micro_batch])
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


# ------------------------------------------------------------------ layout and batch


def _position_notes(values: JobValues) -> Iterator[str]:
    if values[MODEL.sequence] != values[JOB.sequence]:
        yield f"model.positions={values['model.positions']}: torchtitan has no limit but the sequence"


def _write_batch(values: JobValues) -> Settings:
    """Write the batch: with a pipeline, a local batch is all microbatches of a step; without, it is one."""
    job = values.job
    check_batch(job)
    settings: dict[str, Any] = {"training.global_batch_size": job.global_batch}
    if job.layout.pp == 1:
        return {**settings, "training.local_batch_size": job.micro_batch}
    return {
        **settings,
        "training.local_batch_size": job.global_batch // job.layout.dp,
        "parallelism.pipeline_parallel_microbatch_size": job.micro_batch,
    }


_DEGREES = (
    "data_parallel_replicate_degree data_parallel_shard_degree tensor_parallel_degree "
    "context_parallel_degree pipeline_parallel_degree expert_parallel_degree fsdp_reshard_after_forward"
)


def _write_layout(values: JobValues) -> Settings:
    job = values.job
    layout, dp = job.layout, job.dp
    if dp.mode in ("server", "zero1"):
        rule = "torchtitan replicates, or shards states, gradients and parameters with FSDP2"
        raise refused(JOB.dp.mode, dp.mode, rule, ["zero2", "zero3", "ddp"])
    sizes, copies = dp.sizes(job.copies), job.copies
    if dp.mode == "ddp" and layout.cp > 1:
        rule = "torchtitan shards over the ranks of cp too"
        raise refused(JOB.dp.mode, "ddp", rule, ["zero2", "zero3"])
    shard = 1 if dp.mode == "ddp" else sizes.states
    for field, size in (("shard_gradients", sizes.gradients), ("shard_parameters", sizes.parameters)):
        applies = dp.mode == "zero3" or (dp.mode == "zero2" and field == "shard_gradients")
        if applies and size != shard:
            rule = "FSDP2 shards states, gradients and parameters alike"
            raise refused(f"dp.{field}", size, rule, [shard])
    if shard % layout.cp:
        rule = f"torchtitan shards over all {layout.cp} ranks of cp"
        raise refused(JOB.dp.shard_states, shard, rule, [layout.cp * max(1, shard // layout.cp)])
    settings: dict[str, Any] = {
        "parallelism.data_parallel_replicate_degree": copies // shard if shard > 1 else layout.dp,
        "parallelism.data_parallel_shard_degree": max(1, shard // layout.cp),
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.context_parallel_degree": layout.cp,
        "parallelism.pipeline_parallel_degree": layout.pp,
    }
    if job.shape.moe is not None:
        settings["parallelism.expert_parallel_degree"] = layout.ep
    if dp.mode != "ddp":
        settings["parallelism.fsdp_reshard_after_forward"] = "always" if dp.mode == "zero3" else "never"
    if layout.pp > 1 or (job.shape.moe is not None and layout.ep > 1):
        settings["training.disable_cuda_graphs"] = True
    return settings


def _read_layout(settings: Settings) -> Values:
    def degree(name: str) -> int:
        return settings.get(f"parallelism.{name}", 1)

    cp, pp = degree("context_parallel_degree"), degree("pipeline_parallel_degree")
    shard = degree("data_parallel_shard_degree") * cp
    values: dict[Any, Any] = {
        JOB.layout.tp: degree("tensor_parallel_degree"),
        JOB.layout.cp: cp,
        JOB.layout.ep: degree("expert_parallel_degree"),
        JOB.layout.dp: _replicas(settings),
        JOB.layout.pp: pp,
        JOB.dp.mode: "ddp",
    }
    if shard == 1:
        return values
    policy = settings.get("parallelism.fsdp_reshard_after_forward", "default")
    ways = policy == "never" or (policy == "default" and pp > 1)
    values[JOB.dp.mode] = "zero2" if ways else "zero3"
    if degree("data_parallel_replicate_degree") > 1:
        values |= dict.fromkeys(SHARDS[:2] if ways else SHARDS, shard)
    return values


def _write_reduce(values: JobValues) -> Settings:
    """FSDP2 reduces after every backward; in a pipeline after the last microbatch's."""
    job = values.job
    does = "step" if job.layout.pp > 1 or job.dp.mode == "ddp" else "microbatch"
    rule = f"torchtitan {'with' if job.layout.pp > 1 else 'without'} a pipeline reduces once a {does}"
    require(values, JOB.dp.reduce, [does, "auto"], rule)
    return {}


def _read_reduce(settings: Settings) -> Values:
    layout = _read_layout(settings)
    return {JOB.dp.reduce: "step"} if layout[JOB.layout.pp] > 1 and layout[JOB.dp.mode] != "ddp" else {}


def _write_gather(values: JobValues) -> Settings:
    job = values.job
    if job.dp.mode != "zero3" or job.dp.gathers(job.layout.pp) == "layer":
        return {}
    rule = "torchtitan's pipelines gather layers for every microbatch, or keep them for the step, as in zero2"
    raise Problem("dp.gather", values[JOB.dp.gather], rule, "dp.mode=zero2, or dp.gather=layer")


def _read_gather(settings: Settings) -> Values:
    layout = _read_layout(settings)
    return {JOB.dp.gather: "layer"} if layout[JOB.layout.pp] > 1 and layout[JOB.dp.mode] == "zero3" else {}


def _read_expert_tp(settings: Settings) -> Values:
    ep = settings.get("parallelism.expert_parallel_degree", 1)
    split = settings.get("parallelism.expert_tensor_parallel_degree", 1)  # until 0.2
    return {JOB.expert_tp: split} if ep > 1 else {}


def _write_sequence_parallel(values: JobValues) -> Settings:
    if values.job.layout.tp == 1:
        return {}
    return {"parallelism.enable_sequence_parallel": values[JOB.sequence_parallel]}


def _read_sequence_parallel(settings: Settings) -> Values:
    on = settings.get("parallelism.enable_sequence_parallel", True)
    return {JOB.sequence_parallel: on and settings.get("parallelism.tensor_parallel_degree", 1) > 1}


def _write_offload(values: JobValues) -> Settings:
    states, parameters = values[JOB.dp.offload], values[JOB.dp.offload_parameters]
    if states == parameters == "none":
        return {"training.enable_cpu_offload": False}
    for choice, place in ((JOB.dp.offload, states), (JOB.dp.offload_parameters, parameters)):
        if place != "cpu":
            rule = "torchtitan offloads parameters, gradients and states together, to host memory"
            raise refused(choice, place, rule, ["cpu"])
    return {"training.enable_cpu_offload": True}


def _read_offload(settings: Settings) -> Values:
    place = "cpu" if settings.get("training.enable_cpu_offload", False) else "none"
    return {JOB.dp.offload: place, JOB.dp.offload_parameters: place}


# ------------------------------------------------------------------ types, optimiser, rate


def _write_types(values: JobValues) -> Settings:
    precision = values.job.precision
    rule = "torchtitan computes in float32 or bfloat16"
    require(values, JOB.precision.dtype, ["bfloat16", "float32"], rule)
    if precision.dtype == "bfloat16" and precision.gradients != "float32":
        rule = "torchtitan reduces gradients in float32"
        raise refused(JOB.precision.gradients, precision.gradients, rule, ["float32"])
    if precision.dtype == "bfloat16" and tuple(precision.keep) not in (KEEP, ()):
        rule = "FSDP2 computes with all parameters in bfloat16, and keeps all in float32"
        raise refused(JOB.precision.keep, precision.keep, rule, [()])
    settings: dict[str, Any] = {
        "training.dtype": "float32",
        "training.mixed_precision_param": precision.dtype,
        "training.mixed_precision_reduce": "float32",
    }
    if precision.fp8 == "tensor":
        raise refused(JOB.precision.fp8, "tensor", "torchtitan 0.3 has a scale for each row", ["row", "none"])
    return {**settings, **({"model.float8": "rowwise"} if precision.fp8 == "row" else {})}


def _note_types(values: JobValues) -> Iterator[str]:
    if values[JOB.precision.dtype] == "bfloat16":
        yield "FSDP2 computes with all parameters in bfloat16, norms and routers too, from float32 masters"


def _read_types(settings: Settings) -> Values:
    dtype_of_weights = settings.get("training.dtype", "float32")
    if dtype_of_weights != "float32":
        raise StrettoError(
            f"training.dtype is {dtype_of_weights}: without float32 masters, which is not modelled here",
            hint="training.dtype=float32, with mixed_precision_param",
        )
    dtype = settings.get("training.mixed_precision_param", "bfloat16")
    eight = {None: "none", "rowwise": "row", "rowwise_with_gw_hp": "row", "tensorwise": "tensor"}
    return {JOB.precision.dtype: dtype, JOB.precision.fp8: eight[settings.get("model.float8")]}


_OPTIMISER = ("lr", "beta1", "beta2", "eps", "weight_decay")


def _write_optimiser(values: JobValues) -> Settings:
    optimiser = values.job.optimiser
    rule = "torchtitan's optimisers are AdamW, and Muon with buckets of its own"
    require(values, JOB.optimiser.name, ["adamw"], rule)
    if optimiser.no_decay:
        rule = "names of parameters are others in torchtitan: add groups to the config by hand"
        raise refused(JOB.optimiser.no_decay, list(optimiser.no_decay), rule, ["[]"])
    if optimiser.momentum:
        raise refused(JOB.optimiser.momentum, optimiser.momentum, "AdamW has none", [0.0])
    lr = Unset(JOB.optimiser.lr, optimiser.lr) if values.is_open(JOB.optimiser.lr) else optimiser.lr
    beta1, beta2 = optimiser.betas
    numbers = (lr, beta1, beta2, optimiser.eps, optimiser.weight_decay)
    fused = "fused" if optimiser.states == "float32" else "fused_opt_states_bf16"
    return {
        "optimizer.name": "AdamW",
        **{f"optimizer.{name}": value for name, value in zip(_OPTIMISER, numbers, strict=True)},
        "optimizer.implementation": fused,
        "training.max_norm": inf if optimiser.clip is None else optimiser.clip,
    }


def _read_optimiser(settings: Settings) -> Values:
    name = settings.get("optimizer.name", "AdamW")
    if name not in ("AdamW", "Adam"):
        raise StrettoError(f"optimizer.name is {name}: not modelled here", hint="what is: AdamW")
    lr, beta1, beta2, eps, decay = (
        settings.get(f"optimizer.{key}", default)
        for key, default in zip(_OPTIMISER, (8e-4, 0.9, 0.95, 1e-8, 0.1), strict=True)
    )
    low = settings.get("optimizer.implementation") == "fused_opt_states_bf16"
    norm = settings.get("training.max_norm", 1.0)
    return {
        JOB.optimiser.lr: lr,
        JOB.optimiser.betas: (beta1, beta2),
        JOB.optimiser.eps: eps,
        JOB.optimiser.weight_decay: decay,
        JOB.optimiser.states: "bfloat16" if low else "float32",
        JOB.optimiser.clip: None if norm == inf else norm,
    }


def _write_rate(values: JobValues) -> Settings:
    rate, steps = values.job.optimiser.rate, values[RUN.train.steps]
    require(values, RATE.warmup_init, [None], "torchtitan's warm-up begins at 1/warmup")
    if rate.schedule == "inverse-sqrt":
        instead = "torchtitan holds, then decays linearly, by sqrt or as a cosine"
        raise refused(RATE.schedule, rate.schedule, instead, ["cosine", "linear", "constant", "wsd"])
    if rate.schedule == "wsd" and rate.decay == "exponential":
        instead = "torchtitan decays linearly, by sqrt or as a cosine"
        raise refused(RATE.decay, rate.decay, instead, ["linear", "sqrt", "cosine"])
    if rate.end(steps) < steps and not values.is_open(RUN.train.steps):
        instead = "torchtitan holds no rate beyond the end of its decay"
        raise refused(RATE.decay_steps, rate.decay_steps, instead, [steps])
    settings: dict[str, Any] = {
        "warmup_steps": round(rate.warmup_steps(steps)),
        "min_lr_factor": rate.min_ratio,
        **({} if rate.decay_steps is None else {"total_steps": rate.decay_steps}),
    }
    if rate.schedule == "constant":
        settings["decay_ratio"] = 0.0
    elif rate.schedule == "wsd":
        settings |= {"decay_ratio": rate.decay_fraction, "decay_type": rate.decay}
    else:
        settings |= {"decay_ratio": None, "decay_type": rate.schedule}
    return {f"lr_scheduler.{name}": value for name, value in settings.items()}


def _read_rate(settings: Settings) -> Values:
    def of(name: str, default: Any) -> Any:
        return settings.get(f"lr_scheduler.{name}", default)

    ratio, kind = of("decay_ratio", None), of("decay_type", "linear")
    values: dict[Any, Any] = {"warmup": of("warmup_steps", 200), "min_ratio": of("min_lr_factor", 0.0)}
    if ratio is None and kind != "sqrt":
        values["schedule"] = kind
    elif ratio == 0:
        values["schedule"] = "constant"
    else:
        values |= {"schedule": "wsd", "decay": kind, "decay_fraction": 1.0 if ratio is None else ratio}
    values["decay_steps"] = of("total_steps", None)
    return {f"optim.rate.{name}": value for name, value in values.items()}


def _write_recompute(values: JobValues) -> Settings:
    again = values.job.recompute
    rule = "torchtitan repeats whole blocks, or (SelectiveAC) every second matrix product"
    require(values, JOB.recompute.mode, ["none", "full"], rule)
    require(values, JOB.recompute.blocks, [None], "torchtitan repeats all blocks or none")
    if again.shard_inputs and not values.job.sequence_parallel and again.mode == "full":
        rule = "torchtitan keeps inputs of blocks as they are"
        raise refused(JOB.recompute.shard_inputs, True, rule, [False])
    return {"activation_checkpoint.mode": again.mode}


def _read_recompute(settings: Settings) -> Values:
    mode = settings.get("activation_checkpoint.mode", "selective")
    option = settings.get("activation_checkpoint.selective_ac_option", "op")
    if mode == "selective" and str(option).isdigit():
        if int(option) != 1:
            raise StrettoError(
                f"activation_checkpoint.selective_ac_option is {option}: every {option}th block, "
                "which is not modelled here",
                hint="op, or mode full",
            )
        mode = "full"
    if mode not in ("none", "full", "selective"):
        raise StrettoError(
            f"activation_checkpoint.mode is {mode}: not modelled here", hint="none, full, selective"
        )
    return {JOB.recompute.mode: mode}


def _write_checkpoint(values: JobValues) -> Settings:
    every: Any = values[RUN.checkpoint.every]
    if values.is_open(RUN.checkpoint.every):
        every = Unset(RUN.checkpoint.every, 500)
    elif every is None:  # at the end alone
        every = (
            values[RUN.train.steps] if not values.is_open(RUN.train.steps) else Unset(RUN.train.steps, 1000)
        )
    keep = values[RUN.checkpoint.keep]
    return {
        "checkpoint.enable": True,
        "checkpoint.interval": every,
        "checkpoint.keep_latest_k": 0 if keep is None else max(2, keep),
        "checkpoint.async_mode": "async" if values[RUN.checkpoint.async_save] else "disabled",
    }


# ------------------------------------------------------------------ all of it

RULES = (
    rule(
        (*_MODEL_FIELDS,),
        under("model", "name flavor sizes"),
        _write_model,
        _read_model,
        notes=_position_notes,
    ),
    rule(
        (JOB.global_batch, JOB.micro_batch),
        (
            *under("training", "global_batch_size local_batch_size"),
            "parallelism.pipeline_parallel_microbatch_size",
        ),
        _write_batch,
        _read_batch,
    ),
    renamed("training.seq_len", JOB.sequence, default=2048),
    renamed("training.steps", RUN.train.steps, default=10000),
    rule(
        (*DEGREES, JOB.dp.mode, *SHARDS),
        (*under("parallelism", _DEGREES), "training.disable_cuda_graphs"),
        _write_layout,
        _read_layout,
    ),
    without_encoder("torchtitan trains decoders"),
    *next_token("torchtitan's samples are windows of text"),
    restricted(JOB.layout.order, [ORDER], "torchtitan's mesh has tp innermost, then cp, dp and pp"),
    restricted(JOB.context, ["ring"], "torchtitan's context parallelism passes keys and values around"),
    unsplit_experts(
        "torchtitan's expert-parallel ranks have whole experts",
        "parallelism.expert_tensor_parallel_degree",
        _read_expert_tp,
    ),
    rule(
        JOB.sequence_parallel,
        "parallelism.enable_sequence_parallel",
        _write_sequence_parallel,
        _read_sequence_parallel,
    ),
    rule(JOB.dp.reduce, write=_write_reduce, read=_read_reduce),
    rule(JOB.dp.gather, write=_write_gather, read=_read_gather),
    rule(
        (JOB.dp.offload, JOB.dp.offload_parameters),
        "training.enable_cpu_offload",
        _write_offload,
        _read_offload,
    ),
    restricted(JOB.dp.path, [None], "torchtitan keeps nothing in files"),
    rule(
        (JOB.stage_layers, JOB.schedule, RUN.schedule.file, *under("schedule", _OPTIONS)),
        under("parallelism", _PIPELINE),
        _write_pipeline,
        _read_pipeline,
    ),
    rule(
        (JOB.precision.dtype, JOB.precision.gradients, JOB.precision.keep, JOB.precision.fp8),
        (*under("training", "dtype mixed_precision_param mixed_precision_reduce"), "model.float8"),
        _write_types,
        _read_types,
        notes=_note_types,
    ),
    restricted(JOB.precision.loss_scale, [Precision.loss_scale], "torchtitan has no float16"),
    restricted(JOB.precision.loss_scale_steps, [Precision.loss_scale_steps], "torchtitan has no float16"),
    restricted(JOB.attention, ["auto", "sdpa", "flex"], "torchtitan's attention stores no probabilities"),
    rule(
        OPTIMISER,
        (
            *under("optimizer", "name lr beta1 beta2 eps weight_decay implementation"),
            "training.max_norm",
        ),
        _write_optimiser,
        _read_optimiser,
    ),
    rule(
        LEARNING_RATE,
        under("lr_scheduler", "warmup_steps total_steps min_lr_factor decay_ratio decay_type"),
        _write_rate,
        _read_rate,
    ),
    rule(
        (JOB.recompute.mode, JOB.recompute.blocks, JOB.recompute.shard_inputs),
        under("activation_checkpoint", "mode selective_ac_option"),
        _write_recompute,
        _read_recompute,
    ),
    restricted(RATE.rescheduling_steps, [None], "torchtitan's pipelines drain after each step"),
    restricted(JOB.recompute.memory_gib, [None], "torchtitan chooses no blocks by memory"),
    absent("torchtitan has no adapters", LORA_RANK, (LORA.alpha, LORA.dropout, LORA.targets, LORA.rslora)),
    restricted(RUN.data.chat, [None], "torchtitan's dataset is of text, not of conversations"),
    restricted(RUN.data.phases, [[]], "torchtitan's data sets are not mixed by step"),
    restricted(RUN.data.packing, [None, "stream"], "torchtitan's samples are filled with documents"),
    restricted(JOB.trained.freeze, [()], "torchtitan freezes no weights by their names"),
    renamed("debug.seed", RUN.train.seed),
    rule(
        (RUN.checkpoint.every, RUN.checkpoint.keep, RUN.checkpoint.async_save),
        under("checkpoint", "enable interval keep_latest_k async_mode"),
        _write_checkpoint,
    ),
    renamed("metrics.log_freq", RUN.metrics.every),
    renamed(
        "compile.enable",
        JOB.compile,
        default=False,
        to=lambda value: value == "blocks",
        back=lambda value: "blocks" if value else "off",
    ),
    rule((), "loss"),
    ignored("torchtitan's models begin in ways of their own", (*_INITIAL,)),
    ignored("torchtitan captures what its compiler makes", JOB.graphs),
    ignored("torchtitan pads no vocabulary", JOB.vocab_multiple),
    ignored("torchtitan cuts a batch into a number of chunks, where its loss does", JOB.loss_chunk),
    ignored("FSDP2 gathers and reduces block by block", RUN.train.bucket_mib),
    ignored("torchtitan has data sets by name", RUN.data.source),
    ignored("it is torchtitan's own way", AROUND),
)


def as_run(job: Job, settings: Settings) -> Job:
    """Return the job with what torchtitan keeps: FSDP2's shards in float32 and, with SelectiveAC, the outputs
    of every second matrix product.
    """
    compiled = bool(settings.get("compile.enable", False))
    ways = framework_behaviour("fsdp", dp=job.dp, precision=job.precision, compiled=compiled)
    ways = replace(ways, wide_shards=True)  # of whatever a search shards; replicas have no shards
    if job.recompute.mode == "selective":
        ways = replace(ways, operators=("alternate_mm",))
    return replace(job, framework=ways, loss_chunk=0, vocab_multiple=1)


def _remarks(settings: Settings) -> Iterator[str]:
    if settings.get("loss", "").startswith("ChunkedLoss"):
        yield "the loss in chunks takes less memory for logits than is counted"
    if _read_layout(settings)[JOB.dp.mode] == "ddp" and _replicas(settings) > 1:
        yield "torchtitan reduces replicated gradients with each microbatch; once a step is priced"


TORCHTITAN = ExternalFramework(
    name="torchtitan",
    title="torchtitan 0.3.0",
    rules=RULES,
    render=render,
    parse=parse,
    unpriced=others("torchtitan", "unpriced"),
    unread=others("torchtitan", "unread"),
    as_run=as_run,
    remarks=_remarks,
    software=lambda settings: "compiled" if settings.get("compile.enable", False) else "today",
    plans=(
        "mode=ddp,zero2,zero3",
        "context=ring",
        "recompute=none,full",
        "schedule=1f1b,gpipe,bfs,interleaved,interleaved-zb,zb-v,dualpipe-v",
    ),
)
