"""How many activations a program makes each rank hold."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.program.action import KEEPING, Action, Kind
from stretto.program.program import Program

# held from the forward until the weight gradient is there: I alone frees nothing
_STEP = {Kind.F: 1, Kind.B: -1, Kind.W: -1}


def peak_held(program: Program) -> list[int]:
    """Per rank, the most (stage, microbatch) pairs whose activations it holds at once.

    A pair is held from its F to its B or W; where it has a `RECOMPUTE`, from there only, for its forward
    leaves no more than its input (`peak_inputs`). While it is offloaded it is not held.
    """
    return [max((full for full, _ in holdings(program, rank)), default=0) for rank in range(program.ranks)]


def peak_inputs(program: Program) -> list[int]:
    """Per rank, the most (stage, microbatch) pairs of which it holds the input alone at once: from F to
    `RECOMPUTE`, and not while it is offloaded. 0 where nothing is recomputed."""
    return [max((kept for _, kept in holdings(program, rank)), default=0) for rank in range(program.ranks)]


def peak_activations(program: Program) -> list[float]:
    """`peak_held` in rank units: one microbatch through the rank's stages of one copy counts 1."""
    chunks = [program.placement.count(rank) / program.copies for rank in range(program.ranks)]
    return [held / (count or 1) for held, count in zip(peak_held(program), chunks, strict=True)]


def holdings(program: Program, rank: int) -> list[tuple[int, int]]:
    """After each action of the rank, how many (stage, microbatch) pairs it holds: with all activations, and
    with the input alone.

    In a forward-only program a forward's activations are gone with it: what is held during each action.
    """
    order = program.orders[rank]
    if not program.trains:
        return [(int(action.kind is Kind.F), 0) for action in order]
    if not KEEPING.isdisjoint({action.kind for action in order}):
        return _kept(order)
    held, found = 0, list[tuple[int, int]]()
    for action in order:
        held += _STEP.get(action.kind, 0)
        found.append((held, 0))
    return found


def _kept(order: Sequence[Action]) -> list[tuple[int, int]]:
    """The same where activations are repeated or moved."""
    repeated = {(a.stage, a.microbatch) for a in order if a.kind is Kind.RECOMPUTE}
    full = inputs = 0
    found: list[tuple[int, int]] = []
    for stage, kind, i in order:
        step = _STEP.get(kind) or {Kind.OFFLOAD: -1, Kind.RELOAD: 1}.get(kind, 0)
        if kind is Kind.RECOMPUTE:
            full, inputs = full + 1, inputs - 1
        elif (stage, i) in repeated and kind in (Kind.F, Kind.OFFLOAD, Kind.RELOAD):
            inputs += step
        else:
            full += step
        found.append((full, inputs))
    return found
