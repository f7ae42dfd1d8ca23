"""What a picture of a layout says about one rank, and in which rows ranks stand."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.layout import Layout

LETTERS = {"pp": "p", "tp": "t", "cp": "c", "ep": "e", "dp": "d"}
WORDS = {"pp": "stage", "tp": "shard", "cp": "context part", "ep": "expert part", "dp": "replica"}


@dataclass(frozen=True)
class Cell:
    """One rank: its number, its pipeline stage, and its place in letters, as in "p3 t1 d0"."""

    rank: int
    stage: int
    place: str


def shown_axes(layout: Layout) -> list[str]:
    """The axes that tell ranks apart, the pipeline first."""
    return [axis for axis in LETTERS if layout.sizes[axis] > 1]


def cell(layout: Layout, rank: int) -> Cell:
    """What to show of `rank`."""
    at = layout.coordinates(rank)
    if layout.ep > 1:
        at["ep"] = layout.expert_grid.coordinates(rank)["ep"]
    place = " ".join(f"{LETTERS[axis]}{at[axis]}" for axis in shown_axes(layout))
    return Cell(rank, at["pp"], place)


def legend(layout: Layout) -> str:
    """What the letters mean: "p stage, t shard, d replica"."""
    return ", ".join(f"{LETTERS[axis]} {WORDS[axis]}" for axis in shown_axes(layout))


def nodes(layout: Layout, ranks_per_node: int) -> list[range]:
    """The ranks of each node."""
    end = layout.offset + layout.world
    return [
        range(first, min(first + ranks_per_node, end)) for first in range(layout.offset, end, ranks_per_node)
    ]


def some(rows: list[range], most: int) -> tuple[list[tuple[int, range]], int]:
    """At most `most` numbered rows, the last one among them, and how many were left out before it."""
    numbered = list(enumerate(rows))
    if len(rows) <= most:
        return numbered, 0
    return [*numbered[: most - 1], numbered[-1]], len(rows) - most
