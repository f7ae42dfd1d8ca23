"""Types, optimiser, learning rate, data and the run in Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.run.config.load import run_name
from stretto.spec.data_parallel import KEEP
from stretto_interop.frameworks.fields import EXPERTS, JOB, RUN, JobValues
from stretto_interop.frameworks.mapping import (
    Rule,
    Settings,
    Unset,
    Values,
    flag,
    ignored,
    one_of,
    refused,
    renamed,
    restricted,
    rule,
)
from stretto_interop.frameworks.megatron.data import DATA, parted
from stretto_interop.frameworks.megatron.rate import LEARNING_RATE

SEED = 1234  # Megatron-LM's usual one; it takes none below 1


# ------------------------------------------------------------------ types


def _write_dtype(values: JobValues) -> Settings:
    dtype, same_type = values[JOB.precision.dtype], values[JOB.precision.gradients] == "same"
    kinds: dict[str, dict[str, Any]] = {"bfloat16": {"bf16": True}, "float16": {"fp16": True}, "float32": {}}
    if dtype not in kinds:
        raise refused(JOB.precision.dtype, dtype, "Megatron-LM computes in 32 or 16 bits", kinds)
    if dtype == "float32":
        return {}
    if not same_type:
        return {**kinds[dtype], "accumulate-allreduce-grads-in-fp32": True}
    return {**kinds[dtype], "grad-reduce-in-bf16": True} if dtype == "bfloat16" else kinds[dtype]


def _read_dtype(settings: Settings) -> Values:
    half = "bfloat16" if "bf16" in settings else "float16" if "fp16" in settings else "float32"
    reduced = "grad-reduce-in-bf16" in settings or settings.get("main-grads-dtype") == "bf16"
    wide = half == "float32" or "accumulate-allreduce-grads-in-fp32" in settings
    wide = wide or (half == "bfloat16" and not reduced)
    return {JOB.precision.dtype: half, JOB.precision.gradients: "float32" if wide else "same"}


def _write_keep(values: JobValues) -> Settings:
    keep = tuple(values[JOB.precision.keep])
    if keep not in (KEEP, ()):
        instead = "Megatron-LM keeps no weights in 32 bits; its router can compute in them"
        raise refused(JOB.precision.keep, keep, instead, (KEEP, ()))
    if values[EXPERTS] is None or keep == ():
        return {}
    return {"moe-router-dtype": "fp32"}


def _keep_notes(values: JobValues) -> Iterable[str]:
    if values[JOB.precision.keep] and values[JOB.precision.dtype] in ("bfloat16", "float16"):
        weights = ", ".join(values[JOB.precision.keep])
        yield f"precision.keep={weights}: Megatron-LM keeps these weights in 16 bits, with masters in 32"


def _read_keep(settings: Settings) -> Values:
    return {JOB.precision.keep: KEEP} if "moe-router-dtype" in settings else {}


def _write_fp8(values: JobValues) -> Settings:
    fp8 = values[JOB.precision.fp8]
    if fp8 == "none":
        return {}
    if fp8 == "row":
        instead = "Megatron-LM's scales are of a whole tensor, or of blocks (--fp8-recipe)"
        raise refused(JOB.precision.fp8, fp8, instead, ("tensor",))
    return {"fp8-format": "hybrid", "fp8-recipe": "tensorwise"}


def _read_fp8(settings: Settings) -> Values:
    return {JOB.precision.fp8: "tensor" if "fp8-format" in settings else "none"}


def _write_scale(values: JobValues) -> Settings:
    if values[JOB.precision.dtype] != "float16":
        return {}
    return {
        "initial-loss-scale": values[JOB.precision.loss_scale],
        "loss-scale-window": values[JOB.precision.loss_scale_steps],
        "hysteresis": 1,  # the scale is halved at the first overflow
    }


def _read_scale(settings: Settings) -> Values:
    if "fp16" not in settings:
        return {}
    return {
        JOB.precision.loss_scale: settings.get("loss-scale", settings.get("initial-loss-scale", 2.0**32)),
        JOB.precision.loss_scale_steps: int(settings.get("loss-scale-window", 1000)),
    }


# ------------------------------------------------------------------ optimiser

_OPTIMISERS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}


def _write_optimiser(values: JobValues) -> Settings:
    name, momentum = values[JOB.optimiser.name], values[JOB.optimiser.momentum]
    if name not in _OPTIMISERS:
        raise refused(JOB.optimiser.name, name, "Megatron-LM has Adam, SGD and Muon", _OPTIMISERS)
    if name == "muon" and values[JOB.dp.mode] != "ddp":
        raise refused(JOB.optimiser.name, name, "Megatron-LM shards no states of Muon", ("adamw",))
    if values.is_unsaid(JOB.optimiser.betas):
        return {"optimizer": _OPTIMISERS[name]}
    if name == "adamw":
        beta1, beta2 = values[JOB.optimiser.betas]
        return {
            "optimizer": "adam",
            "adam-beta1": beta1,
            "adam-beta2": beta2,
            "adam-eps": values[JOB.optimiser.eps],
        }
    default = 0.95 if name == "muon" else 0.0
    return {"optimizer": _OPTIMISERS[name], f"{name}-momentum": momentum or default}


def _read_optimiser(settings: Settings) -> Values:
    name = settings.get("optimizer", "adam").removeprefix("dist_")
    name_here = next((name_here for name_here, name_there in _OPTIMISERS.items() if name_there == name), None)
    if name_here is None:
        hint = f"what is: {', '.join(_OPTIMISERS.values())}"
        raise StrettoError(f"--optimizer is {name}: not modelled here", hint=hint)
    momentum = 0.0 if name_here == "adamw" else settings.get(f"{name_here}-momentum", 0.9)
    return {
        JOB.optimiser.name: name_here,
        JOB.optimiser.betas: (settings.get("adam-beta1", 0.9), settings.get("adam-beta2", 0.999)),
        JOB.optimiser.eps: settings.get("adam-eps", 1e-8),
        JOB.optimiser.momentum: momentum,
    }


def _write_states(values: JobValues) -> Settings:
    if values[JOB.optimiser.states] == "float32":
        return {}
    if values[JOB.dp.mode] != "zero1":
        instead = "Megatron-LM keeps states in 16 bits with its distributed optimizer (dp.mode=zero1)"
        raise refused(JOB.optimiser.states, values[JOB.optimiser.states], instead, ("float32",))
    return {"use-precision-aware-optimizer": True, "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"}


def _read_states(settings: Settings) -> Values:
    kinds = [settings.get(name, "fp32") for name in ("exp-avg-dtype", "exp-avg-sq-dtype")]
    if kinds in (["fp32", "fp32"], ["bf16", "bf16"]):
        return {JOB.optimiser.states: "float32" if kinds[0] == "fp32" else "bfloat16"}
    raise StrettoError(
        f"--exp-avg-dtype {kinds[0]} and --exp-avg-sq-dtype {kinds[1]}: not priced",
        hint="what is: both fp32, or both bf16",
    )


def _write_clip(values: JobValues) -> Settings:
    return {"clip-grad": values[JOB.optimiser.clip] or 0.0}


def _read_clip(settings: Settings) -> Values:
    return {JOB.optimiser.clip: settings.get("clip-grad", 1.0) or None}


# ------------------------------------------------------------------ the run


def _write_seed(values: JobValues) -> Settings:
    return {"seed": values[RUN.train.seed] or SEED}


def _read_seed(settings: Settings) -> Values:
    return {RUN.train.seed: settings.get("seed", SEED)}


def _seed_notes(values: JobValues) -> Iterable[str]:
    if values[RUN.train.seed] == 0 and not values.is_unsaid(RUN.train.seed):
        yield f"train.seed=0: Megatron-LM takes seeds above 0, and this is {SEED}"


def _write_evaluation(values: JobValues) -> Settings:
    if values[RUN.eval.every] is None:
        return {"eval-iters": 0}
    return {"eval-interval": values[RUN.eval.every], "eval-iters": values[RUN.eval.batches]}


def _read_evaluation(settings: Settings) -> Values:
    """None where all of the source is trained on: nothing of it is held out."""
    if parted(settings):
        return {RUN.eval.every: None}
    batches = settings.get("eval-iters", 100)
    if not batches:
        return {RUN.eval.every: None}
    return {RUN.eval.every: settings.get("eval-interval", 1000), RUN.eval.batches: batches}


_BOARD = (RUN.metrics.tensorboard, RUN.metrics.tensorboard_dir)


def _write_replicas(values: JobValues) -> Settings:
    every = values[RUN.guard.check_replicas]
    return {} if every is None else {"check-weight-hash-across-dp-replicas-interval": every}


def _read_replicas(settings: Settings) -> Values:
    return {RUN.guard.check_replicas: settings.get("check-weight-hash-across-dp-replicas-interval")}


def _write_checkpoint(values: JobValues) -> Settings:
    """Where and when to save; without an interval at the end only, which is that of the last step."""
    if values.is_unsaid(RUN.run.name):
        return {}
    resume = values[RUN.checkpoint.resume]
    if resume not in ("never", "auto"):
        instead = "Megatron-LM cannot load a checkpoint of another framework"
        raise refused(RUN.checkpoint.resume, resume, instead, ("never", "auto"))
    folder = f"{values[RUN.run.dir]}/{values[RUN.run.name]}"
    every = values[RUN.checkpoint.every]
    steps: object = RUN.checkpoint.every if values.is_open(RUN.checkpoint.every) else RUN.train.steps
    board = values[RUN.metrics.tensorboard_dir]
    if board is None and values[RUN.metrics.tensorboard]:
        board = f"{folder}/tensorboard"
    interval = Unset(steps, every or values[RUN.train.steps]) if values.is_open(steps) else None
    return {
        "save": f"{folder}/checkpoints",
        "save-interval": interval or every or values[RUN.train.steps],
        **({"load": f"{folder}/checkpoints"} if resume == "auto" else {}),
        **({"tensorboard-dir": board} if board else {}),
    }


def _read_checkpoint(settings: Settings) -> Values:
    """The folder that checkpoints are saved to is the run's, or lies in it as `checkpoints`."""
    result: dict[Any, Any] = {RUN.checkpoint.every: settings.get("save-interval")}
    save = settings.get("save")
    folder = None if save is None else Path(save)
    if folder is not None:
        folder = folder.parent if folder.name == "checkpoints" else folder
        result |= {RUN.run.dir: str(folder.parent), RUN.run.name: run_name(folder)}
        if settings.get("load") == save:
            result[RUN.checkpoint.resume] = "auto"
    board = settings.get("tensorboard-dir")
    if board is not None:
        inside = folder is not None and Path(board) == folder / "tensorboard"
        result |= {RUN.metrics.tensorboard: True} if inside else {RUN.metrics.tensorboard_dir: board}
    return result


def _write_retained(values: JobValues) -> Settings:
    every = values[RUN.checkpoint.keep_every]
    return {} if every is None else {"save-retain-interval": every}


def _write_bucket(values: JobValues) -> Settings:
    """In parameters, where ours is in bytes of weights."""
    each = 2 if values[JOB.precision.dtype] in ("bfloat16", "float16") else 4
    return {"ddp-bucket-size": int(values[RUN.train.bucket_mib] * 2**20 / each)}


def _read_bucket(settings: Settings) -> Values:
    size = settings.get("ddp-bucket-size")
    each = 2 if settings.keys() & {"bf16", "fp16"} else 4
    return {} if size is None else {RUN.train.bucket_mib: size * each / 2**20}


def _minutes(seconds: float) -> int:
    return ceil(seconds / 60)


def _seconds(minutes: int) -> float:
    return 60.0 * minutes


TRAINING: tuple[Rule, ...] = (
    renamed("seq-length", JOB.sequence),
    rule(
        (JOB.precision.dtype, JOB.precision.gradients),
        "bf16 fp16 accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16 main-grads-dtype",
        _write_dtype,
        _read_dtype,
    ),
    rule(JOB.precision.keep, "moe-router-dtype", _write_keep, _read_keep, notes=_keep_notes),
    rule(JOB.precision.fp8, "fp8-format fp8-recipe", _write_fp8, _read_fp8),
    rule(
        (JOB.precision.loss_scale, JOB.precision.loss_scale_steps),
        "loss-scale initial-loss-scale loss-scale-window hysteresis",
        _write_scale,
        _read_scale,
    ),
    one_of(
        "attention-backend",
        JOB.attention,
        {"auto": "auto", "sdpa": "flash", "explicit": "unfused"},
        also={"fused": "sdpa", "local": "explicit"},
        default="auto",
        instead="Megatron-LM has fused kernels and stored scores",
    ),
    ignored("Megatron-LM computes the logits of a microbatch at once", JOB.loss_chunk),
    renamed("make-vocab-size-divisible-by", JOB.vocab_multiple, default=128),
    rule(
        (JOB.optimiser.name, JOB.optimiser.betas, JOB.optimiser.eps, JOB.optimiser.momentum),
        "optimizer adam-beta1 adam-beta2 adam-eps sgd-momentum muon-momentum",
        _write_optimiser,
        _read_optimiser,
    ),
    renamed("weight-decay", JOB.optimiser.weight_decay, default=0.01),
    restricted(
        JOB.optimiser.no_decay,
        ((), []),
        "Megatron-LM exempts norms and biases from weight decay, and no others",
    ),
    rule(
        JOB.optimiser.states,
        "use-precision-aware-optimizer exp-avg-dtype exp-avg-sq-dtype main-params-dtype",
        _write_states,
        _read_states,
    ),
    rule(JOB.optimiser.clip, "clip-grad", _write_clip, _read_clip),
    LEARNING_RATE,
    rule(RUN.train.seed, "seed", _write_seed, _read_seed, notes=_seed_notes),
    restricted(RUN.train.device, ("auto", "cuda"), "Megatron-LM trains on GPUs"),
    restricted(RUN.train.backend, ("auto", "nccl"), "Megatron-LM's ranks exchange tensors of GPUs by NCCL"),
    renamed("distributed-timeout-minutes", RUN.train.timeout_s, to=_minutes, back=_seconds),
    rule(RUN.train.bucket_mib, "ddp-bucket-size", _write_bucket, _read_bucket),
    *DATA,
    rule((RUN.eval.every, RUN.eval.batches), "eval-interval eval-iters", _write_evaluation, _read_evaluation),
    rule(
        (RUN.checkpoint.every, RUN.checkpoint.resume, RUN.run.dir, RUN.run.name, *_BOARD),
        "save save-interval load tensorboard-dir",
        _write_checkpoint,
        _read_checkpoint,
    ),
    renamed("log-interval", RUN.metrics.every),
    rule(
        RUN.guard.check_replicas,
        "check-weight-hash-across-dp-replicas-interval",
        _write_replicas,
        _read_replicas,
    ),
    ignored("Megatron-LM stops at a loss that is not finite", (RUN.guard.on_nonfinite, RUN.guard.max_skips)),
    ignored(
        "Megatron-LM reports a spike", (RUN.guard.on_spike, RUN.guard.spike_sigma, RUN.guard.spike_window)
    ),
    ignored("Megatron-LM stops where replicas differ", RUN.guard.on_mismatch),
    ignored("Megatron-LM compares replicas alone", RUN.guard.check_memory),
    ignored("Megatron-LM's folders have the user's usual permissions", RUN.run.private),
    flag("async-save", RUN.checkpoint.async_save),
    rule(
        RUN.checkpoint.keep_every,
        "save-retain-interval",
        _write_retained,
        lambda settings: {RUN.checkpoint.keep_every: settings.get("save-retain-interval")},
    ),
    ignored(
        "Megatron-LM deletes no checkpoints, or with --save-retain-interval all between but the last",
        (RUN.checkpoint.keep, RUN.checkpoint.keep_best),
    ),
    ignored("Megatron-LM waits for the last checkpoint", RUN.checkpoint.if_busy),
    restricted(RUN.data.chat, (None,), "pretrain_gpt.py learns from text, not from conversations"),
    restricted(RUN.data.phases, ([],), "Megatron-LM's mixture has the same weights in all steps"),
    ignored("documents fill samples", (RUN.data.chat_template, RUN.data.too_long)),
    ignored("Megatron-LM compares no fields of the model", RUN.checkpoint.may_differ),
    ignored("Megatron-LM shuffles all samples of an epoch", (RUN.data.shuffle, RUN.data.shuffle_window)),
    ignored("Megatron-LM limits no cache of its data", RUN.data.cache_gib),
    ignored(
        "Megatron-LM reads its own indexed files",
        (
            RUN.data.vocab,
            RUN.data.text_field,
            RUN.data.end_of_text,
            RUN.data.begin_of_text,
            RUN.data.format,
            RUN.data.on_error,
        ),
    ),
    ignored("set OMP_NUM_THREADS", RUN.train.threads),
    ignored("Megatron-LM leaves it to nvidia-resiliency-ext, --enable-ft-package", RUN.train.hang_s),
    ignored("Megatron-LM's options are of one layout", RUN.elastic.layouts),
    ignored("torchrun starts the ranks, and again with --max-restarts", RUN.train.restarts),
    ignored("torchrun waits for nodes, --rdzv-conf join_timeout", RUN.train.start_s),
    ignored(
        "Megatron-LM saves on a signal with --exit-signal-handler, however long it takes", RUN.train.grace_s
    ),
    ignored("Megatron-LM fuses kernels in ways of its own", JOB.compile),
    ignored("Megatron-LM captures single layers, or all microbatches of a step at once", JOB.graphs),
    ignored("Megatron-LM computes no such figure", RUN.metrics.peak_tflops),
    ignored("--profile traces a step of Megatron-LM", RUN.metrics.trace),
    ignored(
        "Megatron-LM writes no text at the end",
        (*(f"sample.{name}" for name in ("prompt", "tokens", "temperature", "top_k")),),
    ),
)
