"""The content of timeline pictures: blocks, curves of live activations, panels, figures.

A panel is one timeline: rows of blocks over a time axis. SVG, HTML and terminal pictures draw panels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import floor, log10
from typing import Any

from stretto.program.action import Action, ActionKind
from stretto.program.program import Program
from stretto.program.replay import Costs, Timeline
from stretto.program.replay.timeline import live_bytes

NAMES = {
    ActionKind.F: "forward",
    ActionKind.RECOMPUTE: "recompute",
    ActionKind.B: "backward",
    ActionKind.I: "input gradient",
    ActionKind.W: "weight gradient",
    ActionKind.UPDATE: "update",
}


@dataclass(frozen=True, kw_only=True)
class TimelineBlock:
    """One drawn action. An update of zero duration is a block without width, a mark.

    Attributes:
        chunk: number of stages before this one on its rank.
        paired: True if it is one of an overlapped pair.
        lane, lanes: its lane, and the number of lanes of blocks that run at the same time.
    """

    row: int
    start: float
    end: float
    action: Action
    chunk: int = 0
    paired: bool = False
    lane: int = 0
    lanes: int = 1

    @property
    def kind(self) -> ActionKind:
        return self.action.kind

    @property
    def stage(self) -> int:
        return self.action.stage

    @property
    def label(self) -> str:
        """The microbatch as text; "" for an action without one."""
        return "" if self.action.microbatch is None else str(self.action.microbatch)

    @property
    def is_mark(self) -> bool:
        return self.end <= self.start


def blocks(timeline: Timeline) -> list[TimelineBlock]:
    """Return the actions of computation that take time, and updates."""
    program = timeline.program
    chunk = chunk_of(program)
    paired = {action for pair in program.pairs for action in pair}
    drawn = [
        TimelineBlock(
            row=event.rank,
            start=event.start,
            end=event.end,
            action=event.action,
            chunk=chunk[event.action.stage],
            paired=event.action in paired,
        )
        for event in (*timeline.events, *timeline.tail)
        if event.action.kind in NAMES and (event.end > event.start or event.action.kind is ActionKind.UPDATE)
    ]
    return stacked(drawn)


def stacked(drawn: Sequence[TimelineBlock]) -> list[TimelineBlock]:
    """Return the blocks sorted by row and start, with lanes for those that overlap in time."""
    done: list[TimelineBlock] = []
    group: list[TimelineBlock] = []
    until = 0.0
    for block in sorted(drawn, key=lambda block: (block.row, block.start, block.end)):
        slack = 1e-9 * (abs(until) + 1e-9)  # rounding: blocks that touch do not overlap
        if group and block.row == group[0].row and block.start < until - slack:
            group.append(block)
            until = max(until, block.end)
        else:
            done += _lanes(group)
            group, until = [block], block.end
    return done + _lanes(group)


def _lanes(group: list[TimelineBlock]) -> list[TimelineBlock]:
    """Assign the first free lane to each of a group of overlapping blocks."""
    if len(group) < 2 or all(block.is_mark for block in group):
        return group
    free: list[float] = []
    placed: list[tuple[TimelineBlock, int]] = []
    for block in group:
        lane = next((lane for lane, end in enumerate(free) if end <= block.start), len(free))
        free[lane : lane + 1] = [block.end]
        placed.append((block, lane))
    return [replace(block, lane=lane, lanes=len(free)) for block, lane in placed]


def chunk_of(program: Program) -> list[int]:
    """Return for each stage the number of stages before it on its rank."""
    counts = [0] * program.ranks
    chunks_before: list[int] = []
    for rank in program.placement:
        chunks_before.append(counts[rank])
        counts[rank] += 1
    return chunks_before


def chunks(program: Program) -> int:
    """Return the largest number of stages on a rank."""
    return max(len(program.stages_of(rank)) for rank in range(program.ranks))


def headline(timeline: Timeline) -> str:
    """Return the line of figures under a picture's title, with a note if all costs are 1."""
    program = timeline.program
    each = chunks(program) // program.copies
    per_rank = f", {each} chunks" if each > 1 else ""
    copies = f", {program.copies} copies of the weights" if program.copies > 1 else ""
    unit = " at F = I = W = 1" if timeline.costs == Costs() else ""
    steps = f" in {program.steps} steps" if program.steps > 1 else ""
    work = count(program.microbatches, "microbatch", "es") + steps
    return (
        f"{count(program.ranks, 'rank')}{per_rank}{copies}, {work}: "
        f"makespan {timeline.makespan:g}, bubble {timeline.bubble.rate:.1%}{unit}"
    )


def count(number: int, noun: str, plural: str = "s") -> str:
    """Return the number with its noun: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def ticks(end: float, limit: int) -> list[float]:
    """Return round times from 0 to `end`, in at most `limit` steps of 1, 2 or 5 times a power of ten."""
    if end <= 0 or limit < 1:
        return [0.0]
    base = 10.0 ** floor(log10(end / limit))
    step = next(base * factor for factor in (1, 2, 5, 10, 20) if end / (base * factor) <= limit)
    return [step * i for i in range(floor(end / step + 1e-9) + 1)]


Curve = tuple[tuple[float, float], ...]  # (time, live activations from then on), in ascending times


def activation_curves(timeline: Timeline) -> list[Curve]:
    """Return the live activations of each rank over time, in rank units: 1 is a microbatch in all its stages.

    Activations are live from the start of their F to the end of their B or W; with recomputation from the
    start of RECOMPUTE; offloaded ones are not live from the end of OFFLOAD to the start of RELOAD. In a
    program without training they are live until the end of the forward.
    """
    program = timeline.program
    # a microbatch runs through only one copy of the weights
    share = [program.copies / max(1, program.placement.count(rank)) for rank in range(program.ranks)]
    curves = live_bytes(program, Costs(), timeline.starts, timeline.ends)
    completed = list[Curve]()  # from 0 to the end, with one value per time, the last
    for curve, unit in zip(curves, share, strict=True):
        points = {0.0: 0.0} | {time: value * unit for time, value in curve}
        if (last := max(points)) < timeline.makespan:
            points[timeline.makespan] = points[last]
        completed.append(tuple(points.items()))
    return completed


def peak(curve: Curve) -> float:
    """Return the curve's maximum."""
    return max((value for _, value in curve), default=0.0)


@dataclass(frozen=True)
class PanelRow:
    """Label of a row, and the live activations of its rank over time; an empty curve is not drawn."""

    label: str
    curve: Curve = ()


@dataclass(frozen=True)
class Phase:
    """A named part of the time axis."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Window:
    """Several training steps of a pipeline that is not drained between them.

    Attributes:
        ends: for each step but the last, its end on each rank.
        steps: the steps on the last rank.
        phases: fill, steady state and drain on the first rank. The steady state lasts from the first backward
            to the last forward; in it, every forward is paired with a backward.
    """

    ends: tuple[tuple[float, ...], ...]
    steps: tuple[Phase, ...]
    phases: tuple[Phase, ...]


def window(timeline: Timeline) -> Window | None:
    """Return the steps and phases of a program of several steps; None for a single step."""
    program = timeline.program
    if program.steps == 1:
        return None
    ends = [[0.0] * program.ranks for _ in range(program.steps)]
    for rank, action, _, end in timeline.events:
        if action.microbatch is not None and action.kind in NAMES and action.kind is not ActionKind.F:
            step = action.microbatch // program.step_microbatches
            ends[step][rank] = max(ends[step][rank], end)
    last, makespan = program.ranks - 1, timeline.makespan
    begins = [timeline.spans[last][0], *(step[last] for step in ends)]
    first = [event for event in timeline.events if event.rank == 0]
    back = min(event.start for event in first if event.action.kind in (ActionKind.B, ActionKind.I))
    filled = max(event.end for event in first if event.action.kind is ActionKind.F)
    phases = [Phase("fill", 0.0, min(back, filled)), Phase("drain", filled, makespan)]
    if back < filled:
        phases.insert(1, Phase("steady state", back, filled))
    return Window(
        ends=tuple(map(tuple, ends[:-1])),
        steps=tuple(Phase(f"step {n}", *span) for n, span in enumerate(pairwise(begins))),
        phases=tuple(phases),
    )


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One timeline: its title and line of figures, its rows, and its blocks by row and start.

    Attributes:
        chunks: number of shades per kind.
        unit: unit of time; "" for the unit of the costs.
        tracks: number of rows per rank, each with all actions of the rank.
        path: by action of the critical path, the reason for which it waited.
    """

    title: str
    line: str
    rows: tuple[PanelRow, ...]
    blocks: tuple[TimelineBlock, ...]
    end: float
    chunks: int
    copies: int = 1
    unit: str = ""
    tracks: int = 1
    path: Mapping[Action, str] = field(default_factory=dict[Action, str])
    window: Window | None = None

    @property
    def kinds(self) -> list[ActionKind]:
        """The kinds that occur, in the order of a legend."""
        present = {block.kind for block in self.blocks}
        return [kind for kind in NAMES if kind in present]


def panel(timeline: Timeline) -> Panel:
    """Return a replayed program's panel: one row per rank."""
    program = timeline.program
    rows = [PanelRow(f"rank {rank}", curve) for rank, curve in enumerate(activation_curves(timeline))]
    drawn = blocks(timeline)
    return Panel(
        title=program.name,
        line=headline(timeline),
        rows=tuple(rows),
        blocks=tuple(drawn),
        end=timeline.makespan,
        chunks=chunks(program),
        copies=program.copies,
        window=window(timeline),
    )


def with_path(timeline: Timeline) -> Panel:
    """Return a replayed program's panel with its critical path."""
    path: dict[Action, str] = {cause.event.action: cause.reason for cause in timeline.critical_path}
    return replace(panel(timeline), path=path)


def highest_peak(panels: Sequence[Panel]) -> float:
    """Return the maximum of all memory curves, the top of their common scale."""
    return max((peak(row.curve) for panel in panels for row in panel.rows), default=0.0)


def all_kinds(panels: Sequence[Panel]) -> list[ActionKind]:
    """Return the kinds that occur in any panel, in the order of a legend."""
    present = {kind for panel in panels for kind in panel.kinds}
    return [kind for kind in NAMES if kind in present]


def shades(panels: Sequence[Panel]) -> str:
    """Return the meaning of a kind's shades, or "" if it has only one."""
    if all(panel.chunks == 1 for panel in panels):
        return ""
    copied = any(panel.copies > 1 for panel in panels)
    chunked = any(panel.chunks > panel.copies for panel in panels)
    return "lighter: later " + " or ".join(["chunk"] * chunked + ["copy of the weights"] * copied)


HEAD = ("schedule", "makespan", "bubble", "peak activations", "transfers")


def figures(timeline: Timeline) -> dict[str, Any]:
    """Return the figures of a timeline.

    They are the makespan in the unit of the costs, the bubble as a share of it, the peak of live activations
    over all ranks in rank units, and the number of messages between ranks.
    """
    return {
        "name": timeline.program.name,
        "makespan": timeline.makespan,
        "bubble_rate": timeline.bubble.rate,
        "peak_activations": max(map(peak, activation_curves(timeline)), default=0.0),
        "transfers": timeline.transfers,
    }


def figures_table(timelines: Sequence[Timeline]) -> list[tuple[str, ...]]:
    """Return a header and one row per timeline, as text."""
    rows: list[tuple[str, ...]] = [HEAD]
    for timeline in map(figures, timelines):
        rows.append(
            (
                timeline["name"],
                f"{timeline['makespan']:g}",
                f"{timeline['bubble_rate']:.1%}",
                f"{timeline['peak_activations']:.4g}",
                f"{timeline['transfers']}",
            )
        )
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text in columns, the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for name, *values in rows:
        cells = [name.ljust(widths[0]), *map(str.rjust, values, widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
