"""Panels as JSON, for pages: columns rather than objects, which are compact for large timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from stretto.program.action import ActionKind
from stretto.view import colours
from stretto.view.panel import NAMES, Panel, all_kinds, highest_peak, shades
from stretto.view.panel_svg import left_of


def panels_record(panels: Sequence[Panel]) -> dict[str, Any]:
    """Return panels under one time axis as JSON, with the colours of their kinds."""
    kinds, chunks = all_kinds(panels), max(panel.chunks for panel in panels)
    return {
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
        "note": shades(panels),
        "panels": [_panel(panel, kinds) for panel in panels],
    }


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
