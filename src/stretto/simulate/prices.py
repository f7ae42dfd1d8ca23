"""Costs applied to one program: the time of every kind of action on every stage, and of every message."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from stretto.errors import StrettoError
from stretto.schedule.action import Kind
from stretto.schedule.program import Program
from stretto.simulate.costs import Costs, PerStage

_T = TypeVar("_T")

BESIDE = {Kind.UNSHARD: "unshard", Kind.OFFLOAD: "offload", Kind.RELOAD: "reload"}  # on streams of their own


@dataclass(frozen=True)
class Route:
    """How the messages of one (stage, direction) travel, as seen by the stage that takes them."""

    source: int  # rank
    destination: int
    link: Hashable
    occupied: float  # time for which a message has the link
    delay: float  # from the time both sides are ready until it is there, if nothing is in its way


class Prices:
    """What everything in `program` costs.

    Raises:
        StrettoError: a sequence has not one entry for each stage, or a bandwidth is missing.
    """

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.compute = self._compute()
        self.reduce = self._shared("reduce", costs.reduce)
        self.update = self._shared("update", costs.update)

    @cached_property
    def beside(self) -> dict[Kind, list[float]]:
        """Time of each kind that runs beside the work, stage by stage."""
        return {kind: self._shared(name, getattr(self.costs, name)) for kind, name in BESIDE.items()}

    @cached_property
    def activations(self) -> list[float]:
        return self._listed("activations", self.costs.activations)

    @cached_property
    def inputs(self) -> list[float]:
        return self._listed("inputs", self.costs.inputs)

    @cached_property
    def forward(self) -> list[Route | None]:
        """For each stage, how its input comes; None where it is on the rank already."""
        return [self._route(s - 1, s) if not self.program.is_first(s) else None for s in self._stages]

    @cached_property
    def backward(self) -> list[Route | None]:
        """For each stage, how the gradient of its output comes."""
        return [self._route(s + 1, s) if not self.program.is_last(s) else None for s in self._stages]

    def times(self, stage: int) -> dict[Kind, float]:
        """What the stage's actions keep its rank busy for, kind by kind."""
        return self.compute[stage] | {Kind.UPDATE: self.update[stage]}

    def _compute(self) -> list[dict[Kind, float]]:
        costs = self.costs
        if costs.per_stage is None:
            shares = [(costs.F / n, costs.I / n, costs.W / n) for n in self._chunks]
        else:
            shares = self._every("per_stage", costs.per_stage, lambda n: f"give {n} triples of F, I, W")
        repeats = [f for f, _, _ in shares]
        if costs.recompute is not None:
            repeats = self._shared("recompute", costs.recompute)
        return [
            {Kind.F: f, Kind.B: i + w, Kind.I: i, Kind.W: w, Kind.RECOMPUTE: again}
            for (f, i, w), again in zip(shares, repeats, strict=True)
        ]

    @property
    def _stages(self) -> range:
        return range(self.program.stages)

    @cached_property
    def _chunks(self) -> list[int]:
        """For each stage, how many stages of its copy its rank holds."""
        depth, placement = self.program.depth, self.program.placement
        copies = [placement[at : at + depth] for at in range(0, len(placement), depth)]
        return [copies[stage // depth].count(rank) for stage, rank in enumerate(placement)]

    def _shared(self, name: str, value: PerStage) -> list[float]:
        """A rank's share cut up into its chunks, or as given stage by stage."""
        if isinstance(value, Sequence):
            return self._listed(name, value)
        return [value / n for n in self._chunks]

    def _listed(self, name: str, value: PerStage) -> list[float]:
        if isinstance(value, Sequence):
            return self._every(name, value, lambda n: f"give {n} numbers, or one for all")
        return [value] * self.program.stages

    def _every(self, name: str, value: Sequence[_T], hint: Callable[[int], str]) -> list[_T]:
        """The entries of all stages, those of one copy repeated for the others."""
        stages, depth = self.program.stages, self.program.depth
        if len(value) not in (stages, depth):
            raise StrettoError(
                f"{name} has {len(value)} entries, must be one each for {stages} stages", hint=hint(stages)
            )
        return list(value) * (stages // len(value))

    def _route(self, source: int, stage: int) -> Route | None:
        placement, costs = self.program.placement, self.costs
        pair = placement[source], placement[stage]
        if pair[0] == pair[1]:
            return None
        bandwidth = costs.bandwidth
        if isinstance(bandwidth, Mapping):
            if pair not in bandwidth:
                raise StrettoError(
                    f"bandwidth has no entry for messages from rank {pair[0]} to rank {pair[1]}",
                    hint=f"add bandwidth[{pair}]",
                )
            bandwidth = bandwidth[pair]
        occupied = self._bytes[min(source, stage) % self.program.depth] / bandwidth
        return Route(*pair, costs.links.get(pair, pair), occupied, costs.hop + occupied)

    @cached_property
    def _bytes(self) -> Sequence[float]:
        """What crosses from each stage of a copy to the next."""
        size, boundaries = self.costs.message_bytes, self.program.depth - 1
        if not isinstance(size, Sequence):
            return [size] * boundaries
        if len(size) != boundaries:
            raise StrettoError(
                f"message_bytes has {len(size)} entries, must be one each for {boundaries} boundaries",
                hint=f"give {boundaries} numbers, or one for all",
            )
        return size
