"""What a picture shows, before it is known how it is drawn: rows of blocks over one time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stretto.program.action import Action, Kind
from stretto.view.blocks import NAMES, Block, blocks, chunks, headline
from stretto.view.held import Curve, held, peak

if TYPE_CHECKING:
    from stretto.program.replay import Timeline


@dataclass(frozen=True)
class Row:
    """A row's label, and what its rank holds over time; an empty curve is not drawn."""

    label: str
    curve: Curve = ()


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One timeline: its title and line of figures, its rows, and its blocks by row and start."""

    title: str
    line: str
    rows: tuple[Row, ...]
    blocks: tuple[Block, ...]
    end: float
    chunks: int  # shades of a kind
    copies: int = 1
    unit: str = ""  # of time; none for that of the costs
    tracks: int = 1  # rows of a rank, each with all of the rank's actions
    path: Mapping[Action, str] = field(default_factory=dict[Action, str])  # critical: what held each up

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that occur, in the order of a legend."""
        found = {block.kind for block in self.blocks}
        return [kind for kind in NAMES if kind in found]


def panel(timeline: Timeline) -> Panel:
    """A replayed program's panel: a row a rank."""
    program = timeline.program
    rows = [Row(f"rank {rank}", curve) for rank, curve in enumerate(held(timeline))]
    drawn = blocks(timeline)
    return Panel(
        title=program.name,
        line=headline(timeline),
        rows=tuple(rows),
        blocks=tuple(drawn),
        end=timeline.makespan,
        chunks=chunks(program),
        copies=program.copies,
    )


def with_path(timeline: Timeline) -> Panel:
    """The same with its critical path."""
    path: dict[Action, str] = {cause.event.action: cause.reason for cause in timeline.critical_path}
    return replace(panel(timeline), path=path)


def most_held(panels: Sequence[Panel]) -> float:
    """The top of the memory curves' common scale."""
    return max((peak(row.curve) for panel in panels for row in panel.rows), default=0.0)


def all_kinds(panels: Sequence[Panel]) -> list[Kind]:
    """The kinds that occur in any of them."""
    found = {kind for panel in panels for kind in panel.kinds}
    return [kind for kind in NAMES if kind in found]


def shades(panels: Sequence[Panel]) -> str:
    """What the shades of a kind mean, "" where there is one only."""
    if all(panel.chunks == 1 for panel in panels):
        return ""
    copied = any(panel.copies > 1 for panel in panels)
    chunked = any(panel.chunks > panel.copies for panel in panels)
    return "lighter: later " + " or ".join(["chunk"] * chunked + ["copy of the weights"] * copied)
