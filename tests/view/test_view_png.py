"""PNG pictures."""

from __future__ import annotations

import struct
import sys
import zlib
from itertools import pairwise

import pytest

from stretto import schedule, simulate
from stretto.errors import StrettoError
from stretto.view import colours
from stretto.view.panel_svg import timeline_svg
from stretto.view.svg import png_of


def pixels(png: bytes) -> list[bytes]:
    """The rows of a PNG of 8 bits RGBA that is not interlaced (RFC 2083)."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    at, chunks = 8, list[tuple[bytes, bytes]]()
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        chunks.append((png[at + 4 : at + 8], png[at + 8 : at + 8 + length]))
        at += 12 + length
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[0][1])
    assert (depth, colour, interlaced) == (8, 6, 0)
    raw = zlib.decompress(b"".join(content for name, content in chunks if name == b"IDAT"))
    rows, size = [bytes(4 * width)], 4 * width + 1
    for y in range(height):
        rows.append(_unfiltered(raw[y * size], raw[y * size + 1 : (y + 1) * size], rows[-1]))
    return rows[1:]


def _unfiltered(kind: int, line: bytes, above: bytes) -> bytes:
    row = bytearray(len(line))
    for at, value in enumerate(line):
        left, up = (row[at - 4] if at >= 4 else 0), above[at]
        corner = above[at - 4] if at >= 4 else 0
        near = min((left, up, corner), key=lambda each: abs(left + up - corner - each))
        row[at] = (value + (0, left, up, (left + up) // 2, near)[kind]) & 255
    return bytes(row)


def test_the_picture_is_drawn_with_its_words() -> None:
    pytest.importorskip("resvg_py", reason="the extra png is not installed")
    timeline = simulate(schedule("gpipe", 2, 2))
    rows = pixels(png_of(timeline_svg(timeline), zoom=1))
    scale = 920 / timeline.makespan
    for event in timeline.events:
        x, y = round(72 + event.start * scale) + 3, 62 + 54 * event.rank + 5
        assert tuple(rows[y][4 * x : 4 * x + 3]) == colours.of_kind(event.action.kind)
    idle = round(72 + timeline.makespan * scale) - 30
    assert min(rows[62 + 54 + 5][4 * idle : 4 * idle + 3]) > 200
    # letters are there: the title's line goes from ground to ink and back many times
    line = [rows[24][4 * x] < 128 for x in range(72, 140)]
    assert sum(a != b for a, b in pairwise(line)) >= 8


def test_zoom_multiplies_the_pixels() -> None:
    pytest.importorskip("resvg_py", reason="the extra png is not installed")
    svg = timeline_svg(simulate(schedule("gpipe", 1, 1)))
    (width,) = struct.unpack(">I", png_of(svg, 1)[16:20])
    (two,) = struct.unpack(">I", png_of(svg, 2)[16:20])
    assert two == 2 * width


def test_without_the_renderer_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(StrettoError, match="resvg_py, which is not installed") as caught:
        png_of("<svg/>")
    assert "pip install 'stretto[png]'" in str(caught.value.hint)


def test_what_cannot_be_drawn_is_an_error() -> None:
    pytest.importorskip("resvg_py", reason="the extra png is not installed")
    with pytest.raises(StrettoError, match="cannot be drawn"):
        png_of("<svg")
