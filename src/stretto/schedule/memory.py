"""How many activations a program makes each rank hold."""

from __future__ import annotations

from stretto.schedule.action import Kind
from stretto.schedule.program import Program

# held from the forward until the weight gradient is there: I alone frees nothing
_STEP = {Kind.F: 1, Kind.B: -1, Kind.W: -1}


def peak_held(program: Program) -> list[int]:
    """Per rank, the most (stage, microbatch) pairs whose activations it holds at once."""
    if not program.trains:
        return [min(1, len(order)) for order in program.orders]
    peaks: list[int] = []
    for order in program.orders:
        held = peak = 0
        for action in order:
            held += _STEP.get(action.kind, 0)
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def peak_activations(program: Program) -> list[float]:
    """The same in rank units: one microbatch through all stages of the rank counts 1."""
    chunks = [program.placement.count(rank) for rank in range(program.ranks)]
    return [held / max(1, count) for held, count in zip(peak_held(program), chunks, strict=True)]
