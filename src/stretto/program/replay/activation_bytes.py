"""Activation bytes over time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from stretto.program.action import Action, Kind
from stretto.program.program import Program
from stretto.program.replay.costs import Costs, Prices

Curve = list[tuple[float, float]]


def live_bytes(
    program: Program, costs: Costs, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> list[Curve]:
    """Per rank, (time, bytes held from then on); of several changes at one time each is listed."""
    prices = Prices(program, costs)
    return [
        _curve(_Books(program, prices, program.orders[rank]), starts[rank], ends[rank])
        for rank in range(program.ranks)
    ]


def _curve(books: _Books, starts: Sequence[float], ends: Sequence[float]) -> Curve:
    changes: list[tuple[float, float]] = []
    for action, start, end in zip(books.order, starts, ends, strict=True):
        taken, given = books.change(action)
        if taken:
            changes.append((start, taken))
        if given:
            changes.append((end, -given))
    # stable: of changes at one time, those of the earlier action come first
    changes.sort(key=itemgetter(0))
    held = 0.0
    curve: Curve = []
    for time, change in changes:
        held += change
        curve.append((time, held))
    return curve


class _Books:
    """What each action of a rank takes and gives back."""

    def __init__(self, program: Program, prices: Prices, order: Sequence[Action]) -> None:
        self.order = order
        self.trains = program.trains
        self.prices = prices
        self.repeated = {(s, i) for s, kind, i in order if kind is Kind.RECOMPUTE}

    def change(self, action: Action) -> tuple[float, float]:
        """Bytes taken at the action's start, bytes given back at its end."""
        stage, kind, i = action
        full = self.prices.activations[stage]
        early = full * (1 - self.prices.costs.kept_for_w)  # what I gives back
        repeated = (stage, i) in self.repeated
        kept = self.prices.inputs[stage] if repeated else 0.0
        if kind is Kind.F:
            if repeated:
                return kept, 0.0  # nothing but its input is held for the backward
            return full, 0.0 if self.trains else full
        if kind is Kind.RECOMPUTE:
            return full, kept
        if kind is Kind.B:
            return 0.0, full
        if kind is Kind.I:
            return 0.0, early
        if kind is Kind.W:
            return 0.0, full - early
        moved = kept if repeated else full
        if kind is Kind.OFFLOAD:
            return 0.0, moved
        if kind is Kind.RELOAD:
            return moved, 0.0
        return 0.0, 0.0
