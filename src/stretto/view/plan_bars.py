"""Where a step's time goes in the best layouts, and what the ranks of the winner hold: bars of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from stretto.view import colours
from stretto.view.colours import Rgb
from stretto.view.svg import element, words

if TYPE_CHECKING:
    from stretto.planner.estimate import Estimate
    from stretto.planner.memory.fits import Fit
    from stretto.planner.memory.ranks import RankMemory
    from stretto.planner.search.ranking import Ranked

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
    "tensor": (235, 163, 44),
    "context": (38, 142, 136),
    "expert": (190, 214, 90),
    "messages": (214, 96, 62),
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
    """A bar a layout: its step's parts, and the interval that the measured step is expected in."""
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
    """The parts in the order of a bar, what is none left out; what is not known by name comes as other."""
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
    """A bar a pipeline rank of one layout, at its fullest moment, beside what a device has."""
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
    about = "Memory of each pipeline rank by kind, beside what a device has"
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
