"""DeepSpeed's JSON, of 0.19.8 (`deepspeed.runtime.config.DeepSpeedConfig` and the sections' pydantic models).

The JSON has the batch, ZeRO, types, optimiser and rate. The model, the samples and what is recomputed are up
to the training script: what a job says about them is written as comments, under the key `//`, at which
DeepSpeed does not look; whoever reads such a JSON says them beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import frexp
from typing import Any

from stretto.errors import Problem, StrettoError
from stretto.layout.layout import ORDER
from stretto.program import PLAIN
from stretto.run.config.schema import ScheduleConfig
from stretto.spec.data_parallel import KEEP
from stretto.spec.framework import ways_of
from stretto.spec.initial import Initial
from stretto.spec.job import Job
from stretto_interop.frameworks.choices import NAMES, Choices
from stretto_interop.frameworks.deepspeed_json import parse, render
from stretto_interop.frameworks.deepspeed_optimiser import OPTIMISER
from stretto_interop.frameworks.mapping import (
    Framework,
    Rule,
    Settings,
    aside,
    check_batch,
    model_words,
    next_token,
    only,
    refused,
    under,
    without_encoder,
)
from stretto_interop.frameworks.others import others

_NO_PIPELINE = (
    "DeepSpeed's JSON has no pipeline (a script makes one, with PipelineModule): microbatches run in turn"
)


# ------------------------------------------------------------------ batch and layout


def _write_batch(choices: Choices) -> Settings:
    job = choices.job
    check_batch(job)
    return {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.microbatches,
    }


def _read_batch(settings: Settings) -> Mapping[str, Any]:
    """Two of the three decide the third, as in DeepSpeed; replicas are those of `data_parallel_size`."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, count = (settings.get(name) for name in names)
    dp = settings["data_parallel_size"]
    if whole is None and micro is None:
        raise StrettoError(
            "neither train_batch_size nor train_micro_batch_size_per_gpu is set",
            hint="DeepSpeed needs one of them",
        )
    if whole is None:
        whole = micro * dp * (count or 1)
    if micro is None:
        micro = whole // (dp * (count or 1))
    if not micro or (count is not None and whole != micro * dp * count):
        raise StrettoError(
            f"train_batch_size={whole} is not train_micro_batch_size_per_gpu={micro} x "
            f"gradient_accumulation_steps={count or 1} x {dp} replicas",
            hint="leave one of the three out, or give --cluster another number of devices",
        )
    return {"batch.global_size": whole, "batch.micro_size": micro}


def _write_layout(choices: Choices) -> Settings:
    layout = choices.job.layout
    if layout.pp > 1:
        raise refused("layout.pp", layout.pp, _NO_PIPELINE, [1])
    if layout.cp > 1 and layout.tp > 1:
        rule = "DeepSpeed has sequence parallelism without AutoTP only"
        raise Problem("layout.cp", layout.cp, rule, "layout.tp=1, or layout.cp=1")
    if layout.cp > 1 and choices["layout.context"] != "ulysses":
        raise refused("layout.context", "ring", "DeepSpeed exchanges heads for positions", ["ulysses"])
    settings: dict[str, Any] = {}
    if layout.tp > 1:
        settings["tensor_parallel.autotp_size"] = layout.tp
    if layout.cp > 1:
        settings |= {"sequence_parallel_size": layout.cp, "data_parallel_size": layout.dp}
    if choices.job.shape.moe is not None and layout.ep > 1:
        settings |= {"expert_parallel.enabled": True, "expert_parallel.autoep_size": layout.ep}
    return settings


def _note_layout(choices: Choices) -> Iterator[str]:
    if choices["layout.cp"] > 1:
        yield "in the script: UlyssesSPAttentionHF.register_with_transformers, which exchanges heads"


def _read_layout(settings: Settings) -> Mapping[str, Any]:
    on = settings.get("expert_parallel.enabled", False)
    return {
        "layout.tp": max(1, settings.get("tensor_parallel.autotp_size") or 1),
        "layout.cp": settings.get("sequence_parallel_size", 1),
        "layout.context": "ulysses" if settings.get("sequence_parallel_size", 1) > 1 else "ring",
        "layout.ep": settings.get("expert_parallel.autoep_size", 1) if on else 1,
        "layout.dp": settings["data_parallel_size"],
    }


def _expert_tp(choices: Choices) -> Settings:
    job = choices.job
    split = job.layout.tp if job.expert_tp is None else job.expert_tp
    if job.layout.ep > 1 and split > 1:
        raise refused("layout.expert_tp", split, "DeepSpeed's AutoEP keeps each expert whole", [1])
    return {}


def _read_expert_tp(settings: Settings) -> Mapping[str, Any]:
    split = _read_layout(settings)
    return {"layout.expert_tp": 1} if split["layout.ep"] > 1 and split["layout.tp"] > 1 else {}


def _sequence_parallel(choices: Choices) -> Settings:
    if choices["layout.sequence_parallel"] and choices.job.layout.tp > 1:
        rule = "DeepSpeed's AutoTP keeps norms and the residual stream whole on every rank"
        raise refused("layout.sequence_parallel", True, rule, [False])
    return {}


# ------------------------------------------------------------------ ZeRO

_STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


def _write_zero(choices: Choices) -> Settings:
    job = choices.job
    dp = job.dp
    if dp.mode not in _STAGES:
        raise refused("dp.mode", dp.mode, "DeepSpeed has ZeRO's stages 0 to 3", _STAGES)
    settings: dict[str, Any] = {"zero_optimization.stage": _STAGES[dp.mode]}
    sizes = dp.sizes(job.copies)
    whole = {"shard_states": sizes.states, "shard_gradients": sizes.gradients}
    for field, size in whole.items():
        applies = dp.mode != "ddp" and (field == "shard_states" or dp.mode != "zero1")
        if applies and size != job.copies:
            rule = "DeepSpeed splits them over all ranks with the same parameters (MiCS is gone since 0.19)"
            raise refused(f"dp.{field}", size, rule, [job.copies])
    if dp.mode == "zero3" and sizes.parameters != job.copies:
        settings["zero_optimization.zero_hpz_partition_size"] = sizes.parameters
    return settings


def _write_bucket(choices: Choices) -> Settings:
    # without ZeRO, buckets have a fixed size; a plan leaves them as they are
    if choices.job.dp.mode == "ddp" or "train.bucket_mib" in choices.unsaid:
        return {}
    element = 4 if choices["train.dtype"] == "float32" else 2
    return {"zero_optimization.reduce_bucket_size": max(1, round(choices.job.bucket / element))}


def _read_bucket(settings: Settings) -> Mapping[str, Any]:
    elements = settings.get("zero_optimization.reduce_bucket_size", 500_000_000)
    return {"train.bucket_mib": elements * (4 if _dtype(settings) == "float32" else 2) / 2**20}


def _read_zero(settings: Settings) -> Mapping[str, Any]:
    stage = settings.get("zero_optimization.stage", 0)
    modes = {number: mode for mode, number in _STAGES.items()}
    if stage not in modes:
        raise StrettoError(f"zero_optimization.stage is {stage}", hint="one of 0, 1, 2, 3")
    values: dict[str, Any] = {"dp.mode": modes[stage]}
    part = settings.get("zero_optimization.zero_hpz_partition_size", 1)
    if part > 1 and stage == 3:
        values["dp.shard_parameters"] = part
    part = settings.get("zero_optimization.mics_shard_size", -1)  # until 0.18
    if part > 0 and stage == 3:
        values |= dict.fromkeys(("dp.shard_states", "dp.shard_gradients", "dp.shard_parameters"), part)
    return values


_OVERLAP = "zero_optimization.overlap_comm"  # no choice of ours: reductions always overlap


def _write_overlap(choices: Choices) -> Settings:
    return {} if choices.job.dp.mode == "ddp" else {_OVERLAP: True}


def _write_reduce(choices: Choices) -> Settings:
    mode, choice = choices.job.dp.mode, choices["dp.reduce"]
    does = "microbatch" if mode in ("zero2", "zero3") else "step"
    if choice not in ("auto", does):
        rule = f"DeepSpeed's ZeRO {mode[-1]} reduces with each microbatch"
        raise refused("dp.reduce", choice, rule, ["auto", does])
    return {}


_OFFLOADED = {"dp.offload": "offload_optimizer", "dp.offload_parameters": "offload_param"}


def _write_offload(choices: Choices) -> Settings:
    settings: dict[str, Any] = {}
    for choice, section in _OFFLOADED.items():
        place = choices[choice]
        if place == "none":
            continue
        if choices.job.dp.mode == "ddp":
            rule = "DeepSpeed offloads what ZeRO splits, from stage 1 on"
            raise refused(choice, place, rule, ["none"])
        if place == "nvme" and choices.job.dp.mode != "zero3":
            raise refused(choice, place, "DeepSpeed keeps states in files with ZeRO 3 only", ["cpu"])
        prefix = f"zero_optimization.{section}"
        settings[f"{prefix}.device"] = place
        if place == "nvme":
            settings[f"{prefix}.nvme_path"] = choices["dp.path"]
    return settings


def _read_offload(settings: Settings) -> Mapping[str, Any]:
    values: dict[str, Any] = {}
    for choice, section in _OFFLOADED.items():
        prefix = f"zero_optimization.{section}"
        values[choice] = settings.get(f"{prefix}.device", "none")
        if values[choice] == "nvme":
            values["dp.path"] = settings.get(f"{prefix}.nvme_path")
    return values


# ------------------------------------------------------------------ types


def _dtype(settings: Settings) -> str:
    if settings.get("bf16.enabled"):
        return "bfloat16"
    return "float16" if settings.get("fp16.enabled") else "float32"


def _write_types(choices: Choices) -> Settings:
    job = choices.job
    dtype, precision = job.precision.dtype, job.precision
    if dtype == "float64":
        raise refused("train.dtype", dtype, "DeepSpeed computes in float32 or 16 bits", ["float32"])
    if dtype == "float32":
        return {}
    settings: dict[str, Any] = {f"{'bf16' if dtype == 'bfloat16' else 'fp16'}.enabled": True}
    if precision.gradients == "float32":
        if job.dp.mode == "ddp":
            rule = f"DeepSpeed without ZeRO adds gradients in {dtype}, as it computes"
            raise Problem(
                "precision.gradients", "float32", rule, "precision.gradients=same, or dp.mode=zero1"
            )
        settings |= {"data_types.grad_accum_dtype": "fp32", "communication_data_type": "fp32"}
    if tuple(precision.keep) not in (KEEP, ()):
        rule = "DeepSpeed computes with all weights in 16 bits, beside float32 masters"
        raise refused("precision.keep", precision.keep, rule, [()])
    if dtype == "float16":
        mantissa, power = frexp(precision.loss_scale)
        if mantissa != 0.5:
            near = 2.0 ** round(power - 0.5)
            rule = "DeepSpeed starts from a power of two"
            raise refused("precision.loss_scale", precision.loss_scale, rule, [near])
        settings |= {
            "fp16.loss_scale": 0,
            "fp16.initial_scale_power": power - 1,
            "fp16.loss_scale_window": precision.loss_scale_steps,
            "fp16.hysteresis": 1,  # ours halves at every overflow
        }
    return settings


def _note_types(choices: Choices) -> Iterator[str]:
    dtype = choices["train.dtype"]
    if dtype in ("bfloat16", "float16"):
        yield f"all weights are {dtype}, norms and routers too, beside float32 masters"


def _read_types(settings: Settings) -> Mapping[str, Any]:
    dtype = _dtype(settings)
    values: dict[str, Any] = {"train.dtype": dtype}
    if dtype == "float32":
        return values
    summed = settings.get("data_types.grad_accum_dtype")
    values["precision.gradients"] = "float32" if summed in ("fp32", "float32", "float") else "same"
    if dtype == "float16":
        fixed = settings.get("fp16.loss_scale", 0)
        values["precision.loss_scale"] = fixed or 2.0 ** settings.get("fp16.initial_scale_power", 16)
        values["precision.loss_scale_steps"] = settings.get("fp16.loss_scale_window", 1000)
    return values


# ------------------------------------------------------------------ what the script decides


_ON_HOST = "activation_checkpointing.cpu_checkpointing"


def _write_recompute(choices: Choices) -> Settings:
    again = choices.job.recompute
    if again.mode == "none":
        return {}
    if again.mode != "full":
        rule = "DeepSpeed repeats whole modules: its script checkpoints blocks or none"
        raise refused("recompute.mode", again.mode, rule, ["none", "full"])
    return {"activation_checkpointing.partition_activations": again.shard_inputs}


def _note_recompute(choices: Choices) -> Iterator[str]:
    if choices["recompute.mode"] == "full":
        count = choices["recompute.blocks"]
        blocks = "each block" if count is None else f"each of the first {count} blocks"
        yield f"in the script: deepspeed.checkpointing.checkpoint around the call of {blocks}"


def _read_recompute(settings: Settings) -> Mapping[str, Any]:
    there = any(name.startswith("activation_checkpointing.") for name in settings)
    if not there:
        return {}
    part = settings.get("activation_checkpointing.partition_activations", False)
    return {"recompute.mode": "full", "recompute.shard_inputs": part}


def _note_model(choices: Choices) -> Iterator[str]:
    kernel = {"flex": "flex_attention", "explicit": "eager"}.get(choices["train.attention"], "sdpa")
    yield f'in the script: {model_words(choices.job.shape)}, with attn_implementation="{kernel}"'
    yield from (f"in the script: requires_grad is off for {one}" for one in choices["finetune.freeze"])
    yield f"in the script: samples of {choices['data.sequence']} tokens"
    initial = choices.job.initial
    if initial != Initial():
        scaled = ", of projections into the residual stream over sqrt(2 layers)" * initial.scaled_init
        yield f"in the script: initial values with standard deviation {initial.init_std}{scaled}"


_MODEL = tuple(name for name in NAMES if name.startswith(("model.", "lora.")))

_REPORTS = (
    *under("checkpoint", "every async_save if_busy keep keep_every keep_best resume may_differ"),
    *under("guard", "on_nonfinite on_spike spike_sigma spike_window max_skips"),
    *under("guard", "check_replicas check_memory on_mismatch"),
    *under("metrics", "every tensorboard tensorboard_dir peak_tflops trace"),
    *under("sample", "prompt tokens temperature top_k"),
    *under("run", "name dir private"),
    "elastic.layouts",
)
RULES = (
    Rule(
        choices=under("batch", "global_size micro_size"),
        settings=("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        write=_write_batch,
        read=_read_batch,
    ),
    Rule(
        choices=under("layout", "tp cp context ep dp pp"),
        settings=(
            "tensor_parallel.autotp_size",
            "sequence_parallel_size",
            "data_parallel_size",
            "expert_parallel.enabled",
            "expert_parallel.autoep_size",
        ),
        write=_write_layout,
        read=_read_layout,
        notes=_note_layout,
    ),
    Rule(choices=("layout.expert_tp",), write=_expert_tp, read=_read_expert_tp),
    Rule(choices=("layout.sequence_parallel",), write=_sequence_parallel),
    only("layout.order", [ORDER], "DeepSpeed's ranks are in the order of tensor, sequence and data"),
    only("layout.stages", [None], _NO_PIPELINE),
    without_encoder("DeepSpeed's JSON says nothing of an encoder"),
    *next_token("DeepSpeed's JSON says nothing of the data"),
    only("schedule.name", [PLAIN], _NO_PIPELINE),
    only("schedule.file", [None], _NO_PIPELINE),
    *(only(f"schedule.{name}", [None], _NO_PIPELINE) for name in ScheduleConfig.option_names()),
    Rule(
        choices=under("dp", "mode shard_states shard_gradients shard_parameters"),
        settings=under("zero_optimization", "stage zero_hpz_partition_size mics_shard_size"),
        write=_write_zero,
        read=_read_zero,
    ),
    Rule(
        choices=("train.bucket_mib",),
        settings=("zero_optimization.reduce_bucket_size",),
        write=_write_bucket,
        read=_read_bucket,
    ),
    Rule(choices=("dp.reduce",), write=_write_reduce),
    Rule(choices=(), settings=(_OVERLAP, _ON_HOST), write=_write_overlap),
    only("dp.gather", ["auto", "layer"], "DeepSpeed gathers layer by layer"),
    Rule(
        choices=under("dp", "offload offload_parameters path"),
        settings=(
            *under("zero_optimization.offload_optimizer", "device nvme_path"),
            *under("zero_optimization.offload_param", "device nvme_path"),
        ),
        write=_write_offload,
        read=_read_offload,
    ),
    Rule(
        choices=("train.dtype", *under("precision", "gradients keep loss_scale loss_scale_steps")),
        settings=(
            "bf16.enabled",
            *under("fp16", "enabled loss_scale initial_scale_power loss_scale_window hysteresis"),
            "data_types.grad_accum_dtype",
            "communication_data_type",
        ),
        write=_write_types,
        read=_read_types,
        notes=_note_types,
    ),
    only("precision.fp8", ["none"], "DeepSpeed's JSON has no products in 8 bits"),
    *OPTIMISER,
    Rule(
        choices=under("recompute", "mode blocks shard_inputs"),
        settings=("activation_checkpointing.partition_activations",),
        write=_write_recompute,
        read=_read_recompute,
        notes=_note_recompute,
    ),
    only("recompute.memory_gib", [None], "DeepSpeed chooses no blocks by memory"),
    Rule(
        choices=(*_MODEL, "finetune.freeze", "train.attention", "data.sequence"),
        write=lambda _: {},
        notes=_note_model,
    ),
    aside("a compiled module is up to the script", "train.compile"),
    aside("DeepSpeed captures graphs in inference", "train.graphs"),
    aside("padding of the vocabulary is up to the script's model", "train.vocab_multiple"),
    aside("the loss is the script's", "train.loss_chunk"),
    aside(
        "the training script's",
        *under(
            "data",
            "source phases tokenizer vocab end_of_text begin_of_text text_field format on_error split "
            "shuffle shuffle_window cache cache_gib chat chat_template packing too_long",
        ),
        *under("train", "seed device backend threads timeout_s start_s hang_s restarts grace_s"),
        *under("eval", "every batches"),
        *_REPORTS,
    ),
)

# ------------------------------------------------------------------ how it runs


def as_run(job: Job, settings: Settings) -> Job:
    """The job with what DeepSpeed keeps: beside other tensors the buffers of its reductions, and with
    `cpu_checkpointing` the inputs of blocks on the host.
    """
    kept = replace(
        ways_of("deepspeed", dp=job.dp, precision=job.precision),
        # of a search too, which tries all modes: ZeRO 3 has none
        lasting_gradients=job.precision.half and job.precision.gradients == "float32",
        buckets=0 if job.dp.mode == "zero3" else round(_read_bucket(settings)["train.bucket_mib"] * 2**20),
        inputs_on_host=bool(settings.get(_ON_HOST, False)),
    )
    return replace(job, framework=kept, loss_chunk=0)


def _overlaps(settings: Settings) -> bool:
    """Whether gradients are reduced during the backward: by default with ZeRO 3 alone."""
    if not settings:
        return True  # as it is written
    return bool(settings.get(_OVERLAP, settings.get("zero_optimization.stage", 0) == 3))


def _remarks(settings: Settings) -> Iterator[str]:
    if any(name.startswith("activation_checkpointing.") for name in settings):
        yield "it has activation_checkpointing, so that blocks are taken to be recomputed"
    else:
        yield "no activation_checkpointing: unless it is said beside it, nothing is taken to be recomputed"


DEEPSPEED = Framework(
    name="deepspeed",
    title="DeepSpeed 0.19.8",
    rules=RULES,
    render=render,
    parse=parse,
    unpriced=others("deepspeed", "unpriced"),
    unread=others("deepspeed", "unread"),
    as_run=as_run,
    remarks=_remarks,
    overlaps=_overlaps,
    software="today",
    plans=("pp=1", "schedule=1f1b", "context=ulysses", "sequence_parallel=false", "recompute=none,full"),
)
