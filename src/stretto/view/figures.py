"""The figures by which timelines are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stretto.view.held import held, peak

if TYPE_CHECKING:
    from stretto.program.replay import Timeline

HEAD = ("schedule", "makespan", "bubble rate", "peak activations", "transfers")


def figures(timeline: Timeline) -> dict[str, Any]:
    """Makespan in the unit of the costs, bubble rate as a part of it, the most activations that a rank holds
    in rank units, and messages between ranks.
    """
    return {
        "name": timeline.program.name,
        "makespan": timeline.makespan,
        "bubble_rate": timeline.bubble.rate,
        "peak_activations": max(map(peak, held(timeline)), default=0.0),
        "transfers": timeline.transfers,
    }


def figures_table(timelines: Sequence[Timeline]) -> list[tuple[str, ...]]:
    """A head and a row a timeline, as text."""
    rows: list[tuple[str, ...]] = [HEAD]
    for found in map(figures, timelines):
        rows.append(
            (
                found["name"],
                f"{found['makespan']:g}",
                f"{found['bubble_rate']:.1%}",
                f"{found['peak_activations']:.4g}",
                f"{found['transfers']}",
            )
        )
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns, the first column to the left, numbers to the right."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for first, *rest in rows:
        cells = [first.ljust(wide[0]), *(c.rjust(w) for c, w in zip(rest, wide[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
