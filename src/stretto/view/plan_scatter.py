"""Time against memory of all candidates that were looked at, and those that none beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, log10
from typing import TYPE_CHECKING, Any

from stretto.view import colours
from stretto.view.svg import element, words

if TYPE_CHECKING:
    from stretto.planner.search.ranking import Tried

GIB = 2**30
WIDTH, HEIGHT = 980.0, 460.0
_LEFT = 70.0
_RIGHT = 24.0
_TOP = 22.0
_BOTTOM = 48.0
# fill and radius of what fits, surely or perhaps; what does not is a cross, so that colour is not needed
FITS = {"fits": ((70, 130, 200), 4.0), "tight": ((235, 163, 44), 4.0)}


@dataclass(frozen=True)
class Axes:
    """From GiB and seconds to pixels; seconds go by their logarithm."""

    most: float
    fast: float
    slow: float

    def x(self, gib: float) -> float:
        return _LEFT + gib / self.most * (WIDTH - _LEFT - _RIGHT)

    def y(self, seconds: float) -> float:
        share = log10(seconds / self.fast) / log10(self.slow / self.fast)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def front(tried: Sequence[Tried]) -> list[int]:
    """Of those that fit or may, the ones that none beats in both time and memory, by memory."""
    usable = [i for i, one in enumerate(tried) if one.verdict != "does not fit" and not one.least]
    best: list[int] = []
    for i in sorted(usable, key=lambda i: (tried[i].memory, tried[i].seconds)):
        if not best or tried[i].seconds < tried[best[-1]].seconds:
            best.append(i)
    return best


def scatter(tried: Sequence[Tried], capacity: float, best: str | None) -> tuple[str, dict[str, Any]]:
    """The figure, and what it tells of each point: columns, in the order of `tried`.

    Args:
        capacity: bytes of a device.
        best: the layout at the top of the ranking, to be ringed.
    """
    axes = _axes(tried, capacity)
    # what is far beyond the device stands at the edge
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
        # what needs many times the device would push all else together
        most = room if most <= room else min(most, 1.5 * room)
    seconds = [one.seconds for one in tried] or [1.0]
    return Axes(1.05 * most, 0.94 * min(seconds), 1.06 * max(seconds))


def _point(one: Tried, x: float, y: float) -> str:
    if one.verdict == "does not fit":
        return element("path", d=f"M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6", class_="point over")
    fill, radius = FITS[one.verdict]
    return element("circle", cx=x, cy=y, r=radius, class_="point mark", fill=colours.hexed(fill))


def _grid(axes: Axes, capacity: float) -> list[str]:
    low, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = [
        words(
            "memory of the fullest device, GiB",
            (_LEFT + right) / 2,
            HEIGHT - 8,
            12,
            class_="quiet",
            text_anchor="middle",
        )
    ]
    parts.append(words("seconds of a step", _LEFT, 12, 12, class_="quiet", text_anchor="middle"))
    step = _step(axes.most)
    for at in range(floor(axes.most / step) + 1):
        x = axes.x(at * step)
        parts.append(element("path", d=f"M{x:.1f} {_TOP}V{low}", class_="grid"))
        parts.append(words(f"{at * step:g}", x, low + 16, 11, class_="quiet", text_anchor="middle"))
    for seconds in _ticks(axes.fast, axes.slow):
        y = axes.y(seconds)
        parts.append(element("path", d=f"M{_LEFT} {y:.1f}H{right}", class_="grid"))
        parts.append(words(f"{seconds:g}", _LEFT - 8, y + 4, 11, class_="quiet", text_anchor="end"))
    if capacity / GIB <= axes.most:
        x = axes.x(capacity / GIB)
        parts.append(element("path", d=f"M{x:.1f} {_TOP}V{low}", class_="limit"))
        parts.append(words("device", x + 5, _TOP + 10, 11, class_="limit-text"))
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
