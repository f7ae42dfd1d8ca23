"""DeepSpeed's JSON, of 0.19.8 (`deepspeed.runtime.config.DeepSpeedConfig` and the sections' pydantic models).

The JSON has the batch, ZeRO, types, optimiser and rate. The model, the samples and what is recomputed are up
to the training script: what a job says about them is written as comments, under the key `//`, at which
DeepSpeed does not look; whoever reads such a JSON says them beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import frexp
from typing import Any, cast

from stretto.errors import Problem, StrettoError
from stretto.job.data_parallel import KEEP
from stretto.job.framework import framework_behaviour
from stretto.job.initial import Initial
from stretto.job.job import Job
from stretto.job.optimiser import RateSchedule
from stretto.layout.layout import ORDER
from stretto.program import PLAIN
from stretto.run.config.schema import ScheduleConfig
from stretto_interop.frameworks.fields import JOB, NAMES, OPTIMISER, RATE, RUN, SHARDS, JobValues
from stretto_interop.frameworks.mapping import (
    AROUND,
    USER_MODEL,
    ExternalFramework,
    ParsedSettings,
    Rule,
    Settings,
    Start,
    Unset,
    Values,
    check_batch,
    describe_model,
    ignored,
    next_token,
    others,
    refused,
    require,
    restricted,
    rule,
    under,
    unsplit_experts,
    without_encoder,
)

# ------------------------------------------------------------------ the JSON

_COMMENT = "//"  # no key of DeepSpeed's


def render(settings: Settings, notes: Sequence[str]) -> str:
    """Return the JSON, with comments under the key `//`: the notes, and what is still to be filled in, marked
    `auto`.
    """
    tree: dict[str, Any] = {}
    missing = list[str]()
    for name, value in settings.items():
        if isinstance(value, Unset):
            missing.append(f"fill in {name} ({value.name}), such as {value.example}")
        *sections, last = name.split(".")
        inside = tree
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[last] = _AUTO if isinstance(value, Unset) else value
    return json.dumps({_COMMENT: [*notes, *missing], **tree}, indent=2) + "\n"


_AUTO = "auto"
# what DeepSpeed's pydantic models call otherwise, or used to
_RENAMED = {"bfloat16.": "bf16.", "zero_optimization.stage3_": "zero_optimization."}
_PRICED_IF_AUTO = (
    "train_",
    "gradient_accumulation_steps",
    "bf16.enabled",
    "fp16.enabled",
    "zero_optimization.stage",
)


def parse(text: str, source: str, start: Start) -> ParsedSettings:
    """Return the JSON's settings by dotted names, without those that switch off what is off by default.

    Raises:
        StrettoError: no JSON object, a duplicate key, `auto` in a setting that affects the price, or an
            unknown number of devices.
    """
    tree = _loaded(text, source)
    tree.pop(_COMMENT, None)
    settings = dict(_flat(tree))
    for name in [name for name, value in settings.items() if value == _AUTO]:
        if name.startswith(_PRICED_IF_AUTO):
            rule = f"{source}: {name} is auto, which the Trainer of transformers fills in"
            raise StrettoError(rule, hint="write the number (or true or false) in its place")
        del settings[name]
    for name, device in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if settings.pop(f"zero_optimization.{name}", False):  # until 0.3.16
            settings[f"zero_optimization.{device}.device"] = "cpu"
    disabled = [
        f"{section}."
        for section, inside in tree.items()
        if isinstance(inside, dict) and cast(dict[str, Any], inside).get("enabled") is False
    ]
    unread = tuple(pattern.removesuffix("*") for pattern in others("deepspeed", "unread"))
    for name in [name for name in settings if name.startswith(unread)]:
        if not settings[name] or name.startswith(tuple(disabled)):
            del settings[name]
    if settings.get(_RATIO) == 1:
        del settings[_RATIO]
    for name, kinds in _KINDS.items():
        value = settings.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, kinds) or value < 0:
            expected = "a whole number" if kinds == (int,) else "a number"
            raise StrettoError(f"{source}: {name} is {value!r}", hint=f"{expected}, 0 or more")
    return ParsedSettings(settings=_sized(settings, source, start.devices))


_RATIO = "zero_optimization.offload_optimizer.ratio"


def _loaded(text: str, source: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict[str, Any]()
        for name, value in pairs:
            if name in tree:
                raise StrettoError(f"{source}: {name} is there twice", hint="DeepSpeed refuses that too")
            tree[name] = value
        return tree

    try:
        tree = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise StrettoError(
            f"{source} line {error.lineno}: {error.msg}", hint="is it DeepSpeed's JSON?"
        ) from None
    if not isinstance(tree, dict):
        raise StrettoError(f"{source} is no JSON object", hint="is it DeepSpeed's JSON?")
    loaded = cast(dict[str, Any], tree)
    if isinstance(loaded.get("zero_optimization"), bool):  # as it was until 0.3
        loaded["zero_optimization"] = {"stage": int(loaded["zero_optimization"])}
    return loaded


def _flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            yield from _flat(cast(dict[str, Any], value), f"{name}.")
        else:
            old = next((old for old in _RENAMED if name.startswith(old)), None)
            yield (name if old is None else _RENAMED[old] + name.removeprefix(old)), value


_KINDS: Mapping[str, tuple[type, ...]] = {
    "train_batch_size": (int,),
    "train_micro_batch_size_per_gpu": (int,),
    "gradient_accumulation_steps": (int,),
    "tensor_parallel.autotp_size": (int,),
    "sequence_parallel_size": (int,),
    "data_parallel_size": (int,),
    "expert_parallel.autoep_size": (int,),
    "zero_optimization.stage": (int,),
    "zero_optimization.zero_hpz_partition_size": (int,),
    "zero_optimization.reduce_bucket_size": (int, float),
    "gradient_clipping": (int, float),
}


def _sized(settings: dict[str, Any], source: str, devices: int | None) -> dict[str, Any]:
    """Add the number of replicas, computed from the devices if the JSON does not give it."""
    tp = max(1, settings.get("tensor_parallel.autotp_size", 1))
    model_parallel = tp * settings.get("sequence_parallel_size", 1)
    dp = settings.get("data_parallel_size")
    if dp is None and devices is None:
        raise StrettoError(
            f"{source} does not say how many devices there are", hint="--cluster with :N, as in h100:64"
        )
    if dp is None and devices is not None:
        dp, remainder = divmod(devices, model_parallel)
        if remainder:
            rule = f"{source}: {devices} devices are not a multiple of {model_parallel} model-parallel ranks"
            raise StrettoError(rule, hint=f"nearest: {max(1, dp) * model_parallel} devices")
    return {**settings, "data_parallel_size": dp}


# ------------------------------------------------------------------ optimiser and learning rate

_OPTIMISERS = {"adamw": "AdamW", "lamb": "Lamb", "sgd": "SGD", "muon": "Muon"}
_PARAMS = "optimizer.params"


def _write_optimiser(values: JobValues) -> Settings:
    optimiser = values.job.optimiser
    name = optimiser.name
    require(values, JOB.optimiser.name, _OPTIMISERS, "DeepSpeed makes AdamW, Lamb, Muon and torch's own")
    rule = "DeepSpeed keeps means in 16 bits beside masters in 16 bits only"
    require(values, JOB.optimiser.states, ["float32"], rule)
    if optimiser.no_decay:
        rule = "in DeepSpeed the script makes the parameter groups"
        raise refused(JOB.optimiser.no_decay, list(optimiser.no_decay), rule, ["[]"])
    lr = Unset(JOB.optimiser.lr, optimiser.lr) if values.is_open(JOB.optimiser.lr) else optimiser.lr
    params: dict[str, Any] = {"lr": lr, "weight_decay": optimiser.weight_decay}
    if name != "sgd":
        params |= {"betas": list(optimiser.betas), "eps": optimiser.eps}
    if name in ("sgd", "muon"):
        params["momentum"] = optimiser.effective_momentum
    settings: dict[str, Any] = {"optimizer.type": _OPTIMISERS[name]}
    settings |= {f"{_PARAMS}.{key}": value for key, value in params.items()}
    settings["gradient_clipping"] = optimiser.clip or 0.0
    if name == "sgd" and values.job.dp.mode != "ddp":
        settings["zero_allow_untested_optimizer"] = True
    return settings


def _note_optimiser(values: JobValues) -> Iterator[str]:
    if values[JOB.optimiser.weight_decay]:
        groups = "two parameter groups, that of norms and biases with weight_decay=0"
        yield f"in the script: model_parameters of deepspeed.initialize are {groups}"


def _read_optimiser(settings: Settings) -> Values:
    values: dict[Any, Any] = {}
    kind = settings.get("optimizer.type")
    if kind is not None:
        names = {name.lower(): name_here for name_here, name in _OPTIMISERS.items()} | {"adam": "adamw"}
        if str(kind).lower() not in names:
            raise StrettoError(
                f"optimizer.type is {kind}: not modelled here", hint=f"what is: {', '.join(names)}"
            )
        values[JOB.optimiser.name] = names[str(kind).lower()]
        for key in ("lr", "weight_decay", "eps", "momentum"):
            if f"{_PARAMS}.{key}" in settings:
                values[f"optim.{key}"] = settings[f"{_PARAMS}.{key}"]
        if f"{_PARAMS}.betas" in settings:
            values[JOB.optimiser.betas] = tuple(settings[f"{_PARAMS}.betas"])
    values[JOB.optimiser.clip] = settings.get("gradient_clipping", 1.0) or None
    return values


_RATE = "scheduler.params"
_RATE_PARAMS = (
    "total_num_steps warmup_num_steps warmup_type warmup_min_lr warmup_max_lr warmup_min_ratio cos_min_ratio"
)


def _note_rate(_: JobValues) -> Iterator[str]:
    yield "the rate: DeepSpeed warms up from 0 unless optim.rate.warmup_init says more, in 2 steps at least"


def _write_rate(values: JobValues) -> Settings:
    rate = values.job.optimiser.rate
    steps: Any = rate.end(values[RUN.train.steps])
    warmup = round(rate.warmup_steps(values[RUN.train.steps]))
    if rate.decay_steps is None and values.is_open(RUN.train.steps):
        steps = Unset(RUN.train.steps, steps)
    warm = {f"{_RATE}.warmup_num_steps": max(1, warmup), f"{_RATE}.warmup_type": "linear"}
    total = {f"{_RATE}.total_num_steps": steps}
    lr = (
        Unset(JOB.optimiser.lr, values[JOB.optimiser.lr])
        if values.is_open(JOB.optimiser.lr)
        else values[JOB.optimiser.lr]
    )
    first = rate.warmup_init or 0.0
    high = {f"{_RATE}.warmup_min_lr": first * values[JOB.optimiser.lr], f"{_RATE}.warmup_max_lr": lr}
    if rate.schedule == "cosine":
        low = {f"{_RATE}.warmup_min_ratio": first, f"{_RATE}.cos_min_ratio": rate.min_ratio}
        return {"scheduler.type": "WarmupCosineLR", **total, **warm, **low}
    if rate.schedule == "constant":
        return {"scheduler.type": "WarmupLR", **high, **warm}
    if rate.schedule == "linear" and not rate.min_ratio:
        return {"scheduler.type": "WarmupDecayLR", **total, **high, **warm}
    if rate.schedule == "linear":
        raise refused(RATE.min_ratio, rate.min_ratio, "DeepSpeed's WarmupDecayLR ends at 0", [0.0])
    rule = "DeepSpeed warms up, then holds (WarmupLR) or decays at once (WarmupCosineLR, WarmupDecayLR)"
    raise refused(RATE.schedule, rate.schedule, rule, ["cosine", "constant", "linear"])


def _read_rate(settings: Settings) -> Values:
    kind = settings.get("scheduler.type")
    if kind is None:
        return {}
    kinds = {"WarmupCosineLR": "cosine", "WarmupLR": "constant", "WarmupDecayLR": "linear"}
    if kind not in kinds:
        return {}  # of the rate nothing is priced
    warm = settings.get(f"{_RATE}.warmup_num_steps", 1000)
    values: dict[Any, Any] = {
        RATE.schedule: kinds[kind],
        RATE.warmup: 0 if warm == 1 else warm,
    }
    if kind == "WarmupCosineLR":
        values[RATE.warmup_init] = settings.get(f"{_RATE}.warmup_min_ratio", 0.01)
        values[RATE.min_ratio] = settings.get(f"{_RATE}.cos_min_ratio", 0.0001)
    if kind == "WarmupDecayLR":
        values[RATE.min_ratio] = 0.0
    return values


OPTIMISER_RULES: tuple[Rule, ...] = (
    rule(
        OPTIMISER,
        (
            "optimizer.type",
            *under(_PARAMS, "lr betas eps weight_decay momentum"),
            "gradient_clipping",
            "zero_allow_untested_optimizer",
        ),
        _write_optimiser,
        _read_optimiser,
        notes=_note_optimiser,
    ),
    rule(
        (RATE.schedule, RATE.warmup, RATE.warmup_init, RATE.min_ratio, RATE.decay_steps, RUN.train.steps),
        ("scheduler.type", *under(_RATE, _RATE_PARAMS)),
        _write_rate,
        _read_rate,
        notes=_note_rate,
    ),
    restricted(RATE.rescheduling_steps, [None], "DeepSpeed's pipelines drain after each step"),
    restricted(RATE.decay_fraction, [RateSchedule.decay_fraction], "DeepSpeed decays at once, or never"),
    restricted(RATE.decay, [RateSchedule.decay], "DeepSpeed's decays are WarmupCosineLR and WarmupDecayLR"),
)


_NO_PIPELINE = (
    "DeepSpeed's JSON has no pipeline (a script makes one, with PipelineModule): microbatches run in turn"
)


# ------------------------------------------------------------------ batch and layout


def _write_batch(values: JobValues) -> Settings:
    job = values.job
    check_batch(job)
    return {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.microbatches,
    }


def _read_batch(settings: Settings) -> Values:
    """Two of the three decide the third, as in DeepSpeed; replicas are those of `data_parallel_size`."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    global_batch, micro, count = (settings.get(name) for name in names)
    dp = settings["data_parallel_size"]
    if global_batch is None and micro is None:
        raise StrettoError(
            "neither train_batch_size nor train_micro_batch_size_per_gpu is set",
            hint="DeepSpeed needs one of them",
        )
    if global_batch is None:
        global_batch = micro * dp * (count or 1)
    if micro is None:
        micro = global_batch // (dp * (count or 1))
    if not micro or (count is not None and global_batch != micro * dp * count):
        raise StrettoError(
            f"train_batch_size={global_batch} is not train_micro_batch_size_per_gpu={micro} x "
            f"gradient_accumulation_steps={count or 1} x {dp} replicas",
            hint="leave one of the three out, or give --cluster another number of devices",
        )
    return {JOB.global_batch: global_batch, JOB.micro_batch: micro}


def _write_layout(values: JobValues) -> Settings:
    layout = values.job.layout
    require(values, JOB.layout.pp, [1], _NO_PIPELINE)
    if layout.cp > 1 and layout.tp > 1:
        rule = "DeepSpeed has sequence parallelism without AutoTP only"
        raise Problem("layout.cp", layout.cp, rule, "layout.tp=1, or layout.cp=1")
    if layout.cp > 1 and values[JOB.context] != "ulysses":
        raise refused(JOB.context, "ring", "DeepSpeed exchanges heads for positions", ["ulysses"])
    settings: dict[str, Any] = {}
    if layout.tp > 1:
        settings["tensor_parallel.autotp_size"] = layout.tp
    if layout.cp > 1:
        settings |= {"sequence_parallel_size": layout.cp, "data_parallel_size": layout.dp}
    if values.job.shape.moe is not None and layout.ep > 1:
        settings |= {"expert_parallel.enabled": True, "expert_parallel.autoep_size": layout.ep}
    return settings


def _note_layout(values: JobValues) -> Iterator[str]:
    if values[JOB.layout.cp] > 1:
        yield "in the script: UlyssesSPAttentionHF.register_with_transformers, which exchanges heads"


def _read_layout(settings: Settings) -> Values:
    on = settings.get("expert_parallel.enabled", False)
    return {
        JOB.layout.tp: max(1, settings.get("tensor_parallel.autotp_size") or 1),
        JOB.layout.cp: settings.get("sequence_parallel_size", 1),
        JOB.context: "ulysses" if settings.get("sequence_parallel_size", 1) > 1 else "ring",
        JOB.layout.ep: settings.get("expert_parallel.autoep_size", 1) if on else 1,
        JOB.layout.dp: settings["data_parallel_size"],
    }


def _read_expert_tp(settings: Settings) -> Values:
    split = _read_layout(settings)
    return {JOB.expert_tp: 1} if split[JOB.layout.ep] > 1 and split[JOB.layout.tp] > 1 else {}


def _sequence_parallel(values: JobValues) -> Settings:
    if values[JOB.sequence_parallel] and values.job.layout.tp > 1:
        rule = "DeepSpeed's AutoTP keeps norms and the residual stream whole on every rank"
        raise refused(JOB.sequence_parallel, True, rule, [False])
    return {}


# ------------------------------------------------------------------ ZeRO

_STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


def _write_zero(values: JobValues) -> Settings:
    job = values.job
    dp = job.dp
    require(values, JOB.dp.mode, _STAGES, "DeepSpeed has ZeRO's stages 0 to 3")
    settings: dict[str, Any] = {"zero_optimization.stage": _STAGES[dp.mode]}
    sizes = dp.sizes(job.copies)
    global_batch = {"shard_states": sizes.states, "shard_gradients": sizes.gradients}
    for field, size in global_batch.items():
        applies = dp.mode != "ddp" and (field == "shard_states" or dp.mode != "zero1")
        if applies and size != job.copies:
            rule = "DeepSpeed splits them over all ranks with the same parameters (MiCS is gone since 0.19)"
            raise refused(f"dp.{field}", size, rule, [job.copies])
    if dp.mode == "zero3" and sizes.parameters != job.copies:
        settings["zero_optimization.zero_hpz_partition_size"] = sizes.parameters
    return settings


def _write_bucket(values: JobValues) -> Settings:
    # without ZeRO, buckets have a fixed size; a plan leaves them as they are
    if values.job.dp.mode == "ddp" or values.is_unsaid(RUN.train.bucket_mib):
        return {}
    element = 4 if values[JOB.precision.dtype] == "float32" else 2
    return {"zero_optimization.reduce_bucket_size": max(1, round(values.job.bucket / element))}


def _read_bucket(settings: Settings) -> Values:
    elements = settings.get("zero_optimization.reduce_bucket_size", 500_000_000)
    return {RUN.train.bucket_mib: elements * (4 if _dtype(settings) == "float32" else 2) / 2**20}


def _read_zero(settings: Settings) -> Values:
    stage = settings.get("zero_optimization.stage", 0)
    modes = {number: mode for mode, number in _STAGES.items()}
    if stage not in modes:
        raise StrettoError(f"zero_optimization.stage is {stage}", hint="one of 0, 1, 2, 3")
    values: dict[Any, Any] = {JOB.dp.mode: modes[stage]}
    part = settings.get("zero_optimization.zero_hpz_partition_size", 1)
    if part > 1 and stage == 3:
        values[JOB.dp.shard_parameters] = part
    part = settings.get("zero_optimization.mics_shard_size", -1)  # until 0.18
    if part > 0 and stage == 3:
        values |= dict.fromkeys(SHARDS, part)
    return values


_OVERLAP = "zero_optimization.overlap_comm"  # no choice of ours: reductions always overlap


def _write_overlap(values: JobValues) -> Settings:
    return {} if values.job.dp.mode == "ddp" else {_OVERLAP: True}


def _write_reduce(values: JobValues) -> Settings:
    mode = values.job.dp.mode
    does = "microbatch" if mode in ("zero2", "zero3") else "step"
    rule = f"DeepSpeed's ZeRO {mode[-1]} reduces with each microbatch"
    require(values, JOB.dp.reduce, ["auto", does], rule)
    return {}


_OFFLOADED = {JOB.dp.offload: "offload_optimizer", JOB.dp.offload_parameters: "offload_param"}


def _write_offload(values: JobValues) -> Settings:
    settings: dict[str, Any] = {}
    for choice, section in _OFFLOADED.items():
        place = values[choice]
        if place == "none":
            continue
        if values.job.dp.mode == "ddp":
            rule = "DeepSpeed offloads what ZeRO splits, from stage 1 on"
            raise refused(choice, place, rule, ["none"])
        if place == "nvme" and values.job.dp.mode != "zero3":
            raise refused(choice, place, "DeepSpeed keeps states in files with ZeRO 3 only", ["cpu"])
        prefix = f"zero_optimization.{section}"
        settings[f"{prefix}.device"] = place
        if place == "nvme":
            settings[f"{prefix}.nvme_path"] = values[JOB.dp.path]
    return settings


def _read_offload(settings: Settings) -> Values:
    values: dict[Any, Any] = {}
    for choice, section in _OFFLOADED.items():
        prefix = f"zero_optimization.{section}"
        values[choice] = settings.get(f"{prefix}.device", "none")
        if values[choice] == "nvme":
            values[JOB.dp.path] = settings.get(f"{prefix}.nvme_path")
    return values


# ------------------------------------------------------------------ types


def _dtype(settings: Settings) -> str:
    if settings.get("bf16.enabled"):
        return "bfloat16"
    return "float16" if settings.get("fp16.enabled") else "float32"


def _write_types(values: JobValues) -> Settings:
    job = values.job
    dtype, precision = job.precision.dtype, job.precision
    if dtype == "float64":
        raise refused(JOB.precision.dtype, dtype, "DeepSpeed computes in float32 or 16 bits", ["float32"])
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
        raise refused(JOB.precision.keep, precision.keep, rule, [()])
    if dtype == "float16":
        mantissa, power = frexp(precision.loss_scale)
        if mantissa != 0.5:
            closest = 2.0 ** round(power - 0.5)
            rule = "DeepSpeed starts from a power of two"
            raise refused(JOB.precision.loss_scale, precision.loss_scale, rule, [closest])
        settings |= {
            "fp16.loss_scale": 0,
            "fp16.initial_scale_power": power - 1,
            "fp16.loss_scale_window": precision.loss_scale_steps,
            "fp16.hysteresis": 1,  # ours halves at every overflow
        }
    return settings


def _note_types(values: JobValues) -> Iterator[str]:
    dtype = values[JOB.precision.dtype]
    if dtype in ("bfloat16", "float16"):
        yield f"all weights are {dtype}, norms and routers too, beside float32 masters"


def _read_types(settings: Settings) -> Values:
    dtype = _dtype(settings)
    values: dict[Any, Any] = {JOB.precision.dtype: dtype}
    if dtype == "float32":
        return values
    summed = settings.get("data_types.grad_accum_dtype")
    values[JOB.precision.gradients] = "float32" if summed in ("fp32", "float32", "float") else "same"
    if dtype == "float16":
        fixed = settings.get("fp16.loss_scale", 0)
        values[JOB.precision.loss_scale] = fixed or 2.0 ** settings.get("fp16.initial_scale_power", 16)
        values[JOB.precision.loss_scale_steps] = settings.get("fp16.loss_scale_window", 1000)
    return values


# ------------------------------------------------------------------ what the script decides


_ON_HOST = "activation_checkpointing.cpu_checkpointing"


def _write_recompute(values: JobValues) -> Settings:
    again = values.job.recompute
    rule = "DeepSpeed repeats whole modules: its script checkpoints blocks or none"
    require(values, JOB.recompute.mode, ["none", "full"], rule)
    if again.mode == "none":
        return {}
    return {"activation_checkpointing.partition_activations": again.shard_inputs}


def _note_recompute(values: JobValues) -> Iterator[str]:
    if values[JOB.recompute.mode] == "full":
        count = values[JOB.recompute.blocks]
        blocks = "each block" if count is None else f"each of the first {count} blocks"
        yield f"in the script: deepspeed.checkpointing.checkpoint around the call of {blocks}"


def _read_recompute(settings: Settings) -> Values:
    present = any(name.startswith("activation_checkpointing.") for name in settings)
    if not present:
        return {}
    part = settings.get("activation_checkpointing.partition_activations", False)
    return {JOB.recompute.mode: "full", JOB.recompute.shard_inputs: part}


def _note_model(values: JobValues) -> Iterator[str]:
    kernel = {"flex": "flex_attention", "explicit": "eager"}.get(values[JOB.attention], "sdpa")
    yield f'in the script: {describe_model(values.job.shape)}, with attn_implementation="{kernel}"'
    yield from (f"in the script: requires_grad is off for {item}" for item in values[JOB.trained.freeze])
    yield f"in the script: samples of {values['data.sequence']} tokens"
    initial = values.job.initial
    if initial != Initial():
        scaled = ", of projections into the residual stream over sqrt(2 layers)" * initial.scaled_init
        yield f"in the script: initial values with standard deviation {initial.init_std}{scaled}"


_MODEL = tuple(name for name in NAMES if name.startswith(("model.", "lora.")) and name not in USER_MODEL)

RULES = (
    rule(
        (JOB.global_batch, JOB.micro_batch),
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps",
        _write_batch,
        _read_batch,
    ),
    rule(
        (JOB.layout.tp, JOB.layout.cp, JOB.context, JOB.layout.ep, JOB.layout.dp, JOB.layout.pp),
        "tensor_parallel.autotp_size sequence_parallel_size data_parallel_size "
        "expert_parallel.enabled expert_parallel.autoep_size",
        _write_layout,
        _read_layout,
        notes=_note_layout,
    ),
    unsplit_experts("DeepSpeed's AutoEP keeps each expert whole", (), _read_expert_tp),
    rule(JOB.sequence_parallel, write=_sequence_parallel),
    restricted(JOB.layout.order, [ORDER], "DeepSpeed's ranks are in the order of tensor, sequence and data"),
    restricted(JOB.stage_layers, [None], _NO_PIPELINE),
    without_encoder("DeepSpeed's JSON says nothing of an encoder"),
    *next_token("DeepSpeed's JSON says nothing of the data"),
    restricted(JOB.schedule, [PLAIN], _NO_PIPELINE),
    restricted(RUN.schedule.file, [None], _NO_PIPELINE),
    *(restricted(f"schedule.{name}", [None], _NO_PIPELINE) for name in ScheduleConfig.option_names()),
    rule(
        (JOB.dp.mode, *SHARDS),
        under("zero_optimization", "stage zero_hpz_partition_size mics_shard_size"),
        _write_zero,
        _read_zero,
    ),
    rule(RUN.train.bucket_mib, "zero_optimization.reduce_bucket_size", _write_bucket, _read_bucket),
    rule(JOB.dp.reduce, write=_write_reduce),
    rule((), (_OVERLAP, _ON_HOST), _write_overlap),
    restricted(JOB.dp.gather, ["auto", "layer"], "DeepSpeed gathers layer by layer"),
    rule(
        (JOB.dp.offload, JOB.dp.offload_parameters, JOB.dp.path),
        (
            *under("zero_optimization.offload_optimizer", "device nvme_path"),
            *under("zero_optimization.offload_param", "device nvme_path"),
        ),
        _write_offload,
        _read_offload,
    ),
    rule(
        (
            JOB.precision.dtype,
            JOB.precision.gradients,
            JOB.precision.keep,
            JOB.precision.loss_scale,
            JOB.precision.loss_scale_steps,
        ),
        (
            "bf16.enabled",
            *under("fp16", "enabled loss_scale initial_scale_power loss_scale_window hysteresis"),
            "data_types.grad_accum_dtype",
            "communication_data_type",
        ),
        _write_types,
        _read_types,
        notes=_note_types,
    ),
    restricted(JOB.precision.fp8, ["none"], "DeepSpeed's JSON has no products in 8 bits"),
    *OPTIMISER_RULES,
    rule(
        (JOB.recompute.mode, JOB.recompute.blocks, JOB.recompute.shard_inputs),
        "activation_checkpointing.partition_activations",
        _write_recompute,
        _read_recompute,
        notes=_note_recompute,
    ),
    restricted(JOB.recompute.memory_gib, [None], "DeepSpeed chooses no blocks by memory"),
    rule((*_MODEL, JOB.trained.freeze, JOB.attention, JOB.sequence), notes=_note_model),
    ignored("a compiled module is up to the script", JOB.compile),
    ignored("DeepSpeed captures graphs in inference", JOB.graphs),
    ignored("padding of the vocabulary is up to the script's model", JOB.vocab_multiple),
    ignored("the loss is the script's", JOB.loss_chunk),
    ignored(
        "the training script's",
        (
            *AROUND,
            *under("data", "source phases chat packing"),
            *under("train", "seed"),
            *under("checkpoint", "every async_save keep"),
            *under("metrics", "every"),
        ),
    ),
)

# ------------------------------------------------------------------ how it runs


def as_run(job: Job, settings: Settings) -> Job:
    """Return the job with what DeepSpeed keeps in memory: the buffers of its reductions and, with
    `cpu_checkpointing`, the inputs of blocks on the host.
    """
    ways = replace(
        framework_behaviour("deepspeed", dp=job.dp, precision=job.precision),
        # of a search too, which tries all modes: ZeRO 3 has none
        lasting_gradients=job.precision.half and job.precision.gradients == "float32",
        buckets=0 if job.dp.mode == "zero3" else round(_read_bucket(settings)[RUN.train.bucket_mib] * 2**20),
        inputs_on_host=bool(settings.get(_ON_HOST, False)),
    )
    return replace(job, framework=ways, loss_chunk=0)


def _overlaps(settings: Settings) -> bool:
    """True if gradients are reduced during the backward: by default with ZeRO 3 alone."""
    if not settings:
        return True  # as it is written
    return bool(settings.get(_OVERLAP, settings.get("zero_optimization.stage", 0) == 3))


def _remarks(settings: Settings) -> Iterator[str]:
    if any(name.startswith("activation_checkpointing.") for name in settings):
        yield "it has activation_checkpointing, so that blocks are taken to be recomputed"
    else:
        yield "no activation_checkpointing: unless it is said beside it, nothing is taken to be recomputed"


DEEPSPEED = ExternalFramework(
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
    software=lambda _: "today",
    plans=("pp=1", "schedule=1f1b", "context=ulysses", "sequence_parallel=false", "recompute=none,full"),
)
