"""The files that `stretto schedule` writes: pictures of any number of timelines, texts of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.cli.face import write_text
from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from stretto.program.replay import Timeline

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def write_all(
    timelines: Sequence[Timeline],
    pictures: Mapping[str, Path | None],
    texts: Mapping[str, Path | None],
    several: bool,
    time_unit: str,
) -> list[Path]:
    """Write what has a path, and say which.

    Raises:
        StrettoError: a file cannot be written, or is of a kind that holds one program and there are several.
    """
    if several and (kind := next((kind for kind, path in texts.items() if path is not None), None)):
        raise StrettoError(
            f"--{kind} writes one program, --compare has {len(timelines)}",
            hint="name one schedule, or write --svg, --png or --html",
        )
    if time_unit not in _SECONDS:
        near = nearest(time_unit, _SECONDS) or "ms"
        raise StrettoError(
            f"--time-unit is {time_unit!r}, must be one of {', '.join(_SECONDS)}", hint=f"nearest is {near}"
        )
    written: list[Path] = []
    for kind, path in {**texts, **pictures}.items():
        if path is None:
            continue
        if kind == "png":
            _write_png(path, _svg(timelines, several))
        elif kind in pictures:
            write_text(path, _svg(timelines, several) if kind == "svg" else _html(timelines, several))
        else:
            write_text(path, _text(kind, timelines[0], _SECONDS[time_unit]))
        written.append(path)
    return written


def _svg(timelines: Sequence[Timeline], several: bool) -> str:
    from stretto.view.panel_svg import compare_svg, timeline_svg

    return compare_svg(timelines) if several else timeline_svg(timelines[0])


def _html(timelines: Sequence[Timeline], several: bool) -> str:
    from stretto.view.html import compare_html, timeline_html

    return compare_html(timelines) if several else timeline_html(timelines[0])


def _text(kind: str, timeline: Timeline, second: float) -> str:
    if kind == "trace":
        from stretto.view.trace import trace_of, write_trace

        return write_trace(trace_of(timeline, second))
    from stretto.program.text import to_csv, to_json
    from stretto.program.transforms.one_order import one_order

    program = timeline.program
    if kind == "csv":  # torch has one communicator for a pair of ranks, so its transfers need one order
        return to_csv(one_order(program) if program.lowered else program)
    return to_json(program)


def _write_png(path: Path, svg: str) -> None:
    from stretto.view.svg import png_of

    content = png_of(svg)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise StrettoError(
            f"cannot write {path}: {error.strerror}", hint="name a file in a folder that exists"
        ) from None
