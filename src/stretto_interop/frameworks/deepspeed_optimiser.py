"""Optimiser and learning rate in DeepSpeed's JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stretto.errors import StrettoError
from stretto.spec.optimiser import RateSchedule
from stretto_interop.frameworks.choices import Choices
from stretto_interop.frameworks.mapping import Open, Rule, Settings, only, refused, under

_OPTIMISERS = {"adamw": "AdamW", "lamb": "Lamb", "sgd": "SGD", "muon": "Muon"}
_PARAMS = "optimizer.params"


def _write_optimiser(choices: Choices) -> Settings:
    optimiser = choices.job.optimiser
    name = optimiser.name
    if name not in _OPTIMISERS:
        raise refused("optim.name", name, "DeepSpeed makes AdamW, Lamb, Muon and torch's own", _OPTIMISERS)
    if optimiser.states != "float32":
        rule = "DeepSpeed keeps means in 16 bits beside masters in 16 bits only"
        raise refused("optim.states", optimiser.states, rule, ["float32"])
    if optimiser.no_decay:
        rule = "in DeepSpeed the script makes the parameter groups"
        raise refused("optim.no_decay", list(optimiser.no_decay), rule, ["[]"])
    lr = Open("optim.lr", optimiser.lr) if "optim.lr" in choices.open else optimiser.lr
    params: dict[str, Any] = {"lr": lr, "weight_decay": optimiser.weight_decay}
    if name != "sgd":
        params |= {"betas": list(optimiser.betas), "eps": optimiser.eps}
    if name in ("sgd", "muon"):
        params["momentum"] = optimiser.usual_momentum
    settings: dict[str, Any] = {"optimizer.type": _OPTIMISERS[name]}
    settings |= {f"{_PARAMS}.{key}": value for key, value in params.items()}
    settings["gradient_clipping"] = optimiser.clip or 0.0
    if name == "sgd" and choices.job.dp.mode != "ddp":
        settings["zero_allow_untested_optimizer"] = True
    return settings


def _note_optimiser(choices: Choices) -> Iterator[str]:
    if choices["optim.weight_decay"]:
        groups = "two parameter groups, that of norms and biases with weight_decay=0"
        yield f"in the script: model_parameters of deepspeed.initialize are {groups}"


def _read_optimiser(settings: Settings) -> Mapping[str, Any]:
    values: dict[str, Any] = {}
    theirs = settings.get("optimizer.type")
    if theirs is not None:
        names = {name.lower(): ours for ours, name in _OPTIMISERS.items()} | {"adam": "adamw"}
        if str(theirs).lower() not in names:
            raise StrettoError(
                f"optimizer.type is {theirs}: not modelled here", hint=f"what is: {', '.join(names)}"
            )
        values["optim.name"] = names[str(theirs).lower()]
        for key in ("lr", "weight_decay", "eps", "momentum"):
            if f"{_PARAMS}.{key}" in settings:
                values[f"optim.{key}"] = settings[f"{_PARAMS}.{key}"]
        if f"{_PARAMS}.betas" in settings:
            values["optim.betas"] = tuple(settings[f"{_PARAMS}.betas"])
    values["optim.clip"] = settings.get("gradient_clipping", 1.0) or None
    return values


_RATE = "scheduler.params"
_RATE_PARAMS = (
    "total_num_steps warmup_num_steps warmup_type warmup_min_lr warmup_max_lr warmup_min_ratio cos_min_ratio"
)


def _note_rate(_: Choices) -> Iterator[str]:
    yield "the rate: DeepSpeed warms up from 0 unless optim.rate.warmup_init says more, in 2 steps at least"


def _write_rate(choices: Choices) -> Settings:
    rate = choices.job.optimiser.rate
    steps: Any = rate.end(choices["train.steps"])
    warmup = round(rate.warmup_steps(choices["train.steps"]))
    if rate.decay_steps is None and "train.steps" in choices.open:
        steps = Open("train.steps", steps)
    warm = {f"{_RATE}.warmup_num_steps": max(1, warmup), f"{_RATE}.warmup_type": "linear"}
    whole = {f"{_RATE}.total_num_steps": steps}
    lr = Open("optim.lr", choices["optim.lr"]) if "optim.lr" in choices.open else choices["optim.lr"]
    first = rate.warmup_init or 0.0
    high = {f"{_RATE}.warmup_min_lr": first * choices["optim.lr"], f"{_RATE}.warmup_max_lr": lr}
    if rate.schedule == "cosine":
        low = {f"{_RATE}.warmup_min_ratio": first, f"{_RATE}.cos_min_ratio": rate.min_ratio}
        return {"scheduler.type": "WarmupCosineLR", **whole, **warm, **low}
    if rate.schedule == "constant":
        return {"scheduler.type": "WarmupLR", **high, **warm}
    if rate.schedule == "linear" and not rate.min_ratio:
        return {"scheduler.type": "WarmupDecayLR", **whole, **high, **warm}
    if rate.schedule == "linear":
        raise refused("optim.rate.min_ratio", rate.min_ratio, "DeepSpeed's WarmupDecayLR ends at 0", [0.0])
    rule = "DeepSpeed warms up, then holds (WarmupLR) or decays at once (WarmupCosineLR, WarmupDecayLR)"
    raise refused("optim.rate.schedule", rate.schedule, rule, ["cosine", "constant", "linear"])


def _read_rate(settings: Settings) -> Mapping[str, Any]:
    kind = settings.get("scheduler.type")
    if kind is None:
        return {}
    kinds = {"WarmupCosineLR": "cosine", "WarmupLR": "constant", "WarmupDecayLR": "linear"}
    if kind not in kinds:
        return {}  # of the rate nothing is priced
    warm = settings.get(f"{_RATE}.warmup_num_steps", 1000)
    values: dict[str, Any] = {
        "optim.rate.schedule": kinds[kind],
        "optim.rate.warmup": 0 if warm == 1 else warm,
    }
    if kind == "WarmupCosineLR":
        values["optim.rate.warmup_init"] = settings.get(f"{_RATE}.warmup_min_ratio", 0.01)
        values["optim.rate.min_ratio"] = settings.get(f"{_RATE}.cos_min_ratio", 0.0001)
    if kind == "WarmupDecayLR":
        values["optim.rate.min_ratio"] = 0.0
    return values


OPTIMISER: tuple[Rule, ...] = (
    Rule(
        choices=under("optim", "name lr betas eps weight_decay no_decay momentum states clip"),
        settings=(
            "optimizer.type",
            *under(_PARAMS, "lr betas eps weight_decay momentum"),
            "gradient_clipping",
            "zero_allow_untested_optimizer",
        ),
        write=_write_optimiser,
        read=_read_optimiser,
        notes=_note_optimiser,
    ),
    Rule(
        choices=(*under("optim.rate", "schedule warmup warmup_init min_ratio decay_steps"), "train.steps"),
        settings=("scheduler.type", *under(_RATE, _RATE_PARAMS)),
        write=_write_rate,
        read=_read_rate,
        notes=_note_rate,
    ),
    only("optim.rate.rescheduling_steps", [None], "DeepSpeed's pipelines drain after each step"),
    only("optim.rate.decay_fraction", [RateSchedule.decay_fraction], "DeepSpeed decays at once, or never"),
    only("optim.rate.decay", [RateSchedule.decay], "DeepSpeed's decays are WarmupCosineLR and WarmupDecayLR"),
)
