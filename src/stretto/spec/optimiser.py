"""The optimiser of a job: the rule of the update with its settings, and the learning rate's course."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from stretto.errors import Problem, nearest

OptimiserName = Literal["adamw", "sgd", "lamb", "adafactor", "muon"]
OPTIMISERS: tuple[OptimiserName, ...] = get_args(OptimiserName)
StateType = Literal["float32", "bfloat16"]
RateShape = Literal["cosine", "linear", "constant", "inverse-sqrt", "wsd"]
DecayShape = Literal["linear", "cosine", "sqrt", "exponential"]

MUON_MOMENTUM = 0.95  # where the job says none


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """The learning rate over the steps, as a ratio of its peak.

    `cosine` and `linear` decay from the end of the warm-up to the end of the decay, `constant` never does,
    `inverse-sqrt` (Vaswani et al. 2017, section 5.3) falls as 1/sqrt(step), and `wsd` (warm-up, stable,
    decay: Hu et al. 2024, MiniCPM, section 4) holds the peak and decays in the last `decay_fraction` of the
    steps in the shape `decay`. Those that decay stay at `min_ratio` of the peak once the decay has ended.

    Attributes:
        warmup: steps of linear warm-up; a number with a fraction, below 1, is a part of the steps until the
            end of the decay.
        warmup_init: ratio at the first update, from which the warm-up rises; None: 1/warmup, the first of
            `warmup` equal rises.
        decay_steps: steps until the end of the decay; None: those of the run.
        rescheduling_steps: steps until stages of an asynchronous pipeline, whose gradients are late, learn at
            the full rate; None: from the start.
    """

    schedule: RateShape = "cosine"
    warmup: int | float = 0
    warmup_init: float | None = None
    min_ratio: float = 0.1
    decay_steps: int | None = None
    decay_fraction: float = 0.1
    decay: DecayShape = "linear"
    rescheduling_steps: int | None = None

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
class Optimiser:
    """The rule of the update and its settings.

    Attributes:
        name: `muon` is for the blocks' matrices; all else goes by AdamW.
        lr: peak learning rate.
        betas: decay of the means of gradient and squared gradient in adamw and lamb.
        eps: added to the denominator in adamw and lamb.
        weight_decay: decoupled; norms and biases have none.
        no_decay: patterns of names of further parameters without weight decay.
        momentum: of sgd and muon; 0 stands for muon's usual.
        states: type that adamw's means are kept in.
        clip: largest gradient norm over all parameters; None: no clipping.

    Raises:
        Problem: there is no such optimiser, or a learning rate that is not above 0.
    """

    name: OptimiserName = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    no_decay: tuple[str, ...] = ()
    momentum: float = 0.0
    states: StateType = "float32"
    clip: float | None = 1.0
    rate: RateSchedule = field(default_factory=RateSchedule)

    def __post_init__(self) -> None:
        if self.name not in OPTIMISERS:
            near = nearest(str(self.name), OPTIMISERS)
            fix = f"did you mean {near!r}?" if near else None
            raise Problem("name", self.name, f"it must be one of {', '.join(OPTIMISERS)}", fix)
        if not self.lr > 0:
            raise Problem("lr", self.lr, "it must be above 0")

    @property
    def moment_bytes(self) -> int | None:
        """Bytes of an element of adamw's means; None: as the weights that are updated have them."""
        return 2 if self.states == "bfloat16" else None

    @property
    def usual_momentum(self) -> float:
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
