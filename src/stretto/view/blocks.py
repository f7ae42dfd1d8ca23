"""A timeline as blocks to draw, the same for every kind of picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, log10
from typing import TYPE_CHECKING

from stretto.program.action import Action, Kind
from stretto.program.program import Program

if TYPE_CHECKING:
    from stretto.program.replay import Timeline

NAMES = {
    Kind.F: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.UPDATE: "update",
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """One drawn action: `label` is the microbatch, `chunk` counts the stages of its rank.

    Where several run at once, as in an overlapped pair, a block has the part `lane` of `lanes` of its row's
    height. An update that takes no time is a block without width: a mark.
    """

    row: int
    start: float
    end: float
    action: Action
    chunk: int = 0
    paired: bool = False  # one of an overlapped pair
    lane: int = 0
    lanes: int = 1

    @property
    def kind(self) -> Kind:
        return self.action.kind

    @property
    def stage(self) -> int:
        return self.action.stage

    @property
    def label(self) -> str:
        return "" if self.action.microbatch is None else str(self.action.microbatch)

    @property
    def is_mark(self) -> bool:
        return self.end <= self.start


def blocks(timeline: Timeline) -> list[Block]:
    """The actions that take time on their rank, and updates; communications are left out."""
    program = timeline.program
    chunk = chunk_of(program)
    paired = {action for pair in program.pairs for action in pair}
    found = [
        Block(
            row=e.rank,
            start=e.start,
            end=e.end,
            action=e.action,
            chunk=chunk[e.action.stage],
            paired=e.action in paired,
        )
        for e in (*timeline.events, *timeline.tail)
        if e.action.kind in NAMES and (e.end > e.start or e.action.kind is Kind.UPDATE)
    ]
    return stacked(found)


def stacked(found: Sequence[Block]) -> list[Block]:
    """The same blocks row after row by start, those that overlap in time one above the other."""
    done: list[Block] = []
    group: list[Block] = []
    until = 0.0
    for block in sorted(found, key=lambda b: (b.row, b.start, b.end)):
        slack = 1e-9 * (abs(until) + 1e-9)  # sums of floats: neighbours that touch are no overlap
        if group and block.row == group[0].row and block.start < until - slack:
            group.append(block)
            until = max(until, block.end)
        else:
            done += _lanes(group)
            group, until = [block], block.end
    return done + _lanes(group)


def _lanes(group: list[Block]) -> list[Block]:
    """Give each of a group of overlapping blocks the first lane that is free."""
    if len(group) < 2 or all(block.is_mark for block in group):
        return group
    free: list[float] = []
    placed: list[tuple[Block, int]] = []
    for block in group:
        lane = next((at for at, end in enumerate(free) if end <= block.start), len(free))
        free[lane : lane + 1] = [block.end]
        placed.append((block, lane))
    return [replace(block, lane=lane, lanes=len(free)) for block, lane in placed]


def chunk_of(program: Program) -> list[int]:
    """For each stage, how many stages come before it on its rank."""
    seen = [0] * program.ranks
    found: list[int] = []
    for rank in program.placement:
        found.append(seen[rank])
        seen[rank] += 1
    return found


def chunks(program: Program) -> int:
    """The most stages that a rank holds."""
    return max(len(program.stages_of(rank)) for rank in range(program.ranks))


def headline(timeline: Timeline) -> str:
    """One line of figures under a picture's title."""
    program = timeline.program
    each = chunks(program) // program.copies
    held = f", {each} chunks" if each > 1 else ""
    copies = f", {program.copies} copies of the weights" if program.copies > 1 else ""
    return (
        f"{count(program.ranks, 'rank')}{held}{copies}, {count(program.microbatches, 'microbatch', 'es')}: "
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
