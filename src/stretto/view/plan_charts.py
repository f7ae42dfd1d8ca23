"""Charts of a plan's page: time against memory, the parts of a step, the memory of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, inf, log10
from typing import TYPE_CHECKING, Any

from stretto.view import colours
from stretto.view.colours import Rgb
from stretto.view.plan_texts import mfu_text
from stretto.view.svg import element, text_line

if TYPE_CHECKING:
    from stretto.planner.estimate import Estimate
    from stretto.planner.memory.fits import Fit
    from stretto.planner.memory.ranks import RankMemory
    from stretto.planner.search.ranking import Evaluated, Ranked

GIB = 2**30
WIDTH = 1200.0
_LEFT = 30.0
_RIGHT = 190.0
_ROW = 20.0
_GAP = 24.0
_MANY = 24  # number of pipeline ranks above which rows are low and unlabelled
_LETTER = 6.9  # approximate width of a letter, pixels

# patterns drawn over a colour, so that parts also differ without colour
_STROKES = {
    "diagonal": '<path d="M-1 7L7 -1M-1 1L1 -1M5 7L7 5"/>',
    "back": '<path d="M-1 -1L7 7M-1 5L1 7M5 -1L7 1"/>',
    "across": '<path d="M0 3H6"/>',
    "upright": '<path d="M3 0V6"/>',
    "grid": '<path d="M0 3H6M3 0V6"/>',
    "dots": '<circle cx="3" cy="3" r="0.9"/>',
}
_INKS = {"light": "#ffffff", "dark": "#000000"}
_HATCH = (
    '<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="idle"/><path d="M0 0V6" class="hatch"/></pattern>'
)
PATTERNS = (
    '<svg class="figure unseen" aria-hidden="true"><defs>'
    + _HATCH
    + "".join(
        f'<pattern id="{name}-{ink}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<g stroke="{colour}" fill="none" stroke-opacity="0.5" stroke-width="1">{stroke}</g></pattern>'
        for name, stroke in _STROKES.items()
        for ink, colour in _INKS.items()
    )
    + "</defs></svg>"
)

Look = tuple[Rgb, str] | None  # colour, and the pattern over it or ""; None for the hatching of idle time

PARTS: Mapping[str, Look] = {
    "compute": ((30, 90, 152), ""),
    "recompute": ((146, 106, 197), "diagonal"),
    "host": ((250, 226, 60), "grid"),
    "tensor": ((235, 163, 44), ""),
    "context": ((38, 142, 136), "dots"),
    "expert": ((190, 214, 90), "upright"),
    "data": ((140, 222, 200), "across"),
    "optimiser": ((120, 72, 40), "grid"),
    "offload": ((240, 170, 190), "back"),
    "other": (colours.OTHER, "dots"),
    "bubble": None,
}
MEMORY: Mapping[str, Look] = {
    "weights": ((30, 90, 152), ""),
    "masters": ((110, 160, 215), "diagonal"),
    "gradients": ((140, 222, 200), ""),
    "optimizer": ((38, 142, 136), "dots"),
    "gathered": ((190, 214, 90), "upright"),
    "open": ((120, 72, 40), "grid"),
    "versions": ((240, 170, 190), "back"),
    "activations": ((235, 163, 44), ""),
    "ends": ((214, 96, 62), "across"),
    "messages": ((146, 106, 197), "diagonal"),
    "transient": ((250, 226, 60), "upright"),
    "batch": (colours.OTHER, "dots"),
    "beside tensors": None,
}


def step_bars(ranking: Sequence[Ranked]) -> str:
    """Draw a bar per layout: the parts of its step, and the expected interval of a measured step."""
    estimates = [ranked.estimate for ranked in ranking]
    longest = max(max(estimate.high, sum(estimate.parts.values())) for estimate in estimates)
    scale = (WIDTH - _LEFT - _RIGHT) / longest
    rows: list[str] = []
    for i, (estimate, ranked) in enumerate(zip(estimates, ranking, strict=True)):
        top, total = i * (_ROW + _GAP) + 18, sum(estimate.parts.values())
        parts = {
            name: (value, f"{value:.4g} s", f"{100 * value / total:.1f}% of the step")
            for name, value in _parts(estimate).items()
        }
        rows += _row(top=top, number=f"{i + 1}", label=ranked.layout, parts=parts, looks=PARTS, scale=scale)
        ends = (_LEFT + value * scale for value in (estimate.low, estimate.high, estimate.seconds))
        rows.append(_whisker(top, *ends))
        rate = f"{estimate.seconds:.4g} s, MFU {mfu_text(estimate.mfu)}"
        rows.append(text_line(rate, WIDTH - _RIGHT + 8, top + 14, 12))
    about = "Seconds of a step by part, for the best layouts, with the interval of the whole"
    return _figure("steps", len(ranking) * (_ROW + _GAP) + 8, about, rows) + _key(
        PARTS, {name for estimate in estimates for name in _parts(estimate)}
    )


def _parts(estimate: Estimate) -> dict[str, float]:
    """Return the nonzero parts in the order of a bar; parts without a colour are summed as "other"."""
    parts = {name: estimate.parts.get(name, 0.0) for name in PARTS}
    parts["other"] += sum(value for name, value in estimate.parts.items() if name not in PARTS)
    return {name: value for name, value in parts.items() if value > 0}


def _whisker(top: float, low: float, high: float, mid: float) -> str:
    """Draw an interval below a bar, with a mark at the central value."""
    y = top + _ROW + 5
    return element("path", d=f"M{low:.1f} {y - 3}v6m0-3H{high:.1f}m0-3v6M{mid:.1f} {y - 3}v6", class_="range")


def device_memory_bars(ranking: Sequence[Ranked]) -> str:
    """Draw a bar per layout: memory of its fullest rank, the interval of that memory, and the capacity."""
    rows = list[_Bar]()
    fits = [ranked.estimate.memory for ranked in ranking]
    for number, (fit, ranked) in enumerate(zip(fits, ranking, strict=True), 1):
        if fit is not None:
            fullest = max(fit.ranks, key=lambda rank: rank.total)
            rows.append(_memory_bar(f"{number}", ranked.layout, fullest, fit, interval=True))
    capacity = next((fit.capacity for fit in fits if fit), inf)
    return _memory("devices", rows, capacity, "Memory of the fullest rank of each layout by kind")


def memory_bars(fit: Fit) -> str:
    """Draw a bar per pipeline rank of a layout, at its peak, and the capacity of the device."""
    rows = [
        _memory_bar(
            f"{rank.rank}", f"pipeline rank {rank.rank}, fullest during {rank.at}", rank, fit, interval=False
        )
        for rank in fit.ranks
    ]
    return _memory("memory", rows, fit.capacity, "Memory of each pipeline rank by kind")


@dataclass(frozen=True, kw_only=True)
class _Bar:
    """The memory of one rank.

    Attributes:
        sizes: bytes by kind.
        interval: low and high bound of the sum, or None if not drawn.
        verdict: text after the number.
    """

    number: str
    label: str
    sizes: Mapping[str, float]
    interval: tuple[float, float] | None
    verdict: str

    @property
    def total(self) -> float:
        """Sum of all sizes in bytes."""
        return sum(self.sizes.values())


def _memory_bar(number: str, label: str, rank: RankMemory, fit: Fit, *, interval: bool) -> _Bar:
    sizes = {name: float(getattr(rank, name)) for name in MEMORY if name != "beside tensors"}
    sizes["beside tensors"] = max(0.0, fit.device.mid - fit.allocated.mid)
    return _Bar(
        number=number,
        label=label,
        sizes=sizes,
        interval=(fit.device.low, fit.device.high) if interval else None,
        verdict=fit.verdict if interval else "",
    )


def _memory(name: str, bars: Sequence[_Bar], capacity: float, about: str) -> str:
    limit = capacity if capacity != inf else 0.0
    fullest = max(max(bar.total, *(bar.interval or (0.0,))) for bar in bars)
    # the scale ends after the longest bar, and includes the device's line unless that is far away
    longest = max(fullest, min(limit, 1.5 * fullest), 1.0)
    scale = (WIDTH - _LEFT - _RIGHT) / (1.02 * longest)
    of_limit = f" of {limit / GIB:.3g}" if limit else ""
    low = len(bars) > _MANY
    pitch = 16.0 if low else _ROW + _GAP
    rows: list[str] = []
    for i, bar in enumerate(bars):
        parts = {
            kind: (size, f"{size / GIB:.3g} GiB", f"{100 * size / bar.total:.1f}%")
            for kind, size in bar.sizes.items()
            if size
        }
        top = i * pitch + 18
        rows += _row(
            top=top,
            number=bar.number,
            label=bar.label,
            parts=parts,
            looks=MEMORY,
            scale=scale,
            height=12.0 if low else _ROW,
        )
        if bar.interval is not None:
            rows.append(_whisker(top, *(_LEFT + size * scale for size in (*bar.interval, bar.total))))
        ends = f"{bar.total / GIB:.3g}{of_limit} GiB {bar.verdict}".strip()
        rows.append(text_line(ends, WIDTH - _RIGHT + 8, top + (10 if low else 14), 12))
    if limit and limit <= 1.02 * longest:
        x = _LEFT + limit * scale
        rows.append(element("path", d=f"M{x:.1f} 4V{len(bars) * pitch + 12}", class_="limit"))
        label = text_line(
            f"the device's {limit / GIB:.3g} GiB", x - 4, 11, 11, class_="limit-text", text_anchor="end"
        )
        rows.append(label)
    kinds = {kind for bar in bars for kind, size in bar.sizes.items() if size}
    return _figure(name, len(bars) * pitch + 14, about, rows) + _key(MEMORY, kinds)


def _row(
    top: float,
    number: str,
    label: str,
    parts: Mapping[str, tuple[float, str, str]],
    looks: Mapping[str, Look],
    scale: float,
    height: float = _ROW,
) -> list[str]:
    """Draw a bar: its number, a label above it, and its parts, with their names if they fit.

    Args:
        parts: by name: length, and the texts of value and share.
    """
    middle = top + 0.7 * height
    shapes = [text_line(number, _LEFT - 8, middle, 12, text_anchor="end", font_weight="bold")]
    if height >= _ROW:
        shapes.append(text_line(label, _LEFT, top - 4, 12, class_="quiet"))
    x = _LEFT
    for name, (value, text_of, share) in parts.items():
        attributes = {"data-name": name, "data-of": label, "data-value": text_of, "data-share": share}
        extra = "".join(f' {key}="{escape(text)}"' for key, text in attributes.items())
        # exact to the thousandth of a pixel, so that bars are as long as their parts
        position = f'x="{x:.3f}" y="{top:g}" width="{value * scale:.3f}" height="{height:g}"'
        fill, over = _fills(looks[name])
        shapes.append(f'<rect class="part" {position} fill="{fill}"{extra}/>')
        if over:
            shapes.append(f'<rect class="over-part" {position} fill="{over}"/>')
        if height >= _ROW and value * scale >= _LETTER * len(name) + 10:
            # outlined in the part's colour, which keeps its pattern away from the letters
            look, style = looks[name], {"class_": "on-idle"}
            if look is not None:
                outline = f"fill:{colours.text_on(look[0])};stroke:{colours.hexed(look[0])}"
                style = {"class_": "on-part", "style": outline}
            centre = x + value * scale / 2
            shapes.append(text_line(name, centre, middle, 12, text_anchor="middle", **style))
        x += value * scale
    return shapes


def _fills(look: Look) -> tuple[str, str]:
    """Return the fill of a part, and that of the pattern over it, or ""."""
    if look is None:
        return "url(#idle)", ""
    colour, pattern = look
    ink = "light" if colours.text_on(colour) == "#ffffff" else "dark"
    return colours.hexed(colour), f"url(#{pattern}-{ink})" if pattern else ""


def _figure(name: str, height: float, about: str, parts: Sequence[str]) -> str:
    return f'<div class="figure">{_svg(name, WIDTH, height, about, parts)}</div>'


def _key(looks: Mapping[str, Look], shown: set[str]) -> str:
    items = list[str]()
    for name, look in looks.items():
        if name in shown:
            fill, over = _fills(look)
            rects = "".join(
                f'<rect width="14" height="14" fill="{paint}"/>' for paint in (fill, over) if paint
            )
            items.append(
                f'<li><svg class="swatch" width="14" height="14" aria-hidden="true">{rects}</svg>{name}</li>'
            )
    return f'<ul class="key">{"".join(items)}</ul>'


# ------------------------------------------------------------------ time against memory

HEIGHT = 460.0  # height of the scatter plot
_PLOT_LEFT = 70.0
_PLOT_RIGHT = 24.0
_PLOT_TOP = 22.0
_PLOT_BOTTOM = 48.0
_CIRCLE: Rgb = (38, 120, 190)
_TRIANGLE: Rgb = (196, 98, 16)


@dataclass(frozen=True, kw_only=True)
class ScatterAxes:
    """Scales from GiB and seconds to pixels; that of seconds is logarithmic."""

    smallest: float
    largest: float
    fast: float
    slow: float

    def x(self, gib: float) -> float:
        share = (gib - self.smallest) / (self.largest - self.smallest)
        return _PLOT_LEFT + share * (WIDTH - _PLOT_LEFT - _PLOT_RIGHT)

    def y(self, seconds: float) -> float:
        share = log10(seconds / self.fast) / log10(self.slow / self.fast)
        return HEIGHT - _PLOT_BOTTOM - share * (HEIGHT - _PLOT_TOP - _PLOT_BOTTOM)


def front(tried: Sequence[Evaluated]) -> list[int]:
    """Return the indices of the Pareto front of time and memory among layouts that fit, by memory."""
    usable = [
        i
        for i, candidate in enumerate(tried)
        if candidate.verdict != "does not fit" and not candidate.lower_bound
    ]
    best: list[int] = []
    for i in sorted(usable, key=lambda i: (tried[i].memory, tried[i].seconds)):
        if not best or tried[i].seconds < tried[best[-1]].seconds:
            best.append(i)
    return best


def scatter(
    tried: Sequence[Evaluated], capacity: float, ranking: Sequence[str]
) -> tuple[str, dict[str, Any]]:
    """Return the figure, and the data of its points as columns in the order of `tried`.

    Args:
        capacity: memory of a device in bytes.
        ranking: the layouts of the ranking, which are numbered; the first has a ring.
    """
    room = capacity / GIB
    sizes = [candidate.memory / GIB for candidate in tried] or [1.0]
    largest, low = max(sizes), min(sizes)
    if room < inf:
        # layouts that need many times the device's memory would squeeze the others
        largest = room if largest <= room else min(largest, 1.5 * room)
    smallest = max(0.0, low - 0.1 * (largest - low)) if low > 0.4 * largest else 0.0
    seconds = [candidate.seconds for candidate in tried] or [1.0]
    fast, slow = 0.94 * min(seconds), 1.06 * max(seconds)
    axes = ScatterAxes(smallest=smallest, largest=1.05 * largest, fast=fast, slow=slow)
    # layouts far beyond the device's memory are drawn at the edge
    points = [
        (min(axes.x(candidate.memory / GIB), WIDTH - 8), axes.y(candidate.seconds)) for candidate in tried
    ]
    line = front(tried)
    parts = _grid(axes, capacity)
    if line:
        steps = [f"{points[i][0]:.1f} {points[i][1]:.1f}" for i in line]
        parts.append(element("path", d="M" + "L".join(steps), class_="front"))
    parts += [_mark(candidate.verdict, *point) for candidate, point in zip(tried, points, strict=True)]
    named = {candidate.layout: point for candidate, point in zip(tried, points, strict=True)}
    parts += _numbers([named[layout] for layout in ranking if layout in named])
    on_front = set(line)
    data = {
        "x": [round(x, 1) for x, _ in points],
        "y": [round(y, 1) for _, y in points],
        "layout": [candidate.layout for candidate in tried],
        "seconds": [f"{candidate.seconds:.4g} s" for candidate in tried],
        "memory": [
            f"{'at least ' * candidate.lower_bound}{candidate.memory / GIB:.3g} GiB" for candidate in tried
        ],
        "verdict": [candidate.verdict for candidate in tried],
        "front": [int(i in on_front) for i in range(len(tried))],
    }
    about = f"{len(tried)} candidates by memory of the fullest device and time of a step"
    return _svg("scatter", WIDTH, HEIGHT, about, parts), data


def points_key(tried: Sequence[Evaluated]) -> str:
    """Return the legend of the points, with the verdicts that occur."""
    present = {candidate.verdict for candidate in tried}
    names = [verdict for verdict in ("fits", "tight", "does not fit") if verdict in present]
    items = [f"<li>{_swatch(_mark(name, 7.0, 7.0))}{name}</li>" for name in names]
    items.append(f"<li>{_swatch(element('circle', cx=7, cy=7, r=6, class_='best'))}first of the ranking</li>")
    items.append(
        f"<li>{_swatch(element('path', d='M0 7H14', class_='front'))}none is faster with less memory</li>"
    )
    return f'<ul class="key">{"".join(items)}</ul>'


def _swatch(content: str) -> str:
    return f'<svg class="figure" width="14" height="14" aria-hidden="true">{content}</svg>'


def _mark(verdict: str, x: float, y: float) -> str:
    """Draw a circle if a layout fits, a triangle if it is tight, a cross if it does not fit."""
    if verdict == "does not fit":
        return element("path", d=f"M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6", class_="point over")
    if verdict == "tight":
        outline = f"M{x:.1f} {y - 5:.1f}l4.6 8h-9.2Z"
        return element("path", d=outline, class_="point mark tight", fill=colours.hexed(_TRIANGLE))
    return element("circle", cx=x, cy=y, r=4.2, class_="point mark", fill=colours.hexed(_CIRCLE))


def _numbers(points: Sequence[tuple[float, float]]) -> list[str]:
    """Draw a ring around the first of the ranking, and all numbers that do not overlap."""
    if not points:
        return []
    parts = [element("circle", cx=points[0][0], cy=points[0][1], r=8, class_="best")]
    used = list[tuple[float, float]]()
    for number, (x, y) in enumerate(points, 1):
        if all(abs(x - u) > 18 or abs(y - v) > 13 for u, v in used):
            parts.append(text_line(f"{number}", x + 10, y + 4, 12, font_weight="bold"))
            used.append((x, y))
    return parts


def _svg(name: str, width: float, height: float, about: str, parts: Sequence[str]) -> str:
    return element(
        "svg",
        "\n".join(parts),
        id=name,
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        role="img",
        aria_label=about,
    )


def _grid(axes: ScatterAxes, capacity: float) -> list[str]:
    low, right = HEIGHT - _PLOT_BOTTOM, WIDTH - _PLOT_RIGHT
    parts = [
        text_line(
            "memory of the fullest device, GiB",
            (_PLOT_LEFT + right) / 2,
            HEIGHT - 8,
            12,
            class_="quiet",
            text_anchor="middle",
        )
    ]
    parts.append(text_line("seconds of a step", _PLOT_LEFT, 12, 12, class_="quiet", text_anchor="middle"))
    step = _step(axes.largest - axes.smallest)
    for i in range(ceil(axes.smallest / step), floor(axes.largest / step) + 1):
        x = axes.x(i * step)
        parts.append(element("path", d=f"M{x:.1f} {_PLOT_TOP}V{low}", class_="grid"))
        parts.append(text_line(f"{i * step:g}", x, low + 16, 11, class_="quiet", text_anchor="middle"))
    for seconds in _ticks(axes.fast, axes.slow):
        y = axes.y(seconds)
        parts.append(element("path", d=f"M{_PLOT_LEFT} {y:.1f}H{right}", class_="grid"))
        parts.append(text_line(f"{seconds:g}", _PLOT_LEFT - 8, y + 4, 11, class_="quiet", text_anchor="end"))
    if capacity / GIB <= axes.largest:
        x = axes.x(capacity / GIB)
        parts.insert(
            0, element("rect", x=x, y=_PLOT_TOP, width=right - x, height=low - _PLOT_TOP, fill="url(#idle)")
        )
        parts.append(element("path", d=f"M{x:.1f} {_PLOT_TOP}V{low}", class_="limit"))
        text = f"the device's {capacity / GIB:.4g} GiB"
        parts.append(text_line(text, x - 5, _PLOT_TOP + 10, 11, class_="limit-text", text_anchor="end"))
    return parts


def _step(length: float) -> float:
    """Return a round step that divides a length into at most ten parts."""
    base = 10.0 ** floor(log10(length / 10))
    return next(base * factor for factor in (1, 2, 5, 10) if length / (base * factor) <= 10)


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between `low` and `high`, for a logarithmic axis."""
    decades = log10(high / low)
    if decades < 0.7:
        step = _step((high - low) * 1.5)
        return [float(f"{i * step:.6g}") for i in range(ceil(low / step), floor(high / step) + 1)]
    factors = (1, 2, 5) if decades < 3 else (1,)
    decade = range(floor(log10(low)), ceil(log10(high)) + 1)
    return [float(f"{f * 10.0**d:.6g}") for d in decade for f in factors if low <= f * 10.0**d <= high]
