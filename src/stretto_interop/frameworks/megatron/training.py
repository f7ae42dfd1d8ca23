"""Types, optimiser, learning rate, data and the run in Megatron-LM's arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError, read_text
from stretto.job.data_parallel import KEEP
from stretto.run.config.data import DEFAULT_RATIO
from stretto.run.config.load import run_name
from stretto.run.config.sources import megatron_prefix
from stretto_interop.frameworks.fields import EXPERTS, JOB, LEARNING_RATE, RATE, RUN, JobValues, name_of
from stretto_interop.frameworks.mapping import (
    Rule,
    Settings,
    Unset,
    Values,
    flag,
    ignored,
    next_token,
    one_of,
    optional,
    refused,
    renamed,
    require,
    restricted,
    rule,
)

# ------------------------------------------------------------------ learning rate and steps

_STYLES = {
    **{name: name for name in ("cosine", "linear", "constant")},
    "inverse-sqrt": "inverse-square-root",
    "wsd": "WSD",
}
_SHAPES = {"linear": "linear", "cosine": "cosine", "exponential": "exponential", "sqrt": "minus_sqrt"}


def _write_rate(values: JobValues) -> Settings:
    """Write the learning rate; open values stay open, and so do those that follow from them."""
    rate = values.job.optimiser.rate
    lr, steps = values[JOB.optimiser.lr], values[RUN.train.steps]
    is_open = values.is_open(JOB.optimiser.lr)

    def of_peak(part: float | None) -> Any:
        value = lr * (values[part] or 0.0)
        return Unset(part, value) if is_open else value

    length = Unset(RUN.train.steps, steps) if values.is_open(RUN.train.steps) else steps
    peak = {"lr": Unset(JOB.optimiser.lr, lr) if is_open else lr, "train-iters": length}
    if values.is_unsaid(RATE.schedule):
        return peak
    part = isinstance(rate.warmup, float)
    warmup = {"lr-warmup-fraction": rate.warmup} if part else {"lr-warmup-iters": rate.warmup_steps(steps)}
    values_read: dict[Any, Any] = {
        **peak,
        "min-lr": of_peak(RATE.min_ratio),
        "lr-decay-style": _STYLES[rate.schedule],
        **warmup,
        **({} if rate.warmup_init is None else {"lr-warmup-init": of_peak(RATE.warmup_init)}),
        **({} if rate.decay_steps is None else {"lr-decay-iters": rate.decay_steps}),
    }
    if rate.schedule != "wsd":
        return values_read
    decayed = rate.decay_length(steps)
    follows = rate.decay_steps is None and values.is_open(RUN.train.steps)
    left = Unset(RATE.decay_fraction, decayed) if follows else decayed
    return {**values_read, "lr-wsd-decay-style": _SHAPES[rate.decay], "lr-wsd-decay-iters": left}


def _rate_notes(values: JobValues) -> Iterable[str]:
    warmup, first = values[RATE.warmup], values[RATE.warmup_init]
    if warmup and first is None and not values.is_unsaid(RATE.schedule):
        yield "optim.rate.warmup_init=null: Megatron-LM's first rate is 0, so its warm-up is one step behind"


def _updates(settings: Settings, name: str) -> float | None:
    """Return an argument that counts iterations, or samples, as updates of full batches."""
    if (count := settings.get(f"{name}-iters")) is not None:
        return count
    samples = settings.get(f"{name}-samples")
    if samples is None:
        return None
    batch = settings.get("global-batch-size")
    if batch is None:
        raise StrettoError(f"--{name}-samples needs --global-batch-size", hint=f"or give --{name}-iters")
    return samples / batch


def _read_rate(settings: Settings) -> Values:
    """Read the schedule as `get_optimizer_param_scheduler` of megatron/training/training.py sets it up."""
    values_read: dict[Any, Any] = {}
    steps, end = _updates(settings, "train"), _updates(settings, "lr-decay")
    if steps is not None:
        values_read[RUN.train.steps] = int(steps)
    if end is not None:
        values_read[RATE.decay_steps] = int(end)
    end = int(end if end is not None else steps or 0)
    style = settings.get("lr-decay-style", "linear")
    values_read[RATE.schedule] = next(
        style_here for style_here, style_there in _STYLES.items() if style_there == style
    )
    warmup = _read_warmup(settings, end)
    values_read[RATE.warmup] = warmup
    lr, lowest = settings.get("lr"), settings.get("min-lr", 0.0)
    if lr is not None:
        values_read[JOB.optimiser.lr] = lr
    if lr is not None or not lowest:
        values_read[RATE.min_ratio] = _ratio(lowest, lr)
    if warmup and (lr is not None or "lr-warmup-init" not in settings):
        values_read[RATE.warmup_init] = _ratio(settings.get("lr-warmup-init", 0.0), lr)
    if style == "WSD":
        shape = settings.get("lr-wsd-decay-style", "exponential")
        values_read[RATE.decay] = next(
            style_here for style_here, style_there in _SHAPES.items() if style_there == shape
        )
        length = _updates(settings, "lr-wsd-decay")
        if length is not None and end:
            values_read[RATE.decay_fraction] = length / end
    return values_read


def _ratio(rate: float, peak: float | None) -> float:
    """Return a rate as a fraction of the peak, to 15 digits, so that 6e-5 of 6e-4 is 0.1."""
    return float(f"{rate / (peak or 1.0):.15g}")


def _read_warmup(settings: Settings, end: int) -> float:
    """Return the updates of the warm-up, or its fraction of the `end` updates until the decay has ended."""
    part = settings.get("lr-warmup-fraction")
    if part is None:
        count = _updates(settings, "lr-warmup") or 0
        return int(count) if count == int(count) or not end else count / end
    return part if part < 1 else end


_COUNTED = ("train", "lr-decay", "lr-warmup", "lr-wsd-decay")

_RATE_RULE = rule(
    (JOB.optimiser.lr, RUN.train.steps, *LEARNING_RATE),
    (
        "lr",
        "min-lr",
        "lr-decay-style",
        *(f"{name}-{unit}" for name in _COUNTED for unit in ("iters", "samples")),
        "lr-warmup-fraction",
        "lr-warmup-init",
        "lr-wsd-decay-style",
    ),
    _write_rate,
    _read_rate,
    notes=_rate_notes,
)


# ------------------------------------------------------------------ text, tokens and samples

_PARTED = ("train-data-path", "per-split-data-args-path")  # each split with prefixes of its own


def parted(settings: Settings) -> bool:
    """True if training, validation and test have prefixes of their own."""
    return not settings.keys().isdisjoint(_PARTED)


def _write_data(values: JobValues) -> Settings:
    """Write the prefixes of indexed datasets, with the weights of a mixture; other sources are left to fill
    in.
    """
    source = values[RUN.data.source]
    names: list[str] = [source] if isinstance(source, str) else list(source)
    prefixes = [megatron_prefix(name) for name in names]
    if values.is_open(RUN.data.source) or not names or None in prefixes:
        return {"data-path": Unset(RUN.data.source, "PREFIX")}
    weights = source.values() if isinstance(source, Mapping) else [None] * len(names)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    pairs = zip(weights, prefixes, strict=True)  # pyright: ignore[reportUnknownArgumentType]
    return {"data-path": [word for pair in pairs for word in pair if word is not None]}


def _read_data(settings: Settings) -> Values:
    """Read one prefix, several, or several with weights; if splits are given separately, those of
    training.
    """
    argv = _argv(settings)
    if not argv:
        return {name_of(RUN.data.source): "python-stdlib"} if "mock-data" in settings else {}
    if len(argv) == 1:
        return {name_of(RUN.data.source): argv[0]}
    try:
        weights = [float(word) for word in argv[::2]]
    except ValueError:
        return {name_of(RUN.data.source): list(argv)}
    if len(argv) % 2:
        raise StrettoError(
            f"--data-path has {len(weights)} weights for {len(argv) // 2} prefixes",
            hint="a weight before each prefix, as in 0.7 a 0.3 b",
        )
    mixture = dict[str, float]()
    for weight, prefix in zip(weights, argv[1::2], strict=True):
        mixture[prefix] = mixture.get(prefix, 0.0) + weight
    return {name_of(RUN.data.source): mixture}


def _argv(settings: Settings) -> Sequence[str]:
    """Return the words of --data-path, wherever they are given.

    Raises:
        StrettoError: the file that has them does not exist, or is not such a file.
    """
    for name in ("data-path", "train-data-path"):
        if settings.get(name):
            return settings[name]
    if (path := settings.get("data-args-path")) is not None:
        return read_text(Path(path).expanduser()).split()
    if (path := settings.get("per-split-data-args-path")) is None:
        return ()
    text = read_text(Path(path).expanduser())
    try:
        argv = json.loads(text)["train"]
    except (ValueError, KeyError, TypeError):
        message = f"--per-split-data-args-path: {path} has no list `train`"
        raise StrettoError(
            message, hint='a JSON object, as {"train": ["1.0", "PREFIX"], "valid": ...}'
        ) from None
    return argv.split() if isinstance(argv, str) else [str(word) for word in argv]


def _read_split(settings: Settings) -> Values:
    """Read the split; all is trained on if other splits have prefixes of their own."""
    if parted(settings):
        return {RUN.data.split: "100,0,0"}
    split = settings.get("split")
    if split is None:
        return {}
    # Megatron-LM looks for numbers, whatever stands between them, and takes missing ones as 0
    return {RUN.data.split: ",".join([*re.findall(r"[.0-9]+", split), "0", "0"][:3])}


def _data_notes(values: JobValues) -> Iterable[str]:
    left = isinstance(_write_data(values)["data-path"], Unset)
    if left and RUN.data.source not in values.unsaid | values.open:
        source = values[RUN.data.source]
        yield f"data.source={source}: Megatron-LM reads PREFIX.bin and .idx of its tools/preprocess_data.py"


_DOCUMENTS = ("reset-position-ids", "reset-attention-mask", "eod-mask-loss")


def _write_packing(values: JobValues) -> Settings:
    packing = values[RUN.data.packing]
    if packing == "none":
        instead = "Megatron-LM's samples are filled with documents"
        raise refused(RUN.data.packing, packing, instead, ("stream", "documents"))
    return dict.fromkeys(_DOCUMENTS, True) if packing == "documents" else {}


DATA: tuple[Rule, ...] = (
    rule(
        RUN.data.source,
        ("data-path", "data-args-path", *_PARTED, "mock-data", "dataloader-type"),
        _write_data,
        _read_data,
        notes=_data_notes,
    ),
    rule(
        RUN.data.cache,
        "data-cache-path object-storage-cache-path",
        lambda values: {} if (cache := values[RUN.data.cache]) is None else {"data-cache-path": cache},
        lambda settings: {
            RUN.data.cache: settings.get("data-cache-path", settings.get("object-storage-cache-path"))
        },
    ),
    rule(
        RUN.data.split,
        "split",
        lambda values: {"split": (values[RUN.data.split] or DEFAULT_RATIO).replace(" ", "")},
        _read_split,
    ),
    rule(  # `command_line.lost` explains why one or two of the three alone have no field
        RUN.data.packing,
        _DOCUMENTS,
        _write_packing,
        lambda settings: {RUN.data.packing: "documents"} if settings.keys() >= set(_DOCUMENTS) else {},
    ),
    *next_token("pretrain_gpt.py predicts the next token"),
)


SEED = 1234  # Megatron-LM's usual one; it takes none below 1


# ------------------------------------------------------------------ types


def _write_dtype(values: JobValues) -> Settings:
    dtype, same_type = values[JOB.precision.dtype], values[JOB.precision.gradients] == "same"
    kinds: dict[str, dict[str, Any]] = {"bfloat16": {"bf16": True}, "float16": {"fp16": True}, "float32": {}}
    require(values, JOB.precision.dtype, kinds, "Megatron-LM computes in 32 or 16 bits")
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


def _write_fp8(values: JobValues) -> Settings:
    fp8 = values[JOB.precision.fp8]
    if fp8 == "none":
        return {}
    if fp8 == "row":
        instead = "Megatron-LM's scales are of a whole tensor, or of blocks (--fp8-recipe)"
        raise refused(JOB.precision.fp8, fp8, instead, ("tensor",))
    return {"fp8-format": "hybrid", "fp8-recipe": "tensorwise"}


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
    require(values, JOB.optimiser.name, _OPTIMISERS, "Megatron-LM has Adam, SGD and Muon")
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


# ------------------------------------------------------------------ the run


def _seed_notes(values: JobValues) -> Iterable[str]:
    if values[RUN.train.seed] == 0 and not values.is_unsaid(RUN.train.seed):
        yield f"train.seed=0: Megatron-LM takes seeds above 0, and this is {SEED}"


def _write_evaluation(values: JobValues) -> Settings:
    if values[RUN.eval.every] is None:
        return {"eval-iters": 0}
    return {"eval-interval": values[RUN.eval.every], "eval-iters": values[RUN.eval.batches]}


def _read_evaluation(settings: Settings) -> Values:
    """Read the evaluations; there are none if the entire source is trained on, so that nothing is
    held out.
    """
    if parted(settings):
        return {RUN.eval.every: None}
    batches = settings.get("eval-iters", 100)
    if not batches:
        return {RUN.eval.every: None}
    return {RUN.eval.every: settings.get("eval-interval", 1000), RUN.eval.batches: batches}


_TRACKERS = (RUN.metrics.to, RUN.metrics.project, RUN.metrics.tensorboard_dir)


def _write_checkpoint(values: JobValues) -> Settings:
    """Write where and when to save; without an interval, only at the last step."""
    if values.is_unsaid(RUN.run.name):
        return {}
    resume = values[RUN.checkpoint.resume]
    instead = "Megatron-LM cannot load a checkpoint of another framework"
    require(values, RUN.checkpoint.resume, ("never", "auto"), instead)
    folder = f"{values[RUN.run.dir]}/{values[RUN.run.name]}"
    every = values[RUN.checkpoint.every]
    steps: object = RUN.checkpoint.every if values.is_open(RUN.checkpoint.every) else RUN.train.steps
    board = values[RUN.metrics.tensorboard_dir]
    trackers = values[RUN.metrics.to]
    if not {*trackers} <= {"tensorboard", "wandb"}:
        instead = "Megatron-LM writes to TensorBoard and W&B"
        raise refused(RUN.metrics.to, trackers, instead, (["tensorboard"], ["wandb"]))
    if board is None and "tensorboard" in trackers:
        board = f"{folder}/tensorboard"
    interval = Unset(steps, every or values[RUN.train.steps]) if values.is_open(steps) else None
    return {
        "save": f"{folder}/checkpoints",
        "save-interval": interval or every or values[RUN.train.steps],
        **({"load": f"{folder}/checkpoints"} if resume == "auto" else {}),
        **({"tensorboard-dir": board} if board else {}),
        **(
            {
                "wandb-project": values[RUN.metrics.project] or "stretto",
                "wandb-exp-name": values[RUN.run.name],
            }
            if "wandb" in trackers
            else {}
        ),
    }


def _read_checkpoint(settings: Settings) -> Values:
    """Read the run's folder: the folder of checkpoints, or its parent if that is named `checkpoints`."""
    result: dict[Any, Any] = {RUN.checkpoint.every: settings.get("save-interval")}
    save = settings.get("save")
    folder = None if save is None else Path(save)
    if folder is not None:
        folder = folder.parent if folder.name == "checkpoints" else folder
        result |= {RUN.run.dir: str(folder.parent), RUN.run.name: run_name(folder)}
        if settings.get("load") == save:
            result[RUN.checkpoint.resume] = "auto"
    board, trackers = settings.get("tensorboard-dir"), list[str]()
    if board is not None:
        inside = folder is not None and Path(board) == folder / "tensorboard"
        if inside:
            trackers.append("tensorboard")
        else:
            result[RUN.metrics.tensorboard_dir] = board
    if (project := settings.get("wandb-project")) is not None:
        trackers.append("wandb")
        result[RUN.metrics.project] = project
    if trackers:
        result[RUN.metrics.to] = trackers
    return result


def _write_bucket(values: JobValues) -> Settings:
    """Write the bucket in parameters; Stretto's is in bytes of weights."""
    each = 2 if values[JOB.precision.dtype] in ("bfloat16", "float16") else 4
    return {"ddp-bucket-size": int(values[RUN.train.bucket_mib] * 2**20 / each)}


def _read_bucket(settings: Settings) -> Values:
    size = settings.get("ddp-bucket-size")
    each = 2 if settings.keys() & {"bf16", "fp16"} else 4
    return {} if size is None else {RUN.train.bucket_mib: size * each / 2**20}


TRAINING: tuple[Rule, ...] = (
    renamed("seq-length", JOB.sequence),
    rule(
        (JOB.precision.dtype, JOB.precision.gradients),
        "bf16 fp16 accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16 main-grads-dtype",
        _write_dtype,
        _read_dtype,
    ),
    rule(
        JOB.precision.keep,
        "moe-router-dtype",
        _write_keep,
        lambda settings: {JOB.precision.keep: KEEP} if "moe-router-dtype" in settings else {},
        notes=_keep_notes,
    ),
    rule(
        JOB.precision.fp8,
        "fp8-format fp8-recipe",
        _write_fp8,
        lambda settings: {JOB.precision.fp8: "tensor" if "fp8-format" in settings else "none"},
    ),
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
    renamed(
        "clip-grad",
        JOB.optimiser.clip,
        default=1.0,
        to=lambda norm: norm or 0.0,
        back=lambda norm: norm or None,
    ),
    _RATE_RULE,
    renamed("seed", RUN.train.seed, default=SEED, to=lambda seed: seed or SEED, notes=_seed_notes),
    restricted(RUN.train.device, ("auto", "cuda"), "Megatron-LM trains on GPUs"),
    restricted(RUN.train.backend, ("auto", "nccl"), "Megatron-LM's ranks exchange tensors of GPUs by NCCL"),
    renamed(
        "distributed-timeout-minutes",
        RUN.train.timeout_s,
        to=lambda seconds: ceil(seconds / 60),
        back=lambda minutes: 60.0 * minutes,
    ),
    rule(RUN.train.bucket_mib, "ddp-bucket-size", _write_bucket, _read_bucket),
    *DATA,
    rule((RUN.eval.every, RUN.eval.batches), "eval-interval eval-iters", _write_evaluation, _read_evaluation),
    rule(
        (RUN.checkpoint.every, RUN.checkpoint.resume, RUN.run.dir, RUN.run.name, *_TRACKERS),
        "save save-interval load tensorboard-dir wandb-project wandb-exp-name",
        _write_checkpoint,
        _read_checkpoint,
    ),
    renamed("log-interval", RUN.metrics.every),
    optional("check-weight-hash-across-dp-replicas-interval", RUN.guard.check_replicas),
    ignored("Megatron-LM stops at a loss that is not finite", (RUN.guard.on_nonfinite, RUN.guard.max_skips)),
    ignored(
        "Megatron-LM reports a spike", (RUN.guard.on_spike, RUN.guard.spike_sigma, RUN.guard.spike_window)
    ),
    ignored("Megatron-LM stops where replicas differ", RUN.guard.on_mismatch),
    ignored("Megatron-LM compares replicas alone", RUN.guard.check_memory),
    ignored("Megatron-LM's folders have the user's usual permissions", RUN.run.private),
    flag("async-save", RUN.checkpoint.async_save),
    optional("save-retain-interval", RUN.checkpoint.keep_every),
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
    ignored("Megatron-LM has no hooks of users' own", RUN.train.hooks),
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
    ignored("Megatron-LM sends no spans", "metrics.spans"),
    ignored("--profile records steps of Megatron-LM", (RUN.metrics.profile, RUN.metrics.profile_memory)),
    ignored(
        "Megatron-LM writes no text at the end",
        (*(f"sample.{name}" for name in ("prompt", "tokens", "temperature", "top_k")),),
    ),
)
