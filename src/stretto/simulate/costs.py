"""What a program's actions cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from stretto.errors import StrettoError
from stretto.schedule.action import Kind
from stretto.schedule.program import Program


@dataclass(frozen=True)
class Costs:
    """Times of one rank's whole share of one microbatch, in any unit; a full backward takes I + W.

    A stage takes its part of its rank's share: 1/chunks on a rank that holds `chunks` stages. For uneven
    stages give `per_stage`, the (F, I, W) of every stage in model order, which then stand instead of `F`,
    `I`, `W`. `hop` is the time of one transfer between two ranks, during which both go on working.

    Raises:
        StrettoError: a time is negative or not finite.
    """

    F: float = 1.0
    I: float = 1.0
    W: float = 1.0
    hop: float = 0.0
    per_stage: Sequence[tuple[float, float, float]] | None = None

    def __post_init__(self) -> None:
        times = {"F": self.F, "I": self.I, "W": self.W, "hop": self.hop}
        for stage, share in enumerate(self.per_stage or ()):
            if len(share) != 3:
                raise StrettoError(f"per_stage[{stage}] is {share}, must be three times: F, I, W")
            times.update(zip((f"per_stage[{stage}].{kind}" for kind in "FIW"), share, strict=True))
        for name, time in times.items():
            if not (isfinite(time) and time >= 0):
                raise StrettoError(
                    f"cost {name} is {time}, must be a finite time >= 0", hint=f"say {name}=0 or more"
                )

    @property
    def B(self) -> float:
        """Full backward of a rank's share."""
        return self.I + self.W

    def of_stages(self, program: Program) -> list[dict[Kind, float]]:
        """The time of each kind of compute action, stage by stage.

        Raises:
            StrettoError: `per_stage` has not one entry for each stage.
        """
        if self.per_stage is None:
            chunks = [program.placement.count(rank) for rank in range(program.ranks)]
            shares = [
                (self.F / n, self.I / n, self.W / n) for n in (chunks[rank] for rank in program.placement)
            ]
        elif len(self.per_stage) == program.stages:
            shares = list(self.per_stage)
        else:
            raise StrettoError(
                f"per_stage has {len(self.per_stage)} entries, must be one each for {program.stages} stages",
                hint=f"give {program.stages} triples of F, I, W",
            )
        return [{Kind.F: f, Kind.B: i + w, Kind.I: i, Kind.W: w} for f, i, w in shares]
