"""Objects in a notebook: SVG pictures, and tables as plain HTML."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.layout import Layout
    from stretto.planner.estimate import Estimate
    from stretto.planner.search.ranking import Plan
    from stretto.program import Program
    from stretto.program.replay import Timeline

_MOST_ACTIONS = 8_000  # of a picture, which is saved in the notebook: 0.6 MB as SVG


def layout_svg(layout: Layout) -> str:
    """Draw the ranks as a grid, in nodes of 8."""
    from stretto.view.grid import grid_svg

    return grid_svg(layout)


def layout_html(layout: Layout) -> str:
    """Draw the ranks as a grid, in nodes of 8."""
    return _image(layout_svg(layout), f"Layout {layout}: {layout.world} ranks")


def timeline_svg(timeline: Timeline) -> str | None:
    """Draw the timeline; None if it is too large for a notebook's file, which then shows its text."""
    from stretto.view import panel_svg

    small = sum(map(len, timeline.program.orders)) <= _MOST_ACTIONS
    return panel_svg.timeline_svg(timeline) if small else None


def timeline_html(timeline: Timeline) -> str | None:
    """Draw the timeline; None if it is too large for a notebook's file."""
    from stretto.view.panel import headline

    svg = timeline_svg(timeline)
    about = f"Pipeline timeline of {timeline.program.name}: {headline(timeline)}"
    return None if svg is None else _image(svg, about)


def program_svg(program: Program) -> str | None:
    """Draw the program replayed at F = I = W = 1; None if it deadlocks or is too large."""
    timeline = _replay(program)
    return None if timeline is None else timeline_svg(timeline)


def program_html(program: Program) -> str | None:
    """Draw the program replayed at F = I = W = 1; None if it deadlocks or is too large."""
    timeline = _replay(program)
    return None if timeline is None else timeline_html(timeline)


def _replay(program: Program) -> Timeline | None:
    from stretto.errors import StrettoError
    from stretto.program.replay import simulate

    try:
        return simulate(program)
    except StrettoError:
        return None


def _image(svg: str, about: str) -> str:
    """Return a picture as an image in its own width, which scrolls, with a description for screen readers."""
    # as an image: the styles of a picture inside the page would apply to all of it
    source = b64encode(svg.encode()).decode()
    return (
        '<div style="overflow-x: auto">'
        f'<img alt="{escape(about)}" style="max-width: none" src="data:image/svg+xml;base64,{source}"></div>'
    )


def estimate_html(estimate: Estimate) -> str:
    """Return the figures of a prediction, and where the time of its step goes."""
    from stretto.view.plan_texts import GIB, mfu_text, uncertainty_text

    rows = [
        ("", "predicted", "interval"),
        ("step, s", f"{estimate.seconds:.4g}", f"{estimate.low:.3g} to {estimate.high:.3g}"),
        ("uncertain by", uncertainty_text(estimate.widths), ""),
        ("tokens/s", f"{estimate.tokens_per_s:,.0f}", ""),
        ("TFLOP/s a device", f"{estimate.tflops_per_gpu:.3g}", ""),
        ("MFU", mfu_text(estimate.mfu), ""),
        ("bubble", f"{estimate.bubble:.1%}", ""),
    ]
    if (fit := estimate.memory) is not None:
        capacity = "" if fit.capacity == inf else f" of {fit.capacity / GIB:.1f}"
        interval = f"{fit.device.low / GIB:.1f} to {fit.device.high / GIB:.1f}"
        rows.append(("memory, GiB", f"{fit.device.mid / GIB:.1f}{capacity}", interval))
        rows.append(("verdict", fit.verdict, ""))
    parts = [("where the time goes", "s", "share")]
    for name, seconds in sorted(estimate.parts.items(), key=lambda part: -part[1]):
        if seconds >= 0.0005 * estimate.seconds:
            parts.append((name, f"{seconds:.3g}", f"{seconds / estimate.seconds:.1%}"))
    job = estimate.job
    caption = f"{job.layout} on {job.layout.world} x {estimate.cluster.device.name}, {job.schedule_name}"
    return _table(rows, caption) + _table(parts, "A step of the busiest pipeline rank")


def plan_html(plan: Plan) -> str:
    """Return the ranking of a search, or what was nearest to fitting."""
    from stretto.view.plan_texts import GIB, mfu_text, search_text

    ranking = plan.ranking or ([plan.nearest] if plan.nearest else [])
    head = "", "layout", "step s", "interval", "tokens/s", "MFU", "bubble", "memory GiB", "verdict", "why"
    rows: list[tuple[str, ...]] = [head]
    for rank, ranked in enumerate(ranking, 1):
        estimate, fit = ranked.estimate, ranked.estimate.memory
        rows.append(
            (
                str(rank),
                ranked.layout,
                f"{estimate.seconds:.4g}",
                f"{estimate.low:.3g} to {estimate.high:.3g}",
                f"{estimate.tokens_per_s:,.0f}",
                mfu_text(estimate.mfu),
                f"{estimate.bubble:.1%}",
                *(("", "") if fit is None else (f"{fit.device.mid / GIB:.1f}", fit.verdict)),
                ranked.reason,
            )
        )
    outcome = "" if plan.ranking else "Nothing fits; nearest: " if plan.complete else "Cut short: "
    return _table(rows, f"{outcome}{search_text(plan)}")


def _table(rows: Sequence[Sequence[str]], caption: str) -> str:
    """Return a table whose first row, and the first cell of each, are headers."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    lines = [
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows[1:]
    ]
    top = f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
    return f"<table>{top}<tbody>{''.join(lines)}</tbody></table>"
