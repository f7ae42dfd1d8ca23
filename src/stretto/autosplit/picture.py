"""The splits of a network's operators: a table as text, and a picture from top to bottom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stretto.view.colours import Rgb, hexed, text_on
from stretto.view.svg import element, page, words

if TYPE_CHECKING:
    from stretto.autosplit.plan import Conversion, Line, SplitPlan

MIB = 2**20

SPLITS: Mapping[str, Rgb] = {  # by the split of an operator's output, or by its style
    "batch": (30, 90, 152),
    "column": (235, 163, 44),
    "row": (214, 96, 62),
    "features": (250, 226, 60),
    "whole": (200, 206, 212),
}
_ABOUT = {
    "batch": "batch: its part of the samples, all parameters",
    "column": "column: its part of the output features",
    "row": "row: its part of the input features",
    "features": "features: elementwise, on its part",
    "whole": "whole: the same on every rank",
}


def look(line: Line) -> str:
    """The name of a line's colour."""
    choice = line.choice
    return choice.style if choice.style in ("column", "row") else choice.leaves


def _style(line: Line) -> str:
    choice = line.choice
    style = choice.style or choice.takes
    return style if choice.output == choice.leaves else f"{style}, made {choice.output}"


def _kinds(conversion: Conversion) -> str:
    return " + ".join(exchange.kind for exchange in conversion.exchanges) or "each rank takes its part"


def _bytes(number: float) -> str:
    if not number:
        return ""
    return f"{number / MIB:.1f}" if number >= 0.1 * MIB else f"{number / MIB:.2g}"


def split_table(plan: SplitPlan) -> str:
    """One row for each operator; between them, the conversions of what they read."""
    rows: list[tuple[str, ...]] = [
        ("operator", "kind", "output", "split", "ms", "sends MiB", "memory MiB"),
    ]
    for line in plan.lines:
        operator = line.operator
        rows += [
            (
                f"  {one.source} >",
                _kinds(one),
                "",
                f"{one.before} > {one.after}" if one.before != one.after else "sum of its gradient",
                f"{1e3 * one.seconds:.3f}",
                _bytes(one.sent),
                "",
            )
            for one in plan.conversions
            if one.target == operator.name
        ]
        rows.append(
            (
                operator.name,
                operator.kind,
                "x".join(map(str, operator.shape)),
                _style(line),
                f"{1e3 * line.seconds:.3f}",
                _bytes(line.sent),
                _bytes(line.share.memory),
            )
        )
    return "\n".join((*_aligned(rows, right=4), "", *totals(plan)))


def totals(plan: SplitPlan) -> list[str]:
    """The whole plan in a few lines, and what it is compared with."""
    machine, cost = plan.machine, plan.cost
    parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in plan.parts.items())
    lines = [
        f"{machine.ranks} x {machine.cluster.device.name}, {machine.precision}: "
        f"{1e3 * cost.seconds:.2f} ms a step ({parts})",
        f"each rank sends {_bytes(plan.sent) or 0} MiB and holds {cost.bytes / 2**30:.2g} of "
        f"{plan.limit / 2**30:.2f} GiB",
    ]
    rows = list[tuple[str, ...]]()
    for name, other in plan.beside.items():
        if other is None:
            rows.append((name, "is not possible", ""))
            continue
        fits = "" if other.bytes <= plan.limit else f", does not fit: {other.bytes / 2**30:.2f} GiB"
        more = other.seconds / cost.seconds
        rows.append((name, f"{1e3 * other.seconds:.2f} ms", f"{more:.2f} times the plan's{fits}"))
    return [*lines, *_aligned(rows, right=9), *(f"note: {note}" for note in plan.notes)]


def _aligned(rows: Sequence[Sequence[str]], right: int) -> list[str]:
    """Rows as lines; columns from `right` on are aligned at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at >= right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


_LEFT, _TOP = 24.0, 120.0
_WIDTH, _HEIGHT = 330.0, 26.0
_GAP = 10.0
_CONVERSION = 18.0  # height of a conversion's line of text
_LANE = 14.0  # between the lines of tensors that skip operators
_NOTES = 360.0  # width of the column at the right
_BAR = 90.0  # length of the longest operator's bar
_LETTER = 6.3  # pixels, about, of text of 11


def split_svg(plan: SplitPlan) -> str:
    """Operators from top to bottom, coloured by split; above an operator the conversions of what it reads,
    with the bytes that a rank sends and their time; at the right, time and memory of each operator.
    """
    place = {line.operator.name: at for at, line in enumerate(plan.lines)}
    lanes = _lanes(plan, place)
    left = _LEFT + _LANE * (1 + max(lanes.values(), default=-1))
    converted = [[one for one in plan.conversions if one.target == name] for name in place]
    tops, y = list[float](), _TOP
    for some in converted:
        y += _GAP + _CONVERSION * len(some)
        tops.append(y)
        y += _HEIGHT
    slowest = max((line.seconds for line in plan.lines), default=0.0) or 1.0
    lines, texts = list[str](), list[str]()
    for at, line in enumerate(plan.lines):
        sources = [place[name] for name in dict.fromkeys(line.operator.inputs)]
        lines += [
            _edge(tops[source], tops[at], left, lanes.get(source) if source < at - 1 else None)
            for source in sources
        ]
        for number, one in enumerate(reversed(converted[at]), 1):
            texts.append(words(_conversion(one), left + 34, tops[at] - 8 - _CONVERSION * (number - 1), 11))
        texts += _block(line, tops[at], left, slowest)
    about = f"{len(plan.styles)} layers over {plan.machine.ranks} ranks, coloured by how each is split"
    title = f"Splits over {plan.machine.ranks} x {plan.machine.cluster.device.name}"
    head, wide = _head(plan, title)
    return page(max(left + _WIDTH + _NOTES, wide), y + 20, title, about, [*head, *lines, *texts])


def _lanes(plan: SplitPlan, place: Mapping[str, int]) -> dict[int, int]:
    """The lane of each operator whose output skips others, by its place: the first one that is free."""
    last = dict[int, int]()
    for at, line in enumerate(plan.lines):
        for name in line.operator.inputs:
            if place[name] < at - 1:
                last[place[name]] = at
    free = list[int]()  # by lane, the place from which it is free
    lanes = dict[int, int]()
    for source, end in sorted(last.items()):
        lane = next((at for at, since in enumerate(free) if since <= source), len(free))
        free[lane : lane + 1] = [end]
        lanes[source] = lane
    return lanes


def _edge(top: float, bottom: float, left: float, lane: int | None) -> str:
    """From an operator to one below it: straight, or in a lane at the left."""
    start = top + _HEIGHT
    if lane is None:
        return element("path", d=f"M{left + 20:g} {start:g}V{bottom:g}", class_="line", fill="none")
    x, middle = left - _LANE * (lane + 1), top + _HEIGHT / 2
    path = f"M{left:g} {middle:g}H{x:g}V{bottom + _HEIGHT / 2:g}H{left:g}"
    return element("path", d=path, class_="line", fill="none")


def _conversion(one: Conversion) -> str:
    what = (
        f"{one.before} \N{RIGHTWARDS ARROW} {one.after}" if one.before != one.after else "sum of its gradient"
    )
    price = f", {one.sent / MIB:.1f} MiB, {1e3 * one.seconds:.3f} ms" if one.exchanges else ""
    return f"{what}: {_kinds(one)}{price}"


def _block(line: Line, top: float, left: float, slowest: float) -> list[str]:
    operator = line.operator
    colour = SPLITS[look(line)]
    shape = "\N{MULTIPLICATION SIGN}".join(map(str, operator.shape))
    room = int((_WIDTH - 24) / _LETTER) - len(shape)
    name = operator.name if operator.name == operator.kind else f"{operator.name}  {operator.kind}"
    name = name if len(name) <= room else name[: room - 1] + "\N{HORIZONTAL ELLIPSIS}"
    baseline, right = top + 17, left + _WIDTH
    ink = {"style": f"fill: {text_on(colour)}"}
    parts = [
        element("rect", x=left, y=top, width=_WIDTH, height=_HEIGHT, rx=4, fill=hexed(colour)),
        words(name, left + 10, baseline, 11, **ink),
        words(shape, right - 8, baseline, 11, text_anchor="end", **ink),
    ]
    if line.seconds >= 5e-7:
        long = max(1.0, _BAR * line.seconds / slowest)
        parts.append(element("rect", x=right + 12, y=top + 8, width=long, height=10, fill=hexed(colour)))
    facts = [_style(line), *[f"{1e3 * line.seconds:.3f} ms"] * (line.seconds >= 5e-7)]
    facts += [f"sends {_bytes(line.sent)} MiB"] * bool(line.sent)
    facts += [f"holds {_bytes(line.share.memory)} MiB"] * bool(line.share.memory)
    return [*parts, words(", ".join(facts), right + 20 + _BAR, baseline, 11, class_="quiet")]


def _head(plan: SplitPlan, title: str) -> tuple[list[str], float]:
    """Title, totals and key, and their width."""
    cost = plan.cost
    parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in plan.parts.items())
    step = f"step {1e3 * cost.seconds:.2f} ms: {parts}"
    held = f"{cost.bytes / 2**30:.2g} GiB of {plan.limit / 2**30:.2f} GiB"
    sizes = f"each rank sends {_bytes(plan.sent) or 0} MiB and holds {held}"
    beside = [
        f"{name} {1e3 * other.seconds:.2f} ms{'' if other.bytes <= plan.limit else ' (does not fit)'}"
        for name, other in plan.beside.items()
        if other is not None
    ]
    texts = (f"{step}; {sizes}", f"instead: {', '.join(beside)}")
    drawn = [words(title, _LEFT, 30, 16, font_weight="bold")]
    drawn += [words(text, _LEFT, 52 + 18 * at, 11, class_="quiet") for at, text in enumerate(texts)]
    x = _LEFT
    shown = {look(line) for line in plan.lines}
    for name, colour in SPLITS.items():
        if name in shown:
            drawn.append(element("rect", x=x, y=86, width=14, height=14, rx=3, fill=hexed(colour)))
            drawn.append(words(_ABOUT[name], x + 20, 97, 11))
            x += 44 + 5.6 * len(_ABOUT[name])
    return drawn, max(x, *(_LEFT * 2 + 5.6 * len(text) for text in texts))
