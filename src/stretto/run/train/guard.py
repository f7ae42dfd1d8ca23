"""What becomes of a step whose loss or gradients cannot be right: it stops the run, is skipped, or is undone.

Steps are judged before their update, by numbers that all ranks have agreed on, so that all decide alike.
Skipping a step whose loss or gradient norm is more than 6 standard deviations above the mean of the last 128
is what OLMo 2 does (2025, section 3.3.2); here median and median absolute deviation take the place of mean
and standard deviation, for a spike in the window must not raise the bar for the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, log
from statistics import median
from typing import Any, Literal

from stretto.run.config.schema import GuardConfig
from stretto.run.launch.failure import TrainingFailed

_TO_SIGMA = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
_LEAST_SPREAD = 1e-3  # of the logarithm: numbers that hardly change at all do not make a spike of a ripple

Judged = tuple[float, float | None]
"""Loss and gradient norm of a step; the norm is None if none is computed."""


@dataclass(frozen=True, kw_only=True)
class BadStep:
    """A step whose update was not applied on any rank.

    Attributes:
        step: its number, from 1.
        reason: what is wrong with it, with the rank and microbatch, or the first bad gradient, if known.
        samples: indices of the step's samples in the order of the run.
        suspects: the samples of the microbatches whose loss is not finite; all of the step's if unknown.
        complete: no part of the update was applied. False for an asynchronous schedule, whose updates with
            finite gradients have been applied.
        before: roll back to a checkpoint of an earlier step than this; None for any.
    """

    step: int
    action: Literal["skip", "rollback"]
    reason: str
    samples: range
    suspects: Sequence[range]
    complete: bool = True
    before: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """As a line of `guard.jsonl`."""
        return {
            "step": self.step,
            "action": self.action,
            "reason": self.reason,
            "samples": [self.samples.start, self.samples.stop],
            "suspects": [[suspect.start, suspect.stop] for suspect in self.suspects],
        }

    def __str__(self) -> str:
        which = " and ".join(f"{suspect.start} to {suspect.stop - 1}" for suspect in self.suspects)
        return f"step {self.step}: {self.reason}{'; samples ' if which else ''}{which}"


class Guard:
    """The rules of a run, and how many bad steps in a row there have been.

    Args:
        history: loss and norm of the last good steps, oldest first; the run's position keeps them, so that a
            run that continues from a checkpoint judges as one that was not interrupted.
    """

    def __init__(self, config: GuardConfig, history: list[Judged]) -> None:
        self.config, self.history = config, history
        self._bad, self._furthest = 0, 0

    def spike(self, loss: float, norm: float | None) -> str | None:
        """Return what is wrong with a step whose loss or norm is far above the window's, or None."""
        window, sigma = self.config.spike_window, self.config.spike_sigma
        if self.config.on_spike == "off" or len(self.history) < window // 2:
            return None
        norms = [past_norm for _, past_norm in self.history if past_norm is not None]
        for name, value, past in (
            ("loss", loss, [past_loss for past_loss, _ in self.history]),
            ("gradient norm", norm, norms),
        ):
            if value is None or not isfinite(value) or len(past) < window // 2:
                continue
            if (times := deviations(value, past)) > sigma:
                return f"the {name} is {value:.6g}, {times:.1f} standard deviations above {median(past):.6g}"
        return None

    def record_good_step(self, step: int, loss: float, norm: float | None) -> None:
        """Count a step that was applied, by its number from 1."""
        if step >= self._furthest:
            self._bad = 0
        if self.config.on_spike != "off":
            finite = norm is not None and isfinite(norm)
            self.history.append((loss, norm if finite else None))
            del self.history[: -self.config.spike_window]

    def handle_bad_step(
        self,
        step: int,
        reason: str,
        *,
        spike: bool,
        samples: range,
        suspects: Sequence[range],
        complete: bool = True,
    ) -> BadStep:
        """What becomes of a bad step, by its number from 1; steps that a rollback repeats without harm do not
        end a row of bad ones.

        Raises:
            TrainingFailed: the config stops here, or this is one bad step too many.
        """
        action = self.config.on_spike if spike else self.config.on_nonfinite
        if action in ("off", "stop"):
            raise TrainingFailed(f"step {step}: {reason}")
        self._count(step, reason)
        return BadStep(
            step=step, action=action, reason=reason, samples=samples, suspects=suspects, complete=complete
        )

    def differ(self, step: int, reason: str, samples: int, before: int | None = None) -> BadStep:
        """What becomes of a run that does not hold the right bits after a step; the samples are not to blame.

        Args:
            before: of `BadStep`.

        Raises:
            TrainingFailed: the config stops here, or this is one bad step too many.
        """
        if self.config.on_mismatch == "stop":
            raise TrainingFailed(f"after step {step}: {reason}")
        self._count(step + 1, reason)  # the same steps come again before the next comparison
        nothing = range(samples, samples)
        return BadStep(
            step=step, action="rollback", reason=reason, samples=nothing, suspects=[], before=before
        )

    def changed(self, step: int, place: str | None, samples: int) -> BadStep:
        """What becomes of a run in which a tensor has changed between the update of a step and the next one;
        a checkpoint that was written meanwhile may have the same.

        Args:
            place: the tensor and its rank.

        Raises:
            TrainingFailed: as `differ`.
        """
        reason = f"{place} has changed since the update, and a checkpoint of step {step} may have it so"
        return self.differ(step, reason, samples, before=step)

    def _count(self, step: int, reason: str) -> None:
        self._bad, self._furthest = self._bad + 1, max(step, self._furthest)
        if self._bad > (limit := self.config.max_skips):
            row = f"{self._bad} bad steps in a row, and guard.max_skips is {limit}"
            raise TrainingFailed(f"step {step}: {reason}; these are {row}")


def deviations(value: float, past: Sequence[float]) -> float:
    """By how many standard deviations a positive number is above the median of others, on the scale of
    logarithms, where losses and gradient norms are spread most evenly.
    """
    logs = [log(max(number, 1e-300)) for number in past]
    middle = median(logs)
    spread = max(_TO_SIGMA * median(abs(each - middle) for each in logs), _LEAST_SPREAD)
    return (log(max(value, 1e-300)) - middle) / spread


def add_range(ranges: Iterable[tuple[int, int]], added: range) -> list[tuple[int, int]]:
    """Ranges [first, end) and one more behind them; those that touch become one."""
    joined = list(ranges)
    if joined and joined[-1][1] == added.start:
        joined[-1] = joined[-1][0], added.stop
    elif len(added):
        joined.append((added.start, added.stop))
    return joined
