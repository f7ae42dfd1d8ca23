"""A timeline as blocks to draw, the same for every kind of picture."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log10
from typing import TYPE_CHECKING

from stretto.schedule.action import Kind
from stretto.schedule.program import Program

if TYPE_CHECKING:
    from stretto.simulate import Timeline

NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.UPDATE: "update",
}


@dataclass(frozen=True)
class Block:
    """One drawn action; `chunk` counts the stages of its rank, `label` is the microbatch."""

    rank: int
    start: float
    end: float
    kind: Kind
    stage: int
    chunk: int
    label: str


def blocks(timeline: Timeline) -> list[Block]:
    """The actions that take time on their rank, communications left out."""
    program = timeline.program
    chunk = {stage: at for rank in range(program.ranks) for at, stage in enumerate(program.stages_of(rank))}
    found = list[Block]()
    for event in timeline.events:
        stage, kind, microbatch = event.action
        if kind in NAMES and event.end > event.start:
            label = "" if microbatch is None else str(microbatch)
            found.append(Block(event.rank, event.start, event.end, kind, stage, chunk[stage], label))
    return found


def chunks(program: Program) -> int:
    """The most stages that a rank holds."""
    return max(len(program.stages_of(rank)) for rank in range(program.ranks))


def headline(timeline: Timeline) -> str:
    """One line of figures under a picture's title."""
    program = timeline.program
    held = f", {chunks(program)} chunks" if chunks(program) > 1 else ""
    return (
        f"{count(program.ranks, 'rank')}{held}, {count(program.microbatches, 'microbatch', 'es')}: "
        f"makespan {timeline.makespan:g}, bubble rate {timeline.bubble.rate:.1%}"
    )


def count(number: int, noun: str, plural: str = "s") -> str:
    """ "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def ticks(end: float, most: int) -> list[float]:
    """Round times from 0 to `end`, at most `most` + 1 of them: steps of 1, 2 or 5 times a power of ten."""
    if end <= 0 or most < 1:
        return [0.0]
    base = 10.0 ** floor(log10(end / most))
    step = next(base * factor for factor in (1, 2, 5, 10, 20) if end / (base * factor) <= most)
    return [step * at for at in range(floor(end / step + 1e-9) + 1)]
