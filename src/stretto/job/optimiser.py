"""The optimiser of a job: the update rule with its settings, and the learning rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from stretto.errors import Problem
from stretto.job.field import IN_A_FILE, Field, check_fields, declared

OptimiserName = Literal["adamw", "sgd", "lamb", "adafactor", "muon"]
OPTIMISERS: tuple[OptimiserName, ...] = get_args(OptimiserName)
StateType = Literal["float32", "bfloat16"]
RateShape = Literal["cosine", "linear", "constant", "inverse-sqrt", "wsd"]
DecayShape = Literal["linear", "cosine", "sqrt", "exponential"]

MUON_MOMENTUM = 0.95  # the default

StateSize = Callable[[str, tuple[int, ...], int, int], int]
"""Bytes of the states for some elements of a parameter, given its name and shape in the plain model, the
number of elements, and the bytes of one.
"""


@dataclass(frozen=True, kw_only=True)
class RateCurve:
    """The learning rate over the steps, as a ratio to its peak.

    `cosine` and `linear` decay from the end of the warm-up to the end of the decay, `constant` never does,
    `inverse-sqrt` (Vaswani et al. 2017, section 5.3) falls as 1/sqrt(step), and `wsd` (warm-up, stable,
    decay: Hu et al. 2024, MiniCPM, section 4) holds the peak and decays in the last `decay_fraction` of the
    steps in the shape `decay`. After a decay the rate stays at `min_ratio` of the peak.
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
            "Steps of linear warm-up, or, if below 1 such as 0.01, their fraction of `decay_steps`. A "
            "warm-up longer than the steps before the decay is cut to them.",
            ge=0,
        ),
    ] = 0
    warmup_init: Annotated[
        float | None,
        Field(
            "Ratio of the learning rate at the first update to the peak, from which the warm-up rises; null: "
            "`1 / warmup`, so the first update already learns. Megatron-LM begins at 0.",
            ge=0,
            le=1,
        ),
    ] = None
    min_ratio: Annotated[
        float, Field("Ratio of the learning rate to its peak after the decay.", ge=0, le=1)
    ] = 0.1
    decay_steps: Annotated[
        int | None,
        Field("Steps until the decay ends, warm-up included; null: `train.steps`.", gt=0),
    ] = None
    decay_fraction: Annotated[float, Field("Fraction of `decay_steps` in which wsd decays.", ge=0, le=1)] = (
        0.1
    )
    decay: Annotated[DecayShape, Field("Shape of the decay of wsd; `exponential` is `2 0.5^done - 1`.")] = (
        "linear"
    )

    def __post_init__(self) -> None:
        if isinstance(self.warmup, float) and self.warmup >= 1:
            rule = "a fraction of the steps must be below 1"
            steps = round(self.warmup)
            raise Problem("warmup", self.warmup, rule, f"{steps} for {steps} steps")

    def end(self, steps: int) -> int:
        """Return the step at which the decay of a run of `steps` ends."""
        return steps if self.decay_steps is None else self.decay_steps

    def decay_length(self, steps: int) -> int:
        """Return the steps of `wsd`'s decay."""
        return round(self.decay_fraction * self.end(steps))

    def warmup_steps(self, steps: int) -> int | float:
        """Return the steps of the warm-up, cut at the beginning of `wsd`'s decay or at the end of any other.
        A fraction of the steps is not rounded.
        """
        end = self.end(steps)
        chosen = self.warmup * end if isinstance(self.warmup, float) else self.warmup
        return min(chosen, end - self.decay_length(steps) if self.schedule == "wsd" else end)


@dataclass(frozen=True, kw_only=True)
class RateSchedule(RateCurve):
    """The learning rate over the steps, as a ratio to `optim.lr`, and over the stages of a pipeline."""

    rescheduling_steps: Annotated[
        int | None,
        Field(
            "Learning rate rescheduling for asynchronous pipelines (PipeMare's T1): a stage whose gradients "
            "are d updates late learns at the rate divided by `d^(1 - step / rescheduling_steps)`, and at "
            "the full rate from that step on; null: all stages learn at the full rate from the start.",
            gt=0,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """The optimiser.

    Attributes:
        state_size: of a class in a file, which alone knows its states.

    Raises:
        Problem: the optimiser does not exist, or the learning rate is not above 0.
    """

    name: Annotated[
        OptimiserName | str,
        Field(
            "The update rule. `muon` is used for the blocks' matrices; all other parameters use AdamW. "
            "`FILE.py:CLASS` is a class of your own: see docs/do/own-model.md.",
            pattern=rf"{'|'.join(OPTIMISERS)}|{IN_A_FILE}",
            examples=("mine.py:AdaBelief",),
        ),
    ] = "adamw"
    arguments: Annotated[dict[str, Any], Field("Keyword arguments of a class of your own, besides `lr`.")] = (
        field(default_factory=dict[str, Any], hash=False)
    )
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
    state_size: StateSize | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_fields(self, "name", "lr")

    @property
    def user_defined(self) -> bool:
        """True if the update rule is a class in a file."""
        return self.name not in OPTIMISERS

    @property
    def moment_bytes(self) -> int | None:
        """Bytes of an element of adamw's means, or None if it has the type of the weights that are
        updated.
        """
        return 2 if self.states == "bfloat16" else None

    @property
    def effective_momentum(self) -> float:
        """The momentum, with muon's default if the job sets none."""
        return self.momentum or (MUON_MOMENTUM if self.name == "muon" else 0.0)


def optimiser_problems(optimiser: Optimiser, section: str = "optim") -> Iterator[Problem]:
    """Yield settings that contradict each other.

    Args:
        section: the config's section that the problems name.
    """
    name, betas = optimiser.name, list(optimiser.betas)
    if optimiser.user_defined:
        for field_name in ("betas", "eps", "momentum", "states"):
            value, default = getattr(optimiser, field_name), declared(Optimiser)[field_name].default
            if value != default:
                rule = f"{name} takes its settings from {section}.arguments"
                fix = f"{section}.arguments={{{field_name}: {value}}}, if it has them"
                yield Problem(f"{section}.{field_name}", value, rule, fix)
        return
    if optimiser.arguments:
        rule = f"{name} has fields of {section} in place of arguments"
        fix = f"{section}.arguments={{}}, or {section}.name=FILE.py:CLASS"
        yield Problem(f"{section}.arguments", optimiser.arguments, rule, fix)
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
            "bfloat16 states have 8 significant bits, in which means with a decay above 0.99 do not change",
            f"{[min(beta, 0.99) for beta in betas]}, or {section}.states=float32",
        )
