"""Learning-rate schedules, as pure functions of the step: a resumed run needs nothing but the step.

`step` is the number of updates already made, so the first update has step 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi, sqrt

from stretto.spec.optimiser import DecayShape, Optimiser, RateSchedule


def warmup_ratio(step: int, warmup: int) -> float:
    """Linear warm-up: 1/warmup at the first update, 1 from update number `warmup` on. Schedules that start at
    0 waste the first update.
    """
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def progress(step: int, start: int, end: int) -> float:
    """How far `step` is from `start` (0.0) to `end` (1.0), clamped at both ends."""
    if step < start:
        return 0.0
    return min(1.0, (step - start) / (end - start)) if end > start else 1.0


def decay_ratio(shape: DecayShape, done: float, floor: float) -> float:
    """From 1 at `done` = 0 down to `floor` at `done` = 1.

    `cosine` is half a period (Loshchilov and Hutter 2017, SGDR, eq. 5); `sqrt` is 1 - sqrt(done), the
    cool-down that Hägele et al. 2024 (Scaling Laws Beyond Fixed Training Durations) prefer.
    """
    if shape == "linear":
        left = 1.0 - done
    elif shape == "cosine":
        left = 0.5 * (1.0 + cos(pi * done))
    else:
        assert shape == "sqrt", shape
        left = 1.0 - sqrt(done)
    return floor + (1.0 - floor) * left


@dataclass(frozen=True)
class Rate:
    """A learning-rate schedule over `steps` updates; call it with a step to get the learning rate, which
    stays at its last value after that many updates.
    """

    schedule: RateSchedule
    peak: float
    steps: int

    @classmethod
    def of(cls, optimiser: Optimiser, steps: int) -> Rate:
        """The learning rate of a run of `steps` updates."""
        return cls(optimiser.rate, optimiser.lr, steps)

    @property
    def decay_start(self) -> int:
        """The first step of the decay; `steps` where there is none."""
        how = self.schedule
        if how.schedule == "constant":
            return self.steps
        if how.schedule == "wsd":
            return self.steps - round(how.decay_fraction * self.steps)
        return how.warmup

    def ratio(self, step: int) -> float:
        """The learning rate divided by its peak, in [0, 1]."""
        how = self.schedule
        if step < how.warmup:
            return warmup_ratio(step, how.warmup)
        if how.schedule == "constant" or step < self.decay_start:
            return 1.0
        shape = how.decay if how.schedule == "wsd" else how.schedule
        return decay_ratio(shape, progress(step, self.decay_start, self.steps), how.min_ratio)

    def __call__(self, step: int) -> float:
        """The learning rate of the update that follows `step` updates."""
        return self.peak * self.ratio(step)
