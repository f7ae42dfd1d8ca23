"""The learning rate and the number of steps in Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stretto.errors import StrettoError
from stretto_interop.frameworks.fields import JOB, RATE, RUN, JobValues
from stretto_interop.frameworks.mapping import Settings, Unset, Values, rule

_STYLES = {
    **{name: name for name in ("cosine", "linear", "constant")},
    "inverse-sqrt": "inverse-square-root",
    "wsd": "WSD",
}
_SHAPES = {"linear": "linear", "cosine": "cosine", "exponential": "exponential", "sqrt": "minus_sqrt"}


def _write_rate(values: JobValues) -> Settings:
    """The learning rate; what is open stays open, and so does what follows from it."""
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
    """An argument that counts iterations, or samples, as updates of full batches."""
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
    """As `get_optimizer_param_scheduler` of megatron/training/training.py sets up the schedule."""
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
    """A rate as a part of the peak, to the 15 digits that a person writes: 6e-5 of 6e-4 is 0.1."""
    return float(f"{rate / (peak or 1.0):.15g}")


def _read_warmup(settings: Settings, end: int) -> float:
    """Updates of the warm-up, or the part of the `end` updates until the decay has ended."""
    part = settings.get("lr-warmup-fraction")
    if part is None:
        count = _updates(settings, "lr-warmup") or 0
        return int(count) if count == int(count) or not end else count / end
    return part if part < 1 else end


_COUNTED = ("train", "lr-decay", "lr-warmup", "lr-wsd-decay")
_RATE = ("schedule", "warmup", "warmup_init", "min_ratio", "decay_steps", "decay_fraction", "decay")

LEARNING_RATE = rule(
    (JOB.optimiser.lr, RUN.train.steps, *(f"optim.rate.{name}" for name in _RATE)),
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
