"""The number of activations that a program makes each rank hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat

from stretto.program.action import MEMORY_SAVING, Action, ActionKind
from stretto.program.program import Program

# held from the forward until the weight gradient is computed: I alone frees nothing
_STEP = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.W: -1}


def peak_held(program: Program) -> list[int]:
    """Return per rank the peak number of (stage, microbatch) pairs whose activations it holds.

    A pair is held from its F to its B or W, but with `RECOMPUTE` only from there on, since its forward saves
    only the input (`peak_inputs`). While it is offloaded it is not held.
    """
    return [max(holdings(program, rank), default=(0, 0))[0] for rank in range(program.ranks)]


def peak_inputs(program: Program) -> list[int]:
    """Return per rank the peak number of (stage, microbatch) pairs of which it holds only the input: from F
    to `RECOMPUTE`, except while it is offloaded. 0 if nothing is recomputed.
    """
    return [
        max((inputs for _, inputs in holdings(program, rank)), default=0) for rank in range(program.ranks)
    ]


def peak_activations(program: Program) -> list[float]:
    """Return `peak_held` in rank units: one microbatch through the rank's stages of one copy counts 1."""
    chunks = [program.placement.count(rank) / program.copies for rank in range(program.ranks)]
    return [peak / (count or 1) for peak, count in zip(peak_held(program), chunks, strict=True)]


def holdings(program: Program, rank: int) -> list[tuple[int, int]]:
    """Return the number of (stage, microbatch) pairs that the rank holds after each action: with all
    activations, and with only the input.

    In a forward-only program activations are freed when the forward ends, so the counts are those during each
    action.
    """
    order = program.orders[rank]
    if not program.trains:
        return [(int(action.kind is ActionKind.F), 0) for action in order]
    if not MEMORY_SAVING.isdisjoint({kind for _, kind, _ in order}):
        return _with_recompute_or_offload(order)
    return list(zip(accumulate(_STEP.get(kind, 0) for _, kind, _ in order), repeat(0)))


def _with_recompute_or_offload(order: Sequence[Action]) -> list[tuple[int, int]]:
    """Return `holdings` of an order that recomputes or offloads activations."""
    repeated = {(a.stage, a.microbatch) for a in order if a.kind is ActionKind.RECOMPUTE}
    full = inputs = 0
    counts: list[tuple[int, int]] = []
    for stage, kind, i in order:
        step = _STEP.get(kind) or {ActionKind.OFFLOAD: -1, ActionKind.RELOAD: 1}.get(kind, 0)
        if kind is ActionKind.RECOMPUTE:
            full, inputs = full + 1, inputs - 1
        elif (stage, i) in repeated and kind in (ActionKind.F, ActionKind.OFFLOAD, ActionKind.RELOAD):
            inputs += step
        else:
            full += step
        counts.append((full, inputs))
    return counts
