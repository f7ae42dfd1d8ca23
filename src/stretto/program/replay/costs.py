"""Costs of one program: the time of every kind of action on every stage, and of every message."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite
from typing import TypeVar

from stretto.errors import StrettoError
from stretto.program.action import ActionKind
from stretto.program.program import Program

PerStage = float | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times of a rank's entire share of one microbatch, in any unit; a full backward takes I + W.

    A stage takes its part of its rank's share: 1/chunks on a rank that holds `chunks` stages of a copy of the
    model. For uneven stages give `per_stage`, the (F, I, W) of every stage in model order, which replaces
    `F`, `I` and `W`. The other times work likewise: one number is a rank's share, a sequence has an entry for
    each stage. Sequences cover all stages, or those of one copy if all copies are alike.

    A message takes `hop + message_bytes / bandwidth`. A link carries the messages of an ordered pair of
    ranks, or of all pairs that `links` maps to one name, such as a node's network card. With `contention` a
    link carries one message at a time: each occupies it for bytes / bandwidth and arrives `hop` later, so
    latencies overlap. Messages are served in the order in which they become ready; ties go to the lower
    sending rank.

    Attributes:
        F, I, W: forward, input gradient, weight gradient.
        hop: latency of a message between two ranks.
        per_stage: (F, I, W) of each stage.
        recompute: time of RECOMPUTE; by default that of the stage's F.
        message_bytes: bytes sent from a stage to the next, and of the gradient sent back: a number for all,
            or one for each of the `depth - 1` boundaries of a copy.
        bandwidth: bytes per unit of time; a mapping is by (source rank, destination rank).
        links: names of shared links, by (source rank, destination rank).
        contention: messages on one link queue.
        blocking: a rank does nothing else while a message that it sends is in flight.
        reduce: time of the reduction of a stage's gradients (REDUCE_GRAD; in a program that is not lowered it
            starts at the stage's last backward).
        reduce_overlaps: reductions overlap with compute, those of one rank in sequence. Otherwise they run in
            sequence after all of the rank's other work (before each U in asynchronous programs).
        unshard, offload, reload: times of UNSHARD, OFFLOAD and RELOAD. Each overlaps with compute, those of
            one kind in sequence, and actions that depend on it wait.
        update: time of the optimiser on a stage, which runs once all ranks are done, or at `U` if weights
            change within the step.
        pair: if None, overlapped pairs run in sequence, and F's result leaves before B begins. Otherwise a
            pair is one block that takes `pair` times its F and B, needs both inputs at its start and has both
            results at its end.
        activations: bytes that a stage holds of one microbatch from its F to its B or W; a number applies to
            every stage.
        kept_for_w: fraction of `activations` that is held after I until W.
        inputs: bytes of the input that a stage holds of a microbatch whose forward is repeated (RECOMPUTE).

    Raises:
        StrettoError: a value is negative, not finite or of the wrong shape.
    """

    F: float = 1.0
    I: float = 1.0
    W: float = 1.0
    hop: float = 0.0
    per_stage: Sequence[tuple[float, float, float]] | None = None
    recompute: PerStage | None = None
    message_bytes: PerStage = 0.0
    bandwidth: float | Mapping[tuple[int, int], float] = inf
    links: Mapping[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    contention: bool = False
    blocking: bool = False
    reduce: PerStage = 0.0
    reduce_overlaps: bool = True
    unshard: PerStage = 0.0
    offload: PerStage = 0.0
    reload: PerStage = 0.0
    update: PerStage = 0.0
    pair: float | None = None
    activations: PerStage = 1.0
    kept_for_w: float = 1.0
    inputs: PerStage = 0.0

    def __post_init__(self) -> None:
        for name, value in self._numbers():
            # bool is a subclass of int, and YAML may contain text
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise StrettoError(
                    f"cost {name} is {value!r}, must be a number", hint=f"use {name}=0 or more"
                )
            if not (isfinite(value) and value >= 0):
                raise StrettoError(
                    f"cost {name} is {value}, must be a finite time >= 0"
                    if name not in _SIZES
                    else f"{name} is {value}, must be a finite number >= 0",
                    hint=f"use {name}=0 or more",
                )
        rates = self.bandwidth if isinstance(self.bandwidth, Mapping) else {None: self.bandwidth}
        for pair, rate in rates.items():
            if not rate > 0:
                entry = "bandwidth" if pair is None else f"bandwidth[{pair}]"
                raise StrettoError(f"{entry} is {rate}, must be above 0", hint="leave it out for no limit")
        if self.kept_for_w > 1:
            raise StrettoError(
                f"kept_for_w is {self.kept_for_w}, must be 0 to 1: a fraction of activations",
                hint="nearest is kept_for_w=1",
            )

    def _numbers(self) -> Iterator[tuple[str, float]]:
        """Yield every number except the bandwidths, with its name."""
        for name in ("F", "I", "W", "hop", "kept_for_w"):
            yield name, getattr(self, name)
        for stage, share in enumerate(self.per_stage or ()):
            if len(share) != 3:
                raise StrettoError(f"per_stage[{stage}] is {share}, must be three times: F, I, W")
            yield from zip((f"per_stage[{stage}].{kind}" for kind in "FIW"), share, strict=True)
        for name in _PER_STAGE:
            value: PerStage | None = getattr(self, name)
            if isinstance(value, Sequence):
                yield from ((f"{name}[{index}]", entry) for index, entry in enumerate(value))
            elif value is not None:
                yield name, value
        if self.pair is not None:
            yield "pair", self.pair

    @property
    def B(self) -> float:
        """Time of a full backward of a rank's share."""
        return self.I + self.W


_PER_STAGE = (
    "recompute",
    "message_bytes",
    "reduce",
    "unshard",
    "offload",
    "reload",
    "update",
    "activations",
    "inputs",
)
_SIZES = frozenset({"message_bytes", "activations", "inputs", "kept_for_w", "pair"})


_T = TypeVar("_T")

OVERLAPPED = {
    ActionKind.UNSHARD: "unshard",
    ActionKind.OFFLOAD: "offload",
    ActionKind.RELOAD: "reload",
}  # on separate streams


@dataclass(frozen=True, kw_only=True)
class Route:
    """The link and times of the messages of one (stage, direction), from the receiving stage's view."""

    source: int  # rank
    destination: int
    link: Hashable
    occupied: float  # time for which a message occupies the link
    delay: float  # time from both sides being ready to arrival, without queueing


class Prices:
    """The costs of all actions and messages of a program.

    Raises:
        StrettoError: a sequence does not have one entry for each stage, or a bandwidth is missing.
    """

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.compute = self._compute()
        self.reduce = self._shared("reduce", costs.reduce)
        self.update = self._shared("update", costs.update)

    @cached_property
    def overlapped(self) -> dict[ActionKind, list[float]]:
        """Time of each kind that overlaps with compute, by stage."""
        return {kind: self._shared(name, getattr(self.costs, name)) for kind, name in OVERLAPPED.items()}

    @cached_property
    def activations(self) -> list[float]:
        return self._listed("activations", self.costs.activations)

    @cached_property
    def inputs(self) -> list[float]:
        return self._listed("inputs", self.costs.inputs)

    @cached_property
    def forward(self) -> list[Route | None]:
        """For each stage, the route of its input, or None if it is already on the rank."""
        return [self._route(s - 1, s) if not self.program.is_first(s) else None for s in self._stages]

    @cached_property
    def backward(self) -> list[Route | None]:
        """For each stage, the route of the gradient of its output."""
        return [self._route(s + 1, s) if not self.program.is_last(s) else None for s in self._stages]

    def times(self, stage: int) -> dict[ActionKind, float]:
        """Return the time for which each kind of the stage's actions keeps its rank busy."""
        return self.compute[stage] | {ActionKind.UPDATE: self.update[stage]}

    def _compute(self) -> list[dict[ActionKind, float]]:
        costs = self.costs
        if costs.per_stage is None:
            shares = [(costs.F / n, costs.I / n, costs.W / n) for n in self._chunks]
        else:
            shares = self._every("per_stage", costs.per_stage, lambda n: f"give {n} triples of F, I, W")
        repeats = [f for f, _, _ in shares]
        if costs.recompute is not None:
            repeats = self._shared("recompute", costs.recompute)
        return [
            {
                ActionKind.F: f,
                ActionKind.B: i + w,
                ActionKind.I: i,
                ActionKind.W: w,
                ActionKind.RECOMPUTE: again,
            }
            for (f, i, w), again in zip(shares, repeats, strict=True)
        ]

    @property
    def _stages(self) -> range:
        return range(self.program.stages)

    @cached_property
    def _chunks(self) -> list[int]:
        """For each stage, the number of stages of its copy that its rank holds."""
        depth, placement = self.program.depth, self.program.placement
        copies = [placement[at : at + depth] for at in range(0, len(placement), depth)]
        return [copies[stage // depth].count(rank) for stage, rank in enumerate(placement)]

    def _shared(self, name: str, value: PerStage) -> list[float]:
        """Return a rank's share divided among its chunks, or the values given by stage."""
        if isinstance(value, Sequence):
            return self._listed(name, value)
        return [value / n for n in self._chunks]

    def _listed(self, name: str, value: PerStage) -> list[float]:
        if isinstance(value, Sequence):
            return self._every(name, value, lambda n: f"give {n} numbers, or one for all")
        return [value] * self.program.stages

    def _every(self, name: str, value: Sequence[_T], hint: Callable[[int], str]) -> list[_T]:
        """Return the entries of all stages; those of one copy are repeated for the others."""
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
        return Route(
            source=pair[0],
            destination=pair[1],
            link=costs.links.get(pair, pair),
            occupied=occupied,
            delay=costs.hop + occupied,
        )

    @cached_property
    def _bytes(self) -> Sequence[float]:
        """Bytes sent from each stage of a copy to the next."""
        size, boundaries = self.costs.message_bytes, self.program.depth - 1
        if not isinstance(size, Sequence):
            return [size] * boundaries
        if len(size) != boundaries:
            raise StrettoError(
                f"message_bytes has {len(size)} entries, must be one each for {boundaries} boundaries",
                hint=f"give {boundaries} numbers, or one for all",
            )
        return size
