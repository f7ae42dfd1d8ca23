"""Types, optimiser, learning rate, data and the run in Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.run.config.load import run_name
from stretto.spec.data_parallel import KEEP
from stretto_interop.frameworks.choices import Choices
from stretto_interop.frameworks.mapping import (
    Open,
    Rule,
    Settings,
    aside,
    flag,
    one_of,
    only,
    refused,
    same,
    under,
)
from stretto_interop.frameworks.megatron.data import DATA, parted
from stretto_interop.frameworks.megatron.rate import RATE

SEED = 1234  # Megatron-LM's usual one; it takes none below 1


# ------------------------------------------------------------------ types


def _write_dtype(choices: Choices) -> Settings:
    dtype, same_type = choices["train.dtype"], choices["precision.gradients"] == "same"
    kinds: dict[str, dict[str, Any]] = {"bfloat16": {"bf16": True}, "float16": {"fp16": True}, "float32": {}}
    if dtype not in kinds:
        raise refused("train.dtype", dtype, "Megatron-LM computes in 32 or 16 bits", kinds)
    if dtype == "float32":
        return {}
    if not same_type:
        return {**kinds[dtype], "accumulate-allreduce-grads-in-fp32": True}
    return {**kinds[dtype], "grad-reduce-in-bf16": True} if dtype == "bfloat16" else kinds[dtype]


def _read_dtype(settings: Settings) -> Mapping[str, Any]:
    half = "bfloat16" if "bf16" in settings else "float16" if "fp16" in settings else "float32"
    reduced = "grad-reduce-in-bf16" in settings or settings.get("main-grads-dtype") == "bf16"
    wide = half == "float32" or "accumulate-allreduce-grads-in-fp32" in settings
    wide = wide or (half == "bfloat16" and not reduced)
    return {"train.dtype": half, "precision.gradients": "float32" if wide else "same"}


def _write_keep(choices: Choices) -> Settings:
    keep = tuple(choices["precision.keep"])
    if keep not in (KEEP, ()):
        instead = "Megatron-LM keeps no weights in 32 bits; its router can compute in them"
        raise refused("precision.keep", keep, instead, (KEEP, ()))
    if choices["model.moe.experts"] is None or keep == ():
        return {}
    return {"moe-router-dtype": "fp32"}


def _keep_notes(choices: Choices) -> Iterable[str]:
    if choices["precision.keep"] and choices["train.dtype"] in ("bfloat16", "float16"):
        kept = ", ".join(choices["precision.keep"])
        yield f"precision.keep={kept}: Megatron-LM keeps these weights in 16 bits, with masters in 32"


def _read_keep(settings: Settings) -> Mapping[str, Any]:
    return {"precision.keep": KEEP} if "moe-router-dtype" in settings else {}


def _write_fp8(choices: Choices) -> Settings:
    fp8 = choices["precision.fp8"]
    if fp8 == "none":
        return {}
    if fp8 == "row":
        instead = "Megatron-LM's scales are of a whole tensor, or of blocks (--fp8-recipe)"
        raise refused("precision.fp8", fp8, instead, ("tensor",))
    return {"fp8-format": "hybrid", "fp8-recipe": "tensorwise"}


def _read_fp8(settings: Settings) -> Mapping[str, Any]:
    return {"precision.fp8": "tensor" if "fp8-format" in settings else "none"}


def _write_scale(choices: Choices) -> Settings:
    if choices["train.dtype"] != "float16":
        return {}
    return {
        "initial-loss-scale": choices["precision.loss_scale"],
        "loss-scale-window": choices["precision.loss_scale_steps"],
        "hysteresis": 1,  # the scale is halved at the first overflow
    }


def _read_scale(settings: Settings) -> Mapping[str, Any]:
    if "fp16" not in settings:
        return {}
    return {
        "precision.loss_scale": settings.get("loss-scale", settings.get("initial-loss-scale", 2.0**32)),
        "precision.loss_scale_steps": int(settings.get("loss-scale-window", 1000)),
    }


# ------------------------------------------------------------------ optimiser

_OPTIMISERS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}


def _write_optimiser(choices: Choices) -> Settings:
    name, momentum = choices["optim.name"], choices["optim.momentum"]
    if name not in _OPTIMISERS:
        raise refused("optim.name", name, "Megatron-LM has Adam, SGD and Muon", _OPTIMISERS)
    if name == "muon" and choices["dp.mode"] != "ddp":
        raise refused("optim.name", name, "Megatron-LM shards no states of Muon", ("adamw",))
    if "optim.betas" in choices.unsaid:
        return {"optimizer": _OPTIMISERS[name]}
    if name == "adamw":
        beta1, beta2 = choices["optim.betas"]
        return {
            "optimizer": "adam",
            "adam-beta1": beta1,
            "adam-beta2": beta2,
            "adam-eps": choices["optim.eps"],
        }
    usual = 0.95 if name == "muon" else 0.0
    return {"optimizer": _OPTIMISERS[name], f"{name}-momentum": momentum or usual}


def _read_optimiser(settings: Settings) -> Mapping[str, Any]:
    name = settings.get("optimizer", "adam").removeprefix("dist_")
    ours = next((ours for ours, theirs in _OPTIMISERS.items() if theirs == name), None)
    if ours is None:
        hint = f"what is: {', '.join(_OPTIMISERS.values())}"
        raise StrettoError(f"--optimizer is {name}: not modelled here", hint=hint)
    momentum = 0.0 if ours == "adamw" else settings.get(f"{ours}-momentum", 0.9)
    return {
        "optim.name": ours,
        "optim.betas": (settings.get("adam-beta1", 0.9), settings.get("adam-beta2", 0.999)),
        "optim.eps": settings.get("adam-eps", 1e-8),
        "optim.momentum": momentum,
    }


def _write_states(choices: Choices) -> Settings:
    if choices["optim.states"] == "float32":
        return {}
    if choices["dp.mode"] != "zero1":
        instead = "Megatron-LM keeps states in 16 bits with its distributed optimizer (dp.mode=zero1)"
        raise refused("optim.states", choices["optim.states"], instead, ("float32",))
    return {"use-precision-aware-optimizer": True, "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"}


def _read_states(settings: Settings) -> Mapping[str, Any]:
    kinds = [settings.get(name, "fp32") for name in ("exp-avg-dtype", "exp-avg-sq-dtype")]
    if kinds in (["fp32", "fp32"], ["bf16", "bf16"]):
        return {"optim.states": "float32" if kinds[0] == "fp32" else "bfloat16"}
    raise StrettoError(
        f"--exp-avg-dtype {kinds[0]} and --exp-avg-sq-dtype {kinds[1]}: not priced",
        hint="what is: both fp32, or both bf16",
    )


def _write_clip(choices: Choices) -> Settings:
    return {"clip-grad": choices["optim.clip"] or 0.0}


def _read_clip(settings: Settings) -> Mapping[str, Any]:
    return {"optim.clip": settings.get("clip-grad", 1.0) or None}


# ------------------------------------------------------------------ the run


def _write_seed(choices: Choices) -> Settings:
    return {"seed": choices["train.seed"] or SEED}


def _read_seed(settings: Settings) -> Mapping[str, Any]:
    return {"train.seed": settings.get("seed", SEED)}


def _seed_notes(choices: Choices) -> Iterable[str]:
    if choices["train.seed"] == 0 and "train.seed" not in choices.unsaid:
        yield f"train.seed=0: Megatron-LM takes seeds above 0, and this is {SEED}"


def _write_evaluation(choices: Choices) -> Settings:
    if choices["eval.every"] is None:
        return {"eval-iters": 0}
    return {"eval-interval": choices["eval.every"], "eval-iters": choices["eval.batches"]}


def _read_evaluation(settings: Settings) -> Mapping[str, Any]:
    """None where all of the source is trained on: nothing of it is held out."""
    if parted(settings):
        return {"eval.every": None}
    batches = settings.get("eval-iters", 100)
    if not batches:
        return {"eval.every": None}
    return {"eval.every": settings.get("eval-interval", 1000), "eval.batches": batches}


_BOARD = ("metrics.tensorboard", "metrics.tensorboard_dir")


def _write_replicas(choices: Choices) -> Settings:
    every = choices["guard.check_replicas"]
    return {} if every is None else {"check-weight-hash-across-dp-replicas-interval": every}


def _read_replicas(settings: Settings) -> dict[str, Any]:
    return {"guard.check_replicas": settings.get("check-weight-hash-across-dp-replicas-interval")}


def _write_checkpoint(choices: Choices) -> Settings:
    """Where and when to save; without an interval at the end only, which is that of the last step."""
    if "run.name" in choices.unsaid:
        return {}
    resume = choices["checkpoint.resume"]
    if resume not in ("never", "auto"):
        instead = "Megatron-LM cannot load a checkpoint of another framework"
        raise refused("checkpoint.resume", resume, instead, ("never", "auto"))
    folder = f"{choices['run.dir']}/{choices['run.name']}"
    every = choices["checkpoint.every"]
    steps = "checkpoint.every" if "checkpoint.every" in choices.open else "train.steps"
    board = choices["metrics.tensorboard_dir"]
    if board is None and choices["metrics.tensorboard"]:
        board = f"{folder}/tensorboard"
    interval = Open(steps, every or choices["train.steps"]) if steps in choices.open else None
    return {
        "save": f"{folder}/checkpoints",
        "save-interval": interval or every or choices["train.steps"],
        **({"load": f"{folder}/checkpoints"} if resume == "auto" else {}),
        **({"tensorboard-dir": board} if board else {}),
    }


def _read_checkpoint(settings: Settings) -> Mapping[str, Any]:
    """The folder that checkpoints are saved to is the run's, or lies in it as `checkpoints`."""
    made: dict[str, Any] = {"checkpoint.every": settings.get("save-interval")}
    save = settings.get("save")
    folder = None if save is None else Path(save)
    if folder is not None:
        folder = folder.parent if folder.name == "checkpoints" else folder
        made |= {"run.dir": str(folder.parent), "run.name": run_name(folder)}
        if settings.get("load") == save:
            made["checkpoint.resume"] = "auto"
    board = settings.get("tensorboard-dir")
    if board is not None:
        inside = folder is not None and Path(board) == folder / "tensorboard"
        made |= {"metrics.tensorboard": True} if inside else {"metrics.tensorboard_dir": board}
    return made


def _write_retained(choices: Choices) -> Settings:
    every = choices["checkpoint.keep_every"]
    return {} if every is None else {"save-retain-interval": every}


def _write_bucket(choices: Choices) -> Settings:
    """In parameters, where ours is in bytes of weights."""
    each = 2 if choices["train.dtype"] in ("bfloat16", "float16") else 4
    return {"ddp-bucket-size": int(choices["train.bucket_mib"] * 2**20 / each)}


def _read_bucket(settings: Settings) -> Mapping[str, Any]:
    size = settings.get("ddp-bucket-size")
    each = 2 if settings.keys() & {"bf16", "fp16"} else 4
    return {} if size is None else {"train.bucket_mib": size * each / 2**20}


def _minutes(seconds: float) -> int:
    return ceil(seconds / 60)


def _seconds(minutes: int) -> float:
    return 60.0 * minutes


TRAINING: tuple[Rule, ...] = (
    same("seq-length", "data.sequence"),
    Rule(
        choices=("train.dtype", "precision.gradients"),
        settings=(
            "bf16",
            "fp16",
            "accumulate-allreduce-grads-in-fp32",
            "grad-reduce-in-bf16",
            "main-grads-dtype",
        ),
        write=_write_dtype,
        read=_read_dtype,
    ),
    Rule(
        choices=("precision.keep",),
        settings=("moe-router-dtype",),
        write=_write_keep,
        read=_read_keep,
        notes=_keep_notes,
    ),
    Rule(
        choices=("precision.fp8",),
        settings=("fp8-format", "fp8-recipe"),
        write=_write_fp8,
        read=_read_fp8,
    ),
    Rule(
        choices=("precision.loss_scale", "precision.loss_scale_steps"),
        settings=("loss-scale", "initial-loss-scale", "loss-scale-window", "hysteresis"),
        write=_write_scale,
        read=_read_scale,
    ),
    one_of(
        "attention-backend",
        "train.attention",
        {"auto": "auto", "sdpa": "flash", "explicit": "unfused"},
        also={"fused": "sdpa", "local": "explicit"},
        usual="auto",
        instead="Megatron-LM has fused kernels and stored scores",
    ),
    aside("Megatron-LM computes the logits of a microbatch at once", "train.loss_chunk"),
    same("make-vocab-size-divisible-by", "train.vocab_multiple", usual=128),
    Rule(
        choices=("optim.name", "optim.betas", "optim.eps", "optim.momentum"),
        settings=("optimizer", "adam-beta1", "adam-beta2", "adam-eps", "sgd-momentum", "muon-momentum"),
        write=_write_optimiser,
        read=_read_optimiser,
    ),
    same("weight-decay", "optim.weight_decay", usual=0.01),
    only("optim.no_decay", ((), []), "Megatron-LM exempts norms and biases from weight decay, and no others"),
    Rule(
        choices=("optim.states",),
        settings=("use-precision-aware-optimizer", "exp-avg-dtype", "exp-avg-sq-dtype", "main-params-dtype"),
        write=_write_states,
        read=_read_states,
    ),
    Rule(choices=("optim.clip",), settings=("clip-grad",), write=_write_clip, read=_read_clip),
    RATE,
    Rule(choices=("train.seed",), settings=("seed",), write=_write_seed, read=_read_seed, notes=_seed_notes),
    only("train.device", ("auto", "cuda"), "Megatron-LM trains on GPUs"),
    only("train.backend", ("auto", "nccl"), "Megatron-LM's ranks exchange tensors of GPUs by NCCL"),
    same("distributed-timeout-minutes", "train.timeout_s", to=_minutes, back=_seconds),
    Rule(
        choices=("train.bucket_mib",),
        settings=("ddp-bucket-size",),
        write=_write_bucket,
        read=_read_bucket,
    ),
    *DATA,
    Rule(
        choices=("eval.every", "eval.batches"),
        settings=("eval-interval", "eval-iters"),
        write=_write_evaluation,
        read=_read_evaluation,
    ),
    Rule(
        choices=("checkpoint.every", "checkpoint.resume", "run.dir", "run.name", *_BOARD),
        settings=("save", "save-interval", "load", "tensorboard-dir"),
        write=_write_checkpoint,
        read=_read_checkpoint,
    ),
    same("log-interval", "metrics.every"),
    Rule(
        choices=("guard.check_replicas",),
        settings=("check-weight-hash-across-dp-replicas-interval",),
        write=_write_replicas,
        read=_read_replicas,
    ),
    aside("Megatron-LM stops at a loss that is not finite", "guard.on_nonfinite", "guard.max_skips"),
    aside("Megatron-LM reports a spike", *under("guard", "on_spike spike_sigma spike_window")),
    aside("Megatron-LM stops where replicas differ", "guard.on_mismatch"),
    aside("Megatron-LM compares replicas alone", "guard.check_memory"),
    aside("Megatron-LM's folders have the user's usual permissions", "run.private"),
    flag("async-save", "checkpoint.async_save"),
    Rule(
        choices=("checkpoint.keep_every",),
        settings=("save-retain-interval",),
        write=_write_retained,
        read=lambda settings: {"checkpoint.keep_every": settings.get("save-retain-interval")},
    ),
    aside(
        "Megatron-LM deletes no checkpoints, or with --save-retain-interval all between but the last",
        "checkpoint.keep",
        "checkpoint.keep_best",
    ),
    aside("Megatron-LM waits for the last checkpoint", "checkpoint.if_busy"),
    only("data.chat", (None,), "pretrain_gpt.py learns from text, not from conversations"),
    only("data.phases", ([],), "Megatron-LM's mixture has the same weights in all steps"),
    aside("documents fill samples", "data.chat_template", "data.too_long"),
    aside("Megatron-LM compares no fields of the model", "checkpoint.may_differ"),
    aside("Megatron-LM shuffles all samples of an epoch", "data.shuffle", "data.shuffle_window"),
    aside("Megatron-LM limits no cache of its data", "data.cache_gib"),
    aside(
        "Megatron-LM reads its own indexed files",
        *under("data", "vocab text_field end_of_text begin_of_text format on_error"),
    ),
    aside("set OMP_NUM_THREADS", "train.threads"),
    aside("Megatron-LM leaves it to nvidia-resiliency-ext, --enable-ft-package", "train.hang_s"),
    aside("Megatron-LM's options are of one layout", "elastic.layouts"),
    aside("torchrun starts the ranks, and again with --max-restarts", "train.restarts"),
    aside("torchrun waits for nodes, --rdzv-conf join_timeout", "train.start_s"),
    aside("Megatron-LM saves on a signal with --exit-signal-handler, however long it takes", "train.grace_s"),
    aside("Megatron-LM fuses kernels in ways of its own", "train.compile"),
    aside("Megatron-LM captures single layers, or all microbatches of a step at once", "train.graphs"),
    aside("Megatron-LM computes no such figure", "metrics.peak_tflops"),
    aside("--profile traces a step of Megatron-LM", "metrics.trace"),
    aside(
        "Megatron-LM writes no text at the end",
        *(f"sample.{name}" for name in ("prompt", "tokens", "temperature", "top_k")),
    ),
)
