"""Collectives of data-parallel ranks in a step, unit by unit: gradient reductions and weight gathers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from stretto.planner.counts.state_bytes import StateUnit
from stretto.planner.memory.transient import SHARED, TIED, StageUnits
from stretto.program.action import Action, ActionKind


class DigitCollective(NamedTuple):
    """A collective over ranks that differ in one digit of their number among the copies.

    Attributes:
        level: the digit; 4: over all copies.
        size: bytes of the whole tensor.
    """

    kind: str
    level: int
    size: int


def reductions(unit: StateUnit, first: int, last: int) -> Iterator[DigitCollective]:
    """Yield the reductions of a gradient, from this rank's shard at level `first` to that at `last`."""
    counts = unit.sizes.levels(unit.copies)
    size = unit.full_gradient
    for level in range(min(first, 3)):
        size //= counts[level]
    for level in range(first, min(last, 3)):
        if counts[level] > 1:
            yield DigitCollective("reduce-scatter", level, size)
            size //= counts[level]
    if last == 4 and counts[3] > 1:
        yield DigitCollective("all-reduce", 3, size)


def once_a_step(unit: StateUnit) -> Iterator[DigitCollective]:
    """Reductions of a unit's gradient after all microbatches, or those that remain at the end if each
    microbatch is reduced.
    """
    if unit.copies == 1 or unit.frozen:
        return
    if unit.state_config.mode == "server":
        yield DigitCollective("gather", 4, unit.full_gradient)
    elif unit.each:
        yield from reductions(unit, 2, 4)
    elif unit.open:
        yield from reductions(unit, 0, 2)
        yield from reductions(unit, 2, 4)
    else:
        yield from reductions(unit, 0, 4)


def published(unit: StateUnit) -> Iterator[DigitCollective]:
    """Yield the collectives that send updated weights to all ranks that hold them between steps."""
    if unit.frozen:
        return
    counts = unit.sizes.levels(unit.copies)
    shard = unit.element * unit.size // counts[0]
    if unit.state_config.mode == "server" and unit.copies > 1:
        yield DigitCollective("broadcast", 4, shard)
    for level in (2, 1):
        if counts[level] > 1:
            yield DigitCollective("all-gather", level, shard // (counts[1] if level == 2 else 1))


def gathered(unit: StateUnit) -> DigitCollective:
    """The gather of the whole weights from the ranks' shards."""
    return DigitCollective("all-gather", 0, unit.gathered)


# ------------------------------------------------------------------ gradients of microbatches


class EachMicrobatch:
    """Reductions of each unit if every microbatch is reduced: when all of its parameters have received a
    gradient, and with the remaining gradients at the end.

    Args:
        units: units by stage; under `SHARED` those of parameters that several stages share.
        tp: ranks that split layers; biases added after a sum over them get their gradients in I.
        tied: by stage, the halves of a backward ("I" as an embedding, `head` as a head) that make a gradient
            of the tied weight; empty if none does.
        head: the half in which the head's weight gets its gradient: I if the loss is computed in chunks.
    """

    def __init__(
        self,
        units: Mapping[int, Sequence[StateUnit]],
        tp: int,
        tied: Mapping[int, Sequence[str]],
        head: Literal["I", "W"],
    ) -> None:
        self.units = units
        self.tp = tp
        self.tied = tied
        self.head = head
        self._received = {id(unit): set[str]() for of_stage in units.values() for unit in of_stage}

    def counts(self, order: Sequence[Action]) -> Iterator[StateUnit]:
        """Yield a unit each time it is reduced in this order of actions."""
        for stage, kind, _ in order:
            if kind in (ActionKind.B, ActionKind.I, ActionKind.W):
                halves = {ActionKind.B: ("I", "W"), ActionKind.I: ("I",), ActionKind.W: ("W",)}[kind]
                for unit in (*self.units.get(stage, ()), *self.units.get(SHARED, ())):
                    yield from self._receive(unit, halves, stage)
            elif kind is ActionKind.REDUCE_GRAD:
                yield from self._left_over(stage)
        for stage in self.units:
            yield from self._left_over(stage)

    def _receive(self, unit: StateUnit, halves: Sequence[str], stage: int) -> Iterator[StateUnit]:
        if not unit.each:
            return
        if self.tied and unit.parameters[0].name == TIED:  # alone in its unit, which each use completes
            yield from (unit for use in self.tied.get(stage, ()) if use in halves)
            return
        needs = {self._half(p.name) for p in unit.parameters}
        received = self._received[id(unit)]
        received |= needs.intersection(halves)
        if received == needs:
            received.clear()
            yield unit

    def _left_over(self, stage: int) -> Iterator[StateUnit]:
        for unit in self.units.get(stage, ()):
            if self._received[id(unit)]:
                self._received[id(unit)].clear()
                yield unit

    def _half(self, name: str) -> str:
        """The half of a backward, I or W, in which a parameter gets its gradient."""
        if name == "head.out.weight":
            return self.head
        products = any(part in name for part in (".attn.", ".cross.", ".mlp."))
        inside = products and not any(part in name for part in ("router", "norm", ".relative"))
        after_a_sum = self.tp > 1 and name.endswith(("proj.bias", "down.bias"))
        return "W" if inside and not after_a_sum else "I"


# ------------------------------------------------------------------ weights that are split


@dataclass
class LayerGathers:
    """The gathers of units in order, if layers gather their weights themselves
    (`engine.parallel.data.layer_gather`).
    """

    stages: Mapping[int, StageUnits]
    calls: list[StateUnit] = field(default_factory=list[StateUnit])

    def __post_init__(self) -> None:
        self._gathered = dict[str, StateUnit]()
        self._of_stage = {stage: set[str]() for stage in self.stages}

    def run(self, order: Sequence[Action]) -> list[StateUnit]:
        """Return a unit for every time that it is gathered."""
        for stage, kind, _ in order:
            if kind is ActionKind.F:
                layers = len(self.stages[stage].layers)
                for index in range(layers):
                    self._gather_layer(stage, index, index + 1)
                    if index < layers - 1:  # the last layer's backward may come next
                        self._release_layer(stage, index, index + 1)
            elif kind in (ActionKind.B, ActionKind.I):
                for index in reversed(range(len(self.stages[stage].layers))):
                    self._gather_layer(stage, index, index - 1)
                    self._release_layer(stage, index, index - 1)
            if kind in (ActionKind.B, ActionKind.I, ActionKind.W):
                self._release(stage, set(self._of_stage[stage]))
        return self.calls

    def _units(self, stage: int, index: int) -> dict[str, StateUnit]:
        """The units with parameters of a layer."""
        layers = self.stages[stage].layers
        if not 0 <= index < len(layers):
            return {}
        return {_name(u): u for u in self.stages[stage].units if layers[index] in u.users and u.gathered}

    def _gather_layer(self, stage: int, index: int, following: int) -> None:
        for name, unit in {**self._units(stage, index), **self._units(stage, following)}.items():
            if name not in self._gathered:
                self._gathered[name] = unit
                self._of_stage[stage].add(name)
                self.calls.append(unit)

    def _release_layer(self, stage: int, index: int, following: int) -> None:
        still = self._units(stage, following)
        self._release(stage, {n for n in self._units(stage, index) if n not in still} & self._of_stage[stage])

    def _release(self, stage: int, names: set[str]) -> None:
        for name in names:
            self._gathered.pop(name, None)
        self._of_stage[stage] -= names


def _name(unit: StateUnit) -> str:
    """A key of a unit, equal only for the same unit of another stage."""
    first = unit.parameters[0]
    return f"{first.name} {unit.expert} {unit.element} {unit.frozen}"


def stage_gathers(stages: Mapping[int, StageUnits], order: Sequence[Action]) -> Iterator[StateUnit]:
    """Yield a unit each time it is gathered, if the program gathers whole stages."""
    gathered_stages, units = set[int](), dict[str, StateUnit]()
    for stage, kind, _ in order:
        of_stage = {_name(unit): unit for unit in stages[stage].units if unit.gathered}
        if kind is ActionKind.UNSHARD:
            gathered_stages.add(stage)
            yield from (unit for name, unit in of_stage.items() if name not in units)
            units |= of_stage
        elif kind is ActionKind.RESHARD:
            gathered_stages.discard(stage)
            needed = {_name(unit) for other in gathered_stages for unit in stages[other].units}
            units = {name: unit for name, unit in units.items() if name in needed or name not in of_stage}
