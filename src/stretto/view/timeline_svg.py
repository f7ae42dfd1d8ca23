"""Timelines as SVG pictures, drawn as papers draw them: a row a rank, blocks numbered by microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stretto.view.blocks import headline
from stretto.view.figures import figures_table
from stretto.view.panel import panel
from stretto.view.panel_svg import panels_svg

if TYPE_CHECKING:
    from stretto.simulate import Timeline


def timeline_svg(timeline: Timeline) -> str:
    """The timeline with rank labels, what each rank holds, time axis, legend and its figures."""
    about = f"Pipeline timeline of schedule {timeline.program.name}: {headline(timeline)}."
    return panels_svg([panel(timeline)], about)


def compare_svg(timelines: Sequence[Timeline]) -> str:
    """The timelines one under another on one time axis, and a table of their figures."""
    about = "Pipeline timelines on one time axis. " + " ".join(
        f"{timeline.program.name}: {headline(timeline)}." for timeline in timelines
    )
    return panels_svg([panel(timeline) for timeline in timelines], about, figures_table(timelines))
