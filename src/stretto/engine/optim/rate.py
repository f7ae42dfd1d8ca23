"""Learning-rate schedules, as pure functions of the step.

`step` is the number of updates already made, so the first update has step 0. Because nothing is kept between
steps, a resumed run needs the step and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi, sqrt

SCHEDULES = ("cosine", "linear", "constant", "wsd")
DECAYS = ("linear", "cosine", "sqrt")


def warmup_ratio(step: int, warmup: int) -> float:
    """Linear warm-up: 1/warmup at the first update, 1 at update number `warmup` and after.

    The first update already learns; schedules that start at 0 spend it on nothing.
    """
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def progress(step: int, start: int, end: int) -> float:
    """How far `step` is from `start` (0) to `end` (1), held at both ends."""
    if step < start:
        return 0.0
    return min(1.0, (step - start) / (end - start)) if end > start else 1.0


def decay_ratio(shape: str, done: float, floor: float) -> float:
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


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A learning-rate schedule over `steps` updates; call it with a step to get the learning rate.

    `cosine` and `linear` decay from the end of the warm-up to `steps`, `constant` never does, `wsd` (warm-up,
    stable, decay: Hu et al. 2024, MiniCPM, section 4) holds the peak and decays in the last `decay_fraction`
    of all steps in the shape `decay`. Those that decay end at `min_ratio` of the peak and stay there.
    """

    schedule: str
    peak: float
    steps: int
    warmup: int = 0
    min_ratio: float = 0.0
    decay_fraction: float = 0.1
    decay: str = "linear"

    def __post_init__(self) -> None:
        assert self.schedule in SCHEDULES, self.schedule
        assert self.decay in DECAYS, self.decay

    @property
    def decay_start(self) -> int:
        """The first step of the decay; `steps` where there is none."""
        if self.schedule == "constant":
            return self.steps
        if self.schedule == "wsd":
            return self.steps - round(self.decay_fraction * self.steps)
        return self.warmup

    def ratio(self, step: int) -> float:
        """The learning rate over its peak, from 0 to 1."""
        if step < self.warmup:
            return warmup_ratio(step, self.warmup)
        if self.schedule == "constant" or step < self.decay_start:
            return 1.0
        shape = self.decay if self.schedule == "wsd" else self.schedule
        return decay_ratio(shape, progress(step, self.decay_start, self.steps), self.min_ratio)

    def __call__(self, step: int) -> float:
        """The learning rate of the update that follows `step` updates."""
        return self.peak * self.ratio(step)
