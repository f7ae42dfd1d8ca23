"""What a search finds: the best layouts in order, what was tried on the way, and what was turned down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stretto.planner.estimate import Estimate
from stretto.planner.execution import Assumptions
from stretto.planner.memory.fits import Verdict

Objective = Literal["time", "tokens_per_dollar"]

NOISE = 0.022  # by so much one configuration differs from itself when it is measured again, the median


@dataclass(frozen=True)
class Ranked:
    """One of the best layouts.

    Attributes:
        estimate: time and memory; of every pipeline rank.
        why: in words: of the first what it is good at, of the others what they lose by.
        words: the layout in words, as `Tried.layout`.
        tokens_per_dollar: None where the cluster has no price.
    """

    estimate: Estimate
    why: str
    words: str
    tokens_per_dollar: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One candidate whose time and memory were looked at.

    Attributes:
        layout: in words.
        seconds: of a step.
        memory: bytes of the fullest device, as its driver shows them; the middle of the interval.
        least: `memory` is a lower bound, which is too much already.
    """

    layout: str
    seconds: float
    memory: float
    verdict: Verdict
    least: bool = False


@dataclass(frozen=True)
class Rejected:
    """Candidates turned down for one reason: so many, and one of them in words."""

    count: int
    example: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to "which layout, and will it fit?".

    Attributes:
        ranking: the best first; empty: nothing fits.
        tried: all that were replayed, in the order of the search; those that were not weighed with the least
            memory that they take.
        rejected: by reason: a field of the config whose rule was broken, "memory", "slower".
        candidates: legal combinations of all choices.
        feasible: of those that were weighed, how many fit.
        replayed: of the candidates, how many were replayed exactly; bounds spared the others.
        seconds: that the search took.
        gap: no layout that was not looked at can be better than the best by more than this part; infinite
            where nothing was found and not all was looked at.
        widened: nothing fitted before states and parameters were shared and put elsewhere in every way.
        nearest: where nothing fits, what comes nearest to it.
    """

    ranking: Sequence[Ranked]
    tried: Sequence[Tried]
    rejected: Mapping[str, Rejected]
    candidates: int
    feasible: int
    replayed: int
    seconds: float
    objective: Objective
    assumptions: Assumptions
    gap: float = 0.0
    widened: bool = False
    nearest: Ranked | None = None
