"""Charts of the plan's page: time against memory, the parts of a step, the memory of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, inf, log10
from typing import TYPE_CHECKING, Any

from stretto.view import colours
from stretto.view.colours import Rgb
from stretto.view.svg import element, words

if TYPE_CHECKING:
    from stretto.planner.estimate import Estimate
    from stretto.planner.memory.fits import Fit
    from stretto.planner.memory.ranks import RankMemory
    from stretto.planner.search.ranking import Ranked, Tried

GIB = 2**30
WIDTH = 980.0
_LEFT = 30.0
_RIGHT = 150.0
_ROW = 20.0
_GAP = 24.0
_HATCHED = "url(#plan-hatch)"
_HATCH = (
    '<defs><pattern id="plan-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" class="idle"/>'
    '<path d="M0 0V6" class="hatch"/></pattern></defs>'
)

# neighbours in a bar differ in lightness; None: hatched
PARTS: Mapping[str, Rgb | None] = {
    "compute": (30, 90, 152),
    "recompute": (146, 106, 197),
    "host": (250, 226, 60),
    "tensor": (235, 163, 44),
    "context": (38, 142, 136),
    "expert": (190, 214, 90),
    "data": (140, 222, 200),
    "optimiser": (120, 72, 40),
    "offload": (240, 170, 190),
    "other": colours.OTHER,
    "bubble": None,
}
MEMORY: Mapping[str, Rgb | None] = {
    "weights": (30, 90, 152),
    "masters": (110, 160, 215),
    "gradients": (140, 222, 200),
    "optimizer": (38, 142, 136),
    "gathered": (190, 214, 90),
    "open": (120, 72, 40),
    "versions": (240, 170, 190),
    "activations": (235, 163, 44),
    "ends": (214, 96, 62),
    "messages": (146, 106, 197),
    "transient": (250, 226, 60),
    "batch": colours.OTHER,
    "beside tensors": None,
}


def step_bars(ranking: Sequence[Ranked]) -> str:
    """One bar per layout: the parts of its step, and the interval expected for a measured step."""
    longest = max(max(one.estimate.high, sum(one.estimate.parts.values())) for one in ranking)
    scale = (WIDTH - _LEFT - _RIGHT) / longest
    rows: list[str] = []
    for at, one in enumerate(ranking):
        rows += _step_row(at, one.estimate, one.words, scale)
    about = "Seconds of a step by part, for the best layouts"
    return _figure("steps", len(ranking), about, rows) + _key(
        PARTS, {n for r in ranking for n in _parts(r.estimate)}
    )


def _parts(estimate: Estimate) -> dict[str, float]:
    """The parts in the order of a bar, without zeros; unknown ones are summed as other."""
    known = {name: estimate.parts.get(name, 0.0) for name in PARTS}
    known["other"] += sum(value for name, value in estimate.parts.items() if name not in PARTS)
    return {name: value for name, value in known.items() if value > 0}


def _step_row(at: int, estimate: Estimate, layout: str, scale: float) -> list[str]:
    top = at * (_ROW + _GAP) + 18
    total = sum(estimate.parts.values())
    parts = {
        name: (value, f"{value:.4g} s", f"{100 * value / total:.1f}% of the step")
        for name, value in _parts(estimate).items()
    }
    row = _row(top=top, number=f"{at + 1}", label=layout, parts=parts, looks=PARTS, scale=scale)
    low, mid, high = (_LEFT + value * scale for value in (estimate.low, estimate.seconds, estimate.high))
    y = top + _ROW + 5
    row.append(
        element("path", d=f"M{low:.1f} {y - 3}v6m0-3H{high:.1f}m0-3v6M{mid:.1f} {y - 3}v6", class_="range")
    )
    rate = f"{estimate.seconds:.4g} s, MFU {100 * estimate.mfu:.1f}%"
    row.append(words(rate, WIDTH - _RIGHT + 8, top + 14, 12))
    return row


def memory_bars(fit: Fit) -> str:
    """One bar per pipeline rank of a layout, at its fullest moment, beside the device's memory."""
    beside = max(0.0, fit.device.mid - fit.allocated.mid)
    whole = [sum(_held(rank).values()) + beside for rank in fit.ranks]
    limit = fit.capacity if fit.capacity != float("inf") else 0.0
    longest = max(*whole, min(limit, 1.5 * max(whole)), 1.0)
    scale = (WIDTH - _LEFT - _RIGHT) / (1.02 * longest)
    limit_text = f" of {limit / GIB:.3g}" if limit else ""
    rows: list[str] = []
    for at, rank in enumerate(fit.ranks):
        held = {**_held(rank), "beside tensors": beside}
        total = sum(held.values())
        parts = {
            name: (size, f"{size / GIB:.3g} GiB", f"{100 * size / total:.1f}%")
            for name, size in held.items()
            if size
        }
        top = at * (_ROW + _GAP) + 18
        rows += _row(
            top=top,
            number=f"{rank.rank}",
            label=f"pipeline rank {rank.rank}, fullest during {rank.at}",
            parts=parts,
            looks=MEMORY,
            scale=scale,
        )
        rows.append(words(f"{total / GIB:.3g}{limit_text} GiB", WIDTH - _RIGHT + 8, top + 14, 12))
    if limit and limit <= 1.02 * longest:
        x = _LEFT + limit * scale
        rows.append(element("path", d=f"M{x:.1f} 4V{len(fit.ranks) * (_ROW + _GAP)}", class_="limit"))
        rows.append(words(f"{limit / GIB:.3g} GiB", x + 4, 12, 11, class_="limit-text"))
    about = "Memory of each pipeline rank by kind, beside the device's memory"
    shown = {name for rank in fit.ranks for name, size in _held(rank).items() if size}
    return _figure("memory", len(fit.ranks), about, rows) + _key(
        MEMORY, shown | ({"beside tensors"} if beside else set())
    )


def _held(rank: RankMemory) -> dict[str, float]:
    return {name: float(getattr(rank, name)) for name in MEMORY if name != "beside tensors"}


def _row(
    top: float,
    number: str,
    label: str,
    parts: Mapping[str, tuple[float, str, str]],
    looks: Mapping[str, Rgb | None],
    scale: float,
) -> list[str]:
    shapes = [words(number, _LEFT - 8, top + 14, 12, text_anchor="end", font_weight="bold")]
    shapes.append(words(label, _LEFT, top - 4, 12, class_="quiet"))
    x = _LEFT
    for name, (value, text_of, share) in parts.items():
        colour = looks[name]
        attributes = {"data-name": name, "data-of": label, "data-value": text_of, "data-share": share}
        extra = "".join(f' {key}="{escape(text)}"' for key, text in attributes.items())
        fill = _HATCHED if colour is None else colours.hexed(colour)
        # exact to the thousandth of a pixel, so that bars are as long as their parts
        shapes.append(
            f'<rect class="part" x="{x:.3f}" y="{top:g}" width="{value * scale:.3f}" height="{_ROW:g}" '
            f'fill="{fill}"{extra}/>'
        )
        x += value * scale
    return shapes


def _figure(name: str, rows: int, about: str, parts: Sequence[str]) -> str:
    height = rows * (_ROW + _GAP) + 8
    svg = element(
        "svg",
        _HATCH.replace("plan-hatch", f"plan-hatch-{name}")
        + "\n".join(parts).replace("plan-hatch", f"plan-hatch-{name}"),
        id=name,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        width=WIDTH,
        height=height,
        role="img",
        aria_label=about,
    )
    return f'<div class="figure">{svg}</div>'


def _key(looks: Mapping[str, Rgb | None], shown: set[str]) -> str:
    items = [
        f'<li><i class="hatched"></i>{name}</li>'
        if colour is None
        else f'<li><i style="background:{colours.hexed(colour)}"></i>{name}</li>'
        for name, colour in looks.items()
        if name in shown
    ]
    return f'<ul class="key">{"".join(items)}</ul>'


# ------------------------------------------------------------------ time against memory

HEIGHT = 460.0  # of the scatter plot
_PLOT_LEFT = 70.0
_PLOT_RIGHT = 24.0
_PLOT_TOP = 22.0
_PLOT_BOTTOM = 48.0
# fill and radius of layouts that fit, with room or tightly; others are crosses, which need no colour
FITS = {"fits": ((70, 130, 200), 4.0), "tight": ((235, 163, 44), 4.0)}


@dataclass(frozen=True)
class Axes:
    """GiB and seconds to pixels; seconds on a logarithmic scale."""

    most: float
    fast: float
    slow: float

    def x(self, gib: float) -> float:
        return _PLOT_LEFT + gib / self.most * (WIDTH - _PLOT_LEFT - _PLOT_RIGHT)

    def y(self, seconds: float) -> float:
        share = log10(seconds / self.fast) / log10(self.slow / self.fast)
        return HEIGHT - _PLOT_BOTTOM - share * (HEIGHT - _PLOT_TOP - _PLOT_BOTTOM)


def front(tried: Sequence[Tried]) -> list[int]:
    """The Pareto front of time and memory among layouts that fit, by memory."""
    usable = [i for i, one in enumerate(tried) if one.verdict != "does not fit" and not one.least]
    best: list[int] = []
    for i in sorted(usable, key=lambda i: (tried[i].memory, tried[i].seconds)):
        if not best or tried[i].seconds < tried[best[-1]].seconds:
            best.append(i)
    return best


def scatter(tried: Sequence[Tried], capacity: float, best: str | None) -> tuple[str, dict[str, Any]]:
    """The figure, and the data of its points as columns in the order of `tried`.

    Args:
        capacity: bytes of a device.
        best: the layout at the top of the ranking, which gets a ring.
    """
    axes = _axes(tried, capacity)
    # layouts far beyond the device's memory are drawn at the edge
    places = [(min(axes.x(one.memory / GIB), WIDTH - 8), axes.y(one.seconds)) for one in tried]
    line = front(tried)
    parts = _grid(axes, capacity)
    if line:
        steps = [f"{places[i][0]:.1f} {places[i][1]:.1f}" for i in line]
        parts.append(element("path", d="M" + "L".join(steps), class_="front"))
    parts += [_point(one, *at) for one, at in zip(tried, places, strict=True)]
    ring = next((at for one, at in zip(tried, places, strict=True) if one.layout == best), None)
    if ring is not None:
        parts.append(element("circle", cx=ring[0], cy=ring[1], r=8, class_="best"))
    on_front = set(line)
    facts = {
        "x": [round(x, 1) for x, _ in places],
        "y": [round(y, 1) for _, y in places],
        "layout": [one.layout for one in tried],
        "seconds": [f"{one.seconds:.4g} s" for one in tried],
        "memory": [f"{'at least ' * one.least}{one.memory / GIB:.3g} GiB" for one in tried],
        "verdict": [one.verdict for one in tried],
        "front": [int(i in on_front) for i in range(len(tried))],
    }
    about = f"{len(tried)} candidates by memory of the fullest device and time of a step"
    return _svg("scatter", WIDTH, HEIGHT, about, parts), facts


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


def _axes(tried: Sequence[Tried], capacity: float) -> Axes:
    room = capacity / GIB
    most = max([one.memory / GIB for one in tried] or [1.0])
    if room < inf:
        # layouts that need many times the device's memory would squeeze the others
        most = room if most <= room else min(most, 1.5 * room)
    seconds = [one.seconds for one in tried] or [1.0]
    return Axes(1.05 * most, 0.94 * min(seconds), 1.06 * max(seconds))


def _point(one: Tried, x: float, y: float) -> str:
    if one.verdict == "does not fit":
        return element("path", d=f"M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6", class_="point over")
    fill, radius = FITS[one.verdict]
    return element("circle", cx=x, cy=y, r=radius, class_="point mark", fill=colours.hexed(fill))


def _grid(axes: Axes, capacity: float) -> list[str]:
    low, right = HEIGHT - _PLOT_BOTTOM, WIDTH - _PLOT_RIGHT
    parts = [
        words(
            "memory of the fullest device, GiB",
            (_PLOT_LEFT + right) / 2,
            HEIGHT - 8,
            12,
            class_="quiet",
            text_anchor="middle",
        )
    ]
    parts.append(words("seconds of a step", _PLOT_LEFT, 12, 12, class_="quiet", text_anchor="middle"))
    step = _step(axes.most)
    for at in range(floor(axes.most / step) + 1):
        x = axes.x(at * step)
        parts.append(element("path", d=f"M{x:.1f} {_PLOT_TOP}V{low}", class_="grid"))
        parts.append(words(f"{at * step:g}", x, low + 16, 11, class_="quiet", text_anchor="middle"))
    for seconds in _ticks(axes.fast, axes.slow):
        y = axes.y(seconds)
        parts.append(element("path", d=f"M{_PLOT_LEFT} {y:.1f}H{right}", class_="grid"))
        parts.append(words(f"{seconds:g}", _PLOT_LEFT - 8, y + 4, 11, class_="quiet", text_anchor="end"))
    if capacity / GIB <= axes.most:
        x = axes.x(capacity / GIB)
        parts.append(element("path", d=f"M{x:.1f} {_PLOT_TOP}V{low}", class_="limit"))
        parts.append(words("device", x + 5, _PLOT_TOP + 10, 11, class_="limit-text"))
    return parts


def _step(most: float) -> float:
    """A round step that makes at most ten."""
    base = 10.0 ** floor(log10(most / 10))
    return next(base * factor for factor in (1, 2, 5, 10) if most / (base * factor) <= 10)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between, five or so, on a logarithmic axis."""
    decades = log10(high / low)
    if decades < 0.7:
        step = _step((high - low) * 1.5)
        return [float(f"{at * step:.6g}") for at in range(ceil(low / step), floor(high / step) + 1)]
    factors = (1, 2, 5) if decades < 3 else (1,)
    decade = range(floor(log10(low)), ceil(log10(high)) + 1)
    return [float(f"{f * 10.0**d:.6g}") for d in decade for f in factors if low <= f * 10.0**d <= high]
