"""Panels as one self-contained HTML page: zoom, hover, keyboard, light and dark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from stretto.program.action import ActionKind
from stretto.view import colours
from stretto.view.panel import NAMES, Panel, all_kinds, figures_table, highest_peak, shades, with_path
from stretto.view.panel_svg import left_of

if TYPE_CHECKING:
    from stretto.program.replay import Timeline

# the page may run its own script and style, but loads no other files
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def timeline_html(timeline: Timeline) -> str:
    """Return a page of one timeline."""
    return panels_html([with_path(timeline)], f"Schedule {timeline.program.name}", figures_table([timeline]))


def compare_html(timelines: Sequence[Timeline]) -> str:
    """Return a page of timelines stacked on one time axis, with a table of their figures."""
    title = "Schedules " + ", ".join(timeline.program.name for timeline in timelines)
    return panels_html([with_path(timeline) for timeline in timelines], title, figures_table(timelines))


def panels_html(
    panels: Sequence[Panel],
    title: str,
    table: Sequence[Sequence[str]] = (),
    above: str = "",
    more: str = "",
) -> str:
    """Return a page of panels; the table's first row is its header.

    Args:
        above: HTML before the panels.
        more: name of the files with additional style and script, such as "page_plan".
    """
    kinds, chunks = all_kinds(panels), max(panel.chunks for panel in panels)
    drawn = {
        "end": max(panel.end for panel in panels) or 1.0,
        "left": left_of(panels),
        "held": highest_peak(panels),
        "kinds": [
            {
                "kind": kind,
                "name": NAMES[kind],
                "shades": [
                    {"fill": colours.hexed(colour), "ink": colours.text_on(colour)}
                    for colour in (colours.of_kind(kind, i, chunks) for i in range(chunks))
                ],
            }
            for kind in kinds
        ],
        "panels": [_panel(panel, kinds) for panel in panels],
    }
    parts = {
        "title": escape(title),
        "above": above,
        "legend": _legend(panels),
        "table": table_html(table),
        "data": script_json(drawn),
    }
    scripts = ["page.js", "page_input.js", "page_table.js", *([f"{more}.js"] if more else [])]
    return _page(title, _filled("page_timeline.html", parts), more, "".join(map(_file, scripts)))


def plain_html(title: str, body: str, more: str = "") -> str:
    """Return a page of a title and HTML, whose tables sort by a click on a column's name.

    Args:
        more: name of the files with additional style, such as "page_compare", and script if it exists.
    """
    main = f'<main>\n<h1 class="unseen">{escape(title)}</h1>\n{body}\n</main>\n'
    script = _file(f"{more}.js") if more and (files("stretto.view") / f"{more}.js").is_file() else ""
    return _page(title, main, more, f'"use strict";\n{_file("page_table.js")}{script}')


def _page(title: str, body: str, more: str, script: str) -> str:
    """Return a self-contained page with this body."""
    parts = {
        "title": escape(title),
        "policy": _POLICY,
        "css": _file("page.css") + (_file(f"{more}.css") if more else ""),
        "body": body,
        "js": script,
    }
    return _filled("page.html", parts)


def _filled(name: str, parts: Mapping[str, str]) -> str:
    """Fill a template with its parts, in one pass, so that inserted text is not substituted again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file(name))


@cache
def _file(name: str) -> str:
    return (files("stretto.view") / name).read_text(encoding="utf-8")


def script_json(data: Any) -> str:
    """Return data as JSON that is safe in a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _panel(panel: Panel, kinds: list[ActionKind]) -> dict[str, Any]:
    """Return the data of a panel as columns, which are compact for large timelines."""
    blocks = panel.blocks
    data: dict[str, Any] = {
        "title": panel.title,
        "line": panel.line,
        "rows": [row.label for row in panel.rows],
        "last": panel.end,
        "unit": panel.unit,
        "chunks": panel.chunks,
        "tracks": panel.tracks,
        "held": [row.curve for row in panel.rows],
        "row": [block.row for block in blocks],
        "start": [_rounded(block.start) for block in blocks],
        "end": [_rounded(block.end) for block in blocks],
        "kind": [kinds.index(block.kind) for block in blocks],
        "stage": [block.stage for block in blocks],
        "microbatch": [block.action.microbatch for block in blocks],
        "shade": [block.chunk for block in blocks],
    }
    if panel.window is not None:
        data["window"] = asdict(panel.window)
    if panel.path:
        data["path"] = [panel.path.get(block.action, "") for block in blocks]
    if any(block.lanes > 1 for block in blocks):
        data["lane"] = [block.lane for block in blocks]
        data["lanes"] = [block.lanes for block in blocks]
    return data


def _rounded(time: float) -> float:
    """Return the time rounded to 10 digits, without those of rounding error."""
    return float(f"{time:.10g}")


def _legend(panels: Sequence[Panel]) -> str:
    chunks = max(panel.chunks for panel in panels)
    items: list[str] = []
    for kind in all_kinds(panels):
        shown = range(chunks) if chunks <= 4 else (0, chunks - 1)
        swatches = "".join(
            f'<i style="background:{colours.hexed(colours.of_kind(kind, i, chunks))}"></i>' for i in shown
        )
        items.append(f"<li>{swatches} {kind} {NAMES[kind]}</li>")
    if note := shades(panels):
        items.append(f'<li class="quiet">({note})</li>')
    items.append('<li><i class="bubble"></i> bubble</li>')
    if highest_peak(panels):
        items.append('<li><i class="held"></i> activations held</li>')
    if any(panel.window for panel in panels):
        items.append('<li><i class="step"></i> end of a step</li>')
    items.append('<li><i class="needs"></i> waits for</li>')
    items.append('<li><i class="feeds"></i> is waited for by</li>')
    if any(panel.path for panel in panels):
        items.append(
            '<li><label><input id="path" type="checkbox"> <i class="path"></i> critical path</label></li>'
        )
    return "\n".join(items)


def table_html(rows: Sequence[Sequence[str]], caption: str = "Figures") -> str:
    """Return a table whose first row is its header; pages of this module sort it by any column."""
    if not rows:
        return ""
    kinds = list[str]()  # a column is text unless every cell begins with a number
    for column in range(len(rows[0])):
        numbers = all(re.match(r"[-+]?\d|$", row[column]) for row in rows[1:])
        kinds.append("" if numbers else ' class="text"')
    head = "".join(
        f'<th scope="col"{kind}>{escape(cell)}</th>' for kind, cell in zip(kinds, rows[0], strict=True)
    )
    lines = list[str]()
    for name, *values in rows[1:]:
        cells = (f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds[1:], values, strict=True))
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    body = "\n".join(lines)
    return (
        f'<div class="wide"><table>\n<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )
