"""How programs of different years run kernels and collectives: what of a step is neither model nor device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import yaml


@dataclass(frozen=True)
class Habits:
    """How a program runs kernels and collectives.

    Attributes:
        host: seconds that the host takes to start one kernel; kernels that are shorter wait for it.
        action: seconds that the host takes for a stage's forward or backward beside its kernels.
        hidden: part of the backward's collectives over tp that its own products hide.
        slowdown: of what runs while something is communicated, 1.0: none. Measured ones of common kernels are
            1.1 to 1.4 (docs/planning.md).
        attention: speed of fused attention kernels over that of today's; those of 2022 reach a half
            (Dao 2023, "FlashAttention-2", section 4.1).
        causal: fused attention leaves out what is masked.
    """

    host: float = 0.0
    action: float = 0.0
    hidden: float = 1.0
    slowdown: float = 1.2
    attention: float = 1.0
    causal: bool = True


@lru_cache(maxsize=1)
def known_habits() -> dict[str, Habits]:
    """Habits by name: "unfused" (to the end of 2022), "fused" (FlashAttention, 2023), "today"."""
    text = files("stretto.cost.time").joinpath("data/habits.yaml").read_text(encoding="utf-8")
    return {name: Habits(**fields) for name, fields in yaml.safe_load(text).items()}


def habits_of(name: str) -> Habits:
    """The habits of that name."""
    return known_habits()[name]
