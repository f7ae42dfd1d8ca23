"""Optimiser and learning rate in DeepSpeed's JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stretto.errors import StrettoError
from stretto.spec.optimiser import RateSchedule
from stretto_interop.frameworks.fields import JOB, RATE, RUN, JobValues
from stretto_interop.frameworks.mapping import Rule, Settings, Unset, Values, refused, restricted, rule, under

_OPTIMISERS = {"adamw": "AdamW", "lamb": "Lamb", "sgd": "SGD", "muon": "Muon"}
_PARAMS = "optimizer.params"


def _write_optimiser(values: JobValues) -> Settings:
    optimiser = values.job.optimiser
    name = optimiser.name
    if name not in _OPTIMISERS:
        raise refused(
            JOB.optimiser.name, name, "DeepSpeed makes AdamW, Lamb, Muon and torch's own", _OPTIMISERS
        )
    if optimiser.states != "float32":
        rule = "DeepSpeed keeps means in 16 bits beside masters in 16 bits only"
        raise refused(JOB.optimiser.states, optimiser.states, rule, ["float32"])
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


OPTIMISER: tuple[Rule, ...] = (
    rule(
        (
            JOB.optimiser.name,
            JOB.optimiser.lr,
            JOB.optimiser.betas,
            JOB.optimiser.eps,
            JOB.optimiser.weight_decay,
            JOB.optimiser.no_decay,
            JOB.optimiser.momentum,
            JOB.optimiser.states,
            JOB.optimiser.clip,
        ),
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
