"""The optimiser of a job: the rule of the update with its settings, and the learning rate's course."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from stretto.errors import Problem
from stretto.job.field import Field, check_fields

OptimiserName = Literal["adamw", "sgd", "lamb", "adafactor", "muon"]
OPTIMISERS: tuple[OptimiserName, ...] = get_args(OptimiserName)
StateType = Literal["float32", "bfloat16"]
RateShape = Literal["cosine", "linear", "constant", "inverse-sqrt", "wsd"]
DecayShape = Literal["linear", "cosine", "sqrt", "exponential"]

MUON_MOMENTUM = 0.95  # where the job says none


@dataclass(frozen=True, kw_only=True)
class RateCurve:
    """The learning rate over the steps, as a ratio of its peak.

    `cosine` and `linear` decay from the end of the warm-up to the end of the decay, `constant` never does,
    `inverse-sqrt` (Vaswani et al. 2017, section 5.3) falls as 1/sqrt(step), and `wsd` (warm-up, stable,
    decay: Hu et al. 2024, MiniCPM, section 4) holds the peak and decays in the last `decay_fraction` of the
    steps in the shape `decay`. Those that decay stay at `min_ratio` of the peak once the decay has ended.
    """

    schedule: Annotated[
        RateShape,
        Field(
            "After the warm-up: `cosine` and `linear` decay until `decay_steps`; `inverse-sqrt` falls as `1 "
            "/ sqrt(step)`; `wsd` is warm-up, stable, decay: constant until the last `decay_fraction` of the "
            "steps."
        ),
    ] = "cosine"
    warmup: Annotated[
        int | float,
        Field(
            "Steps of linear warm-up; as a fraction below 1, such as 0.01: that part of `decay_steps`. A "
            "warm-up that is longer than the steps before the decay is cut to them.",
            ge=0,
        ),
    ] = 0
    warmup_init: Annotated[
        float | None,
        Field(
            "Learning rate at the first update over the peak, from which the warm-up rises; null: `1 / "
            "warmup`, so that the first update already learns. Megatron-LM begins at 0.",
            ge=0,
            le=1,
        ),
    ] = None
    min_ratio: Annotated[
        float, Field("Learning rate over its peak from the end of the decay on.", ge=0, le=1)
    ] = 0.1
    decay_steps: Annotated[
        int | None,
        Field("Steps, those of the warm-up among them, until the decay ends; null: `train.steps`.", gt=0),
    ] = None
    decay_fraction: Annotated[float, Field("Fraction of `decay_steps` in which wsd decays.", ge=0, le=1)] = (
        0.1
    )
    decay: Annotated[DecayShape, Field("Shape of the decay of wsd; `exponential` is `2 0.5^done - 1`.")] = (
        "linear"
    )

    def __post_init__(self) -> None:
        if isinstance(self.warmup, float) and self.warmup >= 1:
            rule = "with a fraction it is a part of the steps, below 1"
            steps = round(self.warmup)
            raise Problem("warmup", self.warmup, rule, f"{steps} for {steps} steps")

    def end(self, steps: int) -> int:
        """The step at which the decay of a run of `steps` ends."""
        return steps if self.decay_steps is None else self.decay_steps

    def decay_length(self, steps: int) -> int:
        """Steps of the decay of `wsd`."""
        return round(self.decay_fraction * self.end(steps))

    def warmup_steps(self, steps: int) -> int | float:
        """Steps of the warm-up, cut where the decay of `wsd` begins, or else where the decay ends. A part of
        the steps is not rounded.
        """
        end = self.end(steps)
        chosen = self.warmup * end if isinstance(self.warmup, float) else self.warmup
        return min(chosen, end - self.decay_length(steps) if self.schedule == "wsd" else end)


@dataclass(frozen=True, kw_only=True)
class RateSchedule(RateCurve):
    """The learning rate over the steps, as a ratio of `optim.lr`, and over the stages of a pipeline."""

    rescheduling_steps: Annotated[
        int | None,
        Field(
            "Learning rate rescheduling for asynchronous pipelines (PipeMare's T1): a stage whose gradients "
            "are d updates late learns at the rate divided by `d^(1 - step / rescheduling_steps)`, and in "
            "full from that step on; null: all stages learn in full from the start.",
            gt=0,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """The optimiser.

    Raises:
        Problem: there is no such optimiser, or a learning rate that is not above 0.
    """

    name: Annotated[
        OptimiserName,
        Field("The update rule. `muon` is used for the blocks' matrices; all other parameters use AdamW."),
    ] = "adamw"
    lr: Annotated[float, Field("Peak learning rate.", gt=0)] = 3e-4
    betas: Annotated[
        tuple[float, float], Field("Decay of the means of gradient and squared gradient in adamw and lamb.")
    ] = (0.9, 0.95)
    eps: Annotated[float, Field("Added to the denominator in adamw and lamb.", gt=0)] = 1e-8
    weight_decay: Annotated[float, Field("Decoupled weight decay; norms and biases have none.", ge=0)] = 0.1
    no_decay: Annotated[
        tuple[str, ...], Field("Patterns of names of further parameters without weight decay.")
    ] = ()
    momentum: Annotated[
        float, Field("Momentum of sgd and muon; 0 for the others, and for muon 0.95.", ge=0, lt=1)
    ] = 0.0
    states: Annotated[
        StateType, Field("Type in which adamw's means are stored; bfloat16 rounds to nearest.")
    ] = "float32"
    clip: Annotated[
        float | None, Field("Largest gradient norm over all parameters; null: no clipping.", gt=0)
    ] = 1.0
    rate: RateSchedule = field(default_factory=RateSchedule)

    def __post_init__(self) -> None:
        check_fields(self, "name", "lr")

    @property
    def moment_bytes(self) -> int | None:
        """Bytes of an element of adamw's means; None: as the weights that are updated have them."""
        return 2 if self.states == "bfloat16" else None

    @property
    def effective_momentum(self) -> float:
        """The momentum, with muon's usual one where the job says none."""
        return self.momentum or (MUON_MOMENTUM if self.name == "muon" else 0.0)


def optimiser_problems(optimiser: Optimiser, section: str = "optim") -> Iterator[Problem]:
    """Settings that do not go together.

    Args:
        section: of the config, which the problems name.
    """
    name, betas = optimiser.name, list(optimiser.betas)
    if optimiser.momentum and name not in ("sgd", "muon"):
        fix = f"{section}.momentum=0, or {section}.name=sgd"
        yield Problem(f"{section}.momentum", optimiser.momentum, f"{name} has none", fix)
    if not all(0 <= beta < 1 for beta in betas):
        yield Problem(f"{section}.betas", betas, "each must be in [0, 1)", "[0.9, 0.95] is usual")
    if optimiser.states == "float32":
        return
    if name != "adamw":
        fix = f"float32, or {section}.name=adamw"
        yield Problem(f"{section}.states", optimiser.states, f"{name} has float32 only", fix)
    elif 0.99 < max(betas) < 1:
        yield Problem(
            f"{section}.betas",
            betas,
            "bfloat16 states have 8 significant bits, in which means slower than 0.99 stand still",
            f"{[min(beta, 0.99) for beta in betas]}, or {section}.states=float32",
        )
