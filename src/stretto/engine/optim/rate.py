"""Learning-rate schedules, as pure functions of the step: a resumed run only needs the step.

`step` is the number of updates already made, so the first update has step 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi, sqrt

from stretto.job.optimiser import DecayShape, Optimiser, RateCurve


def warmup_ratio(step: int, warmup: float, init: float | None) -> float:
    """Return the ratio of linear warm-up: 1/warmup at the first update, and 1 from the `warmup`-th on. With
    `init` = 0 it starts at 0, which wastes the first update.
    """
    if init is None:
        return min(1.0, (step + 1) / warmup)
    return init + (1.0 - init) * step / warmup


def progress(step: int, start: float, end: int) -> float:
    """Return the progress of `step` from `start` (0.0) to `end` (1.0), clamped at both ends."""
    if step < start:
        return 0.0
    return min(1.0, (step - start) / (end - start)) if end > start else 1.0


def decay_ratio(shape: DecayShape, done: float, floor: float) -> float:
    """Return a ratio that decays from 1 at `done` = 0 to `floor` at `done` = 1.

    `cosine` is half a period (Loshchilov and Hutter 2017, SGDR, eq. 5); `sqrt` is 1 - sqrt(done), the
    cool-down that Hägele et al. 2024 (Scaling Laws Beyond Fixed Training Durations) prefer; `exponential` is
    2 * 0.5^done - 1 (Megatron-LM's).
    """
    if shape == "linear":
        left = 1.0 - done
    elif shape == "cosine":
        left = 0.5 * (1.0 + cos(pi * done))
    elif shape == "sqrt":
        left = 1.0 - sqrt(done)
    else:
        assert shape == "exponential", shape
        left = 2.0 * 0.5**done - 1.0
    return floor + (1.0 - floor) * left


@dataclass(frozen=True)
class LearningRate:
    """The learning-rate schedule of a run of `steps` updates; calling it with a step returns the learning
    rate, which stays at its minimum after the decay.
    """

    schedule: RateCurve
    peak: float
    steps: int

    @classmethod
    def of(cls, optimiser: Optimiser, steps: int) -> LearningRate:
        """Return the learning rate of a run of `steps` updates."""
        return cls(optimiser.rate, optimiser.lr, steps)

    def ratio(self, step: int) -> float:
        """Return the learning rate divided by its peak, in [0, 1]."""
        schedule = self.schedule
        warmup, end = schedule.warmup_steps(self.steps), schedule.end(self.steps)
        if step < warmup:
            return warmup_ratio(step, warmup, schedule.warmup_init)
        if schedule.schedule == "constant":
            return 1.0
        if schedule.schedule == "inverse-sqrt":
            ratio = sqrt(max(warmup, 1) / max(step, 1))
            return schedule.min_ratio if step > end else max(schedule.min_ratio, ratio)
        if schedule.schedule == "wsd":
            start, shape = end - schedule.decay_length(self.steps), schedule.decay
        else:
            start, shape = warmup, schedule.schedule
        return decay_ratio(shape, progress(step, start, end), schedule.min_ratio)

    def __call__(self, step: int) -> float:
        """Return the learning rate of the update that follows `step` updates."""
        return self.peak * self.ratio(step)


def delay_ratio(step: int, delay: int, steps: int) -> float:
    """Return the factor of the learning rate of a stage whose gradients are `delay` updates late.

    Yang et al. 2021, "PipeMare: Asynchronous Pipeline Parallel DNN Training", technique T1 (learning rate
    rescheduling): delay^-(1 - min(step/steps, 1)). At first the update of a delayed gradient is divided by
    the delay, for stability, and after `steps` steps it is not. A delay below 1 counts as 1.

    Args:
        steps: number of steps of the rescheduling.
    """
    return max(1, delay) ** (min(step / steps, 1.0) - 1.0)
