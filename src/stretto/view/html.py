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
from stretto.view.kind_colours import of_kind
from stretto.view.panel import NAMES, Panel, all_kinds, figures_table, most_held, shades, with_path
from stretto.view.panel_svg import left_of

if TYPE_CHECKING:
    from stretto.program.replay import Timeline

# the page may run its own script and style, and load nothing
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def timeline_html(timeline: Timeline) -> str:
    """A page of one timeline."""
    return panels_html([with_path(timeline)], f"Schedule {timeline.program.name}", figures_table([timeline]))


def compare_html(timelines: Sequence[Timeline]) -> str:
    """A page of timelines stacked on one time axis, with a table of their figures."""
    title = "Schedules " + ", ".join(timeline.program.name for timeline in timelines)
    return panels_html([with_path(each) for each in timelines], title, figures_table(timelines))


def panels_html(
    panels: Sequence[Panel],
    title: str,
    table: Sequence[Sequence[str]] = (),
    above: str = "",
    more: str = "",
) -> str:
    """A page of any panels; the table's first row is its header.

    Args:
        above: HTML to put before the panels.
        more: name of the files with further style and script, such as "page_plan".
    """
    facts = json.dumps(_data(panels), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": escape(title),
        "above": above,
        "legend": _legend(panels),
        "table": table_html(table),
        "data": facts,
    }
    scripts = ["page.js", "page_input.js", "page_table.js", *([f"{more}.js"] if more else [])]
    return _page(title, _filled("page_timeline.html", parts), more, "".join(map(_file, scripts)))


def plain_html(title: str, body: str, more: str = "") -> str:
    """A page of a title and HTML, whose tables sort by a click on a column's name.

    Args:
        more: name of the files with further style, such as "page_compare", and script, if there is one.
    """
    whole = f'<main>\n<h1 class="unseen">{escape(title)}</h1>\n{body}\n</main>\n'
    script = _file(f"{more}.js") if more and (files("stretto.view") / f"{more}.js").is_file() else ""
    return _page(title, whole, more, f'"use strict";\n{_file("page_table.js")}{script}')


def _page(title: str, body: str, more: str, script: str) -> str:
    """A self-contained page with this body."""
    parts = {
        "title": escape(title),
        "policy": _POLICY,
        "css": _file("page.css") + (_file(f"{more}.css") if more else ""),
        "body": body,
        "js": script,
    }
    return _filled("page.html", parts)


def _filled(name: str, parts: Mapping[str, str]) -> str:
    """A template with its parts, in one pass, so that inserted text is never substituted again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file(name))


@cache
def _file(name: str) -> str:
    return (files("stretto.view") / name).read_text(encoding="utf-8")


def _data(panels: Sequence[Panel]) -> dict[str, Any]:
    """The data that the page's script draws, as columns, so that large timelines stay small."""
    kinds, chunks = all_kinds(panels), max(panel.chunks for panel in panels)
    return {
        "end": max(panel.end for panel in panels) or 1.0,
        "left": left_of(panels),
        "held": most_held(panels),
        "kinds": [
            {"kind": kind, "name": NAMES[kind], "shades": [_shade(kind, at, chunks) for at in range(chunks)]}
            for kind in kinds
        ],
        "panels": [_panel(panel, kinds) for panel in panels],
    }


def _shade(kind: ActionKind, chunk: int, chunks: int) -> dict[str, str]:
    colour = of_kind(kind, chunk, chunks)
    return {"fill": colours.hexed(colour), "ink": colours.text_on(colour)}


def _panel(panel: Panel, kinds: list[ActionKind]) -> dict[str, Any]:
    drawn = panel.blocks
    data: dict[str, Any] = {
        "title": panel.title,
        "line": panel.line,
        "rows": [row.label for row in panel.rows],
        "last": panel.end,
        "unit": panel.unit,
        "chunks": panel.chunks,
        "tracks": panel.tracks,
        "held": [row.curve for row in panel.rows],
        "row": [block.row for block in drawn],
        "start": [_short(block.start) for block in drawn],
        "end": [_short(block.end) for block in drawn],
        "kind": [kinds.index(block.kind) for block in drawn],
        "stage": [block.stage for block in drawn],
        "microbatch": [block.action.microbatch for block in drawn],
        "shade": [block.chunk for block in drawn],
    }
    if panel.window is not None:
        data["window"] = asdict(panel.window)
    if panel.path:
        data["path"] = [panel.path.get(block.action, "") for block in drawn]
    if any(block.lanes > 1 for block in drawn):
        data["lane"] = [block.lane for block in drawn]
        data["lanes"] = [block.lanes for block in drawn]
    return data


def _short(time: float) -> float:
    """The time without digits that are only rounding error."""
    return float(f"{time:.10g}")


def _legend(panels: Sequence[Panel]) -> str:
    chunks = max(panel.chunks for panel in panels)
    items: list[str] = []
    for kind in all_kinds(panels):
        shown = range(chunks) if chunks <= 4 else (0, chunks - 1)
        swatches = "".join(
            f'<i style="background:{colours.hexed(of_kind(kind, at, chunks))}"></i>' for at in shown
        )
        items.append(f"<li>{swatches} {kind} {NAMES[kind]}</li>")
    if note := shades(panels):
        items.append(f'<li class="quiet">({note})</li>')
    items.append('<li><i class="bubble"></i> bubble</li>')
    if most_held(panels):
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
    """A table whose first row is its header; in a page of this module it can be sorted by any column."""
    if not rows:
        return ""
    kinds = [_alignment([row[at] for row in rows[1:]]) for at in range(len(rows[0]))]
    head = "".join(
        f'<th scope="col"{kind}>{escape(cell)}</th>' for kind, cell in zip(kinds, rows[0], strict=True)
    )
    lines = list[str]()
    for first, *rest in rows[1:]:
        cells = (f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds[1:], rest, strict=True))
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{"".join(cells)}</tr>')
    body = "\n".join(lines)
    return (
        f'<div class="wide"><table>\n<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _alignment(cells: Sequence[str]) -> str:
    """The class of a column: text, unless every cell begins with a number."""
    return "" if all(re.match(r"[-+]?\d|$", cell) for cell in cells) else ' class="text"'
