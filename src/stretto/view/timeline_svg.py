"""A timeline as an SVG picture, drawn as papers draw it: a row a rank, blocks numbered by microbatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.view import colours
from stretto.view.blocks import NAMES, Block, blocks, chunks, headline, ticks
from stretto.view.svg import element, page, words

if TYPE_CHECKING:
    from stretto.simulate import Timeline

_LEFT, _RIGHT, _TOP, _ROW, _GAP = 72, 24, 62, 28, 5
_WIDTH, _WIDEST, _NARROWEST_BLOCK = 920.0, 6000.0, 15.0

_HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="idle"/><path d="M0 0V6" class="hatch" stroke-width="1.5"/></pattern>'
)


def timeline_svg(timeline: Timeline) -> str:
    """The timeline with rank labels, time axis, legend and its figures; hatched where a rank is idle."""
    program, drawn = timeline.program, blocks(timeline)
    scale = _scale(drawn, timeline.makespan)
    width = timeline.makespan * scale
    parts = [
        words(program.name, _LEFT, 28, 17, font_weight="bold"),
        words(headline(timeline), _LEFT, 48, 12.5, class_="quiet"),
    ]
    for rank in range(program.ranks):
        top = _TOP + rank * (_ROW + _GAP)
        label = {"text_anchor": "end"}
        parts.append(words(f"rank {rank}", _LEFT - 10, top + _ROW / 2 + 4, 12, **label))
        parts.append(element("rect", x=_LEFT, y=top, width=width, height=_ROW, fill="url(#hatch)"))
    for block in drawn:
        parts += _block(block, scale, chunks(program))
    bottom = _TOP + program.ranks * (_ROW + _GAP)
    parts += _axis(timeline.makespan, scale, bottom)
    key, right = _legend(drawn, chunks(program), bottom + 46)
    title = f"{program.name}: {headline(timeline)}"
    about = f"Pipeline timeline of schedule {title}."
    return page(max(_LEFT + width, right) + _RIGHT, bottom + 66, title, about, parts + key, _HATCH)


def _scale(drawn: list[Block], makespan: float) -> float:
    """Pixels a unit of time: the usual width, more where blocks would get too narrow to be numbered."""
    if not drawn or makespan <= 0:
        return 1.0
    needed = _NARROWEST_BLOCK / min(block.end - block.start for block in drawn)
    return min(max(_WIDTH / makespan, needed), max(_WIDEST, _WIDTH) / makespan)


def _block(block: Block, scale: float, chunks: int) -> list[str]:
    colour = colours.of_kind(block.kind, block.chunk, chunks)
    x, y = _LEFT + block.start * scale, _TOP + block.rank * (_ROW + _GAP)
    width = (block.end - block.start) * scale
    # a gap of a pixel parts neighbours of one colour; thin blocks cannot spare it
    inner = max(width - 1, width * 0.8)
    shape = element(
        "rect", x=x, y=y, width=inner, height=_ROW, rx=min(2.5, inner / 4), fill=colours.hexed(colour)
    )
    size = min(13.0, inner / (0.62 * max(1, len(block.label))))
    if not block.label or size < 6:
        return [shape]
    ink = {"text_anchor": "middle", "style": f"fill:{colours.text_on(colour)}"}
    return [shape, words(block.label, x + inner / 2, y + _ROW / 2 + 0.36 * size, size, **ink)]


def _axis(makespan: float, scale: float, top: float) -> list[str]:
    end = _LEFT + makespan * scale
    parts = [element("path", d=f"M{_LEFT} {top + 2}H{end:g}", class_="line")]
    for time in ticks(makespan, max(2, int(makespan * scale // 70))):
        x = _LEFT + time * scale
        parts.append(element("path", d=f"M{x:g} {top + 2}v5", class_="line"))
        parts.append(words(f"{time:g}", x, top + 20, 11, text_anchor="middle", class_="quiet"))
    parts.append(words("time", _LEFT - 10, top + 20, 11, text_anchor="end", class_="quiet"))
    return parts


def _legend(drawn: list[Block], chunks: int, y: float) -> tuple[list[str], float]:
    """Swatches of the kinds that occur, one a chunk, and of idle time; and where they end on the right."""
    x, parts = float(_LEFT), list[str]()
    shades = range(chunks) if chunks <= 4 else (0, chunks - 1)
    for kind in (kind for kind in NAMES if any(block.kind is kind for block in drawn)):
        for chunk in shades:
            fill = colours.hexed(colours.of_kind(kind, chunk, chunks))
            parts.append(element("rect", x=x, y=y - 10, width=14, height=12, rx=2, fill=fill))
            x += 16
        name = f"{kind} {NAMES[kind]}"
        parts.append(words(name, x + 4, y, 12))
        x += 24 + 6.3 * len(name)
    if chunks > 1:
        parts.append(words("(lighter: later chunk)", x - 8, y, 12, class_="quiet"))
        x += 140
    parts.append(element("rect", x=x, y=y - 10, width=14, height=12, rx=2, fill="url(#hatch)"))
    parts.append(words("bubble", x + 20, y, 12))
    return parts, x + 66
