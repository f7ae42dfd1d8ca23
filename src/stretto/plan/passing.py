"""Weights and gradients that are whole on a rank for a while, followed through its step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stretto.plan.sharing import TIED, UNDER_WAY, StageUnits
from stretto.schedule.action import Action, Kind

_SHARED = -1  # stands for the parameter that several stages of the rank have together


class Passing:
    """Adds to `held` what is there beside a rank's own parts: `gathered` weights and `open` gradients.

    Attributes:
        units: of each stage; a weight that several of them have is left out.
    """

    def __init__(self, units: Mapping[int, StageUnits], order: Sequence[Action], held: Counter[str]) -> None:
        self.held = held
        self._split = {action.stage for action in order if action.kind is Kind.W}
        tied = {s: u for s, own in units.items() for u in own.units if u.parameters[0].name == TIED}
        self._shared = set(tied) if len(tied) > 1 else set[int]()
        self._one = next(iter(tied.values())) if self._shared else None
        self.units = {s: _without(own) if s in self._shared else own for s, own in units.items()}
        self._waiting, self._there = set[int](), set[int]()
        self._opened, self._reduced = set[int](), set[int]()
        self._flying = {s: list[int]() for s in (*units, _SHARED)}

    # ------------------------------------------------------------------ weights

    def waits(self, stage: int) -> bool:
        """Whether the weights of the stage's last layer are there since a forward."""
        return stage in self._waiting

    def forward(self, stage: int) -> None:
        """A forward leaves the weights of the last layer for the backward."""
        if stage not in self._waiting:
            self._waiting.add(stage)
            self.held["gathered"] += self.units[stage].waiting

    def gather(self, stage: int) -> None:
        """The weights of a stage come."""
        self._together(stage, 1)
        self._there.add(stage)
        self.held["gathered"] += self.units[stage].gathered

    def release(self, stage: int) -> None:
        """They go."""
        self._there.remove(stage)
        self._together(stage, -1)
        self.held["gathered"] -= self.units[stage].gathered

    def _together(self, stage: int, sign: int) -> None:
        if self._one is not None and stage in self._shared and self._there.isdisjoint(self._shared):
            self.held["gathered"] += sign * self._one.gathered

    # ------------------------------------------------------------------ gradients

    def before(self, stage: int) -> int:
        """Reductions of the stage's gradients that are under way."""
        return len(self._flying[stage])

    def flying(self, stage: int) -> int:
        """Their bytes."""
        return sum(self._flying[stage])

    def replaced(self, action: Action) -> int:
        """Bytes of what is held and is counted in what a backward takes for itself."""
        waiting = self.units[action.stage].waiting if action.stage in self._waiting else 0
        return waiting + (self.flying(action.stage) if action.kind is Kind.B else 0)

    def open(self, stage: int) -> None:
        """The first backward of a stage makes room for its whole gradient, when those that are reduced have
        given back theirs.
        """
        if stage in self._opened or not (room := self.units[stage].open):
            return
        for done in self._reduced:
            self.held["open"] -= self.units[done].open + self.units[done].arriving
        self._reduced.clear()
        self._opened.add(stage)
        self.held["open"] += room

    def backward(self, action: Action) -> None:
        """A backward, or one of its halves, is done: the gradients that it completed are on their way."""
        stage, kind, _ = action
        if kind is not Kind.W and stage in self._waiting:
            self._waiting.remove(stage)
            self.held["gathered"] -= self.units[stage].waiting
        units = self.units[stage]
        halves = (True, False) if stage in self._split else (None,)
        for inputs in halves:
            if kind is Kind.B or inputs is (kind is Kind.I):
                self._launch(stage, units.flying(inputs))
        if self._one is not None and stage in self._shared and self._one.each and kind is not Kind.I:
            self._launch(_SHARED, (self._one.flying,))

    def _launch(self, stage: int, sizes: Sequence[int]) -> None:
        """Those before the last two have arrived."""
        flying = self._flying[stage]
        self.held["open"] -= sum(flying)
        flying[:] = [*flying, *sizes][-UNDER_WAY:]
        self.held["open"] += sum(flying)

    def reduce(self, stage: int) -> None:
        """The gradients of a step are on their way."""
        self._reduced.add(stage)
        self.held["open"] += self.units[stage].arriving

    def updated(self, stage: int) -> None:
        """They have arrived in the middle of the step, and are applied."""
        self._reduced.discard(stage)
        self.held["open"] -= self.units[stage].arriving

    def end(self) -> None:
        """All gradients have arrived."""
        self.held["open"] = 0


def _without(units: StageUnits) -> StageUnits:
    return replace(units, units=tuple(unit for unit in units.units if unit.parameters[0].name != TIED))
