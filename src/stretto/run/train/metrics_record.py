"""What is measured of a training step and of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import exp, isfinite, isnan
from typing import Any, Protocol


class AnyStep(Protocol):
    """A training step of any kind of model."""

    @property
    def step(self) -> int: ...

    @property
    def loss(self) -> float: ...

    @property
    def speed(self) -> float:
        """What goes through in a second: tokens, samples."""
        ...

    def facts(self) -> dict[str, Any]:
        """Numbers by name, None for what is not known."""
        ...


class AnyEval(Protocol):
    """An evaluation of any kind of model."""

    @property
    def step(self) -> int: ...

    def facts(self) -> dict[str, Any]:
        """Numbers by name, None for what is not known."""
        ...


@dataclass(frozen=True)
class Words:
    """How records are told in a terminal.

    step, evaluation: the line of a record, with the steps of the whole run.
    unit: of the speed.
    """

    step: Callable[[Any, int], str]
    evaluation: Callable[[Any, int], str]
    unit: str


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step of the whole job; None is what is not known on this machine."""

    step: int  # updates made, this one included: the first step is 1
    loss: float  # mean over the tokens of the global batch, nats
    grad_norm: float | None  # over all parameters, before clipping; None where a step has several updates
    lr: float
    tokens: int  # seen since the first step of the run, all ranks together
    tokens_per_s: float  # of the whole job in this step
    step_time_s: float
    mfu: float | None = None  # model FLOP/s over the peak of all devices, 0 to 1
    memory_gib: float | None = None  # peak of the fullest rank
    bubble: float | None = None  # idle part of the pipeline in this step, 0 to 1
    loss_scale: float | None = None  # with float16, after this step
    skipped: int | None = None  # with float16, steps of the run without an update, for an overflow
    expert_loss: float | None = None  # balance and z-loss of experts, mean over tokens; not in `loss`
    expert_dropped: float | None = None  # part of the choices that found no room, 0 to 1
    expert_busiest: float | None = None  # load of the busiest expert over the average of its layer

    @property
    def speed(self) -> float:
        """What goes through in a second."""
        return self.tokens_per_s

    def facts(self) -> dict[str, Any]:
        """The record as written to the file."""
        return asdict(self)


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation on the held-out split, after `step` updates."""

    step: int
    loss: float  # mean over its tokens, nats
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is too large for a float."""
        return exp(self.loss) if self.loss < 700 or isnan(self.loss) else float("inf")

    def facts(self) -> dict[str, Any]:
        """The record with its perplexity, as written to the file."""
        return {"step": self.step, "loss": self.loss, "perplexity": self.perplexity} | asdict(self)


def json_line(facts: Mapping[str, Any]) -> str:
    """One line of valid JSON. JSON has no NaN: it is written as the text "NaN", which float() reads back."""
    return json.dumps({name: _plain(value) for name, value in facts.items()}, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
