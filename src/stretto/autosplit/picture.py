"""Tables and pictures of a plan of splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stretto.view.colours import Rgb, hexed, text_on
from stretto.view.svg import element, page, text_line

if TYPE_CHECKING:
    from stretto.autosplit.plan import Conversion, PlannedOperator, SplitPlan

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


def colour_name(line: PlannedOperator) -> str:
    """Return the name of a line's colour in `SPLITS`."""
    choice = line.choice
    return choice.style if choice.style in ("column", "row") else choice.leaves


def _style(line: PlannedOperator) -> str:
    choice = line.choice
    style = choice.style or choice.takes
    return style if choice.output == choice.leaves else f"{style}, made {choice.output}"


def _kinds(conversion: Conversion) -> str:
    return " + ".join(call.kind for call in conversion.exchanges) or "each rank takes its part"


def _mib(size: float) -> str:
    if not size:
        return ""
    return f"{size / MIB:.1f}" if size >= 0.1 * MIB else f"{size / MIB:.2g}"


def split_table(plan: SplitPlan) -> str:
    """Return one row for each operator and, before it, for each conversion of its inputs."""
    rows: list[tuple[str, ...]] = [
        ("operator", "kind", "output", "split", "ms", "sends MiB", "memory MiB"),
    ]
    for line in plan.lines:
        operator = line.operator
        rows += [
            (
                f"  {change.source} >",
                _kinds(change),
                "",
                f"{change.before} > {change.after}"
                if change.before != change.after
                else "sum of its gradient",
                f"{1e3 * change.seconds:.3f}",
                _mib(change.sent),
                "",
            )
            for change in plan.conversions
            if change.target == operator.name
        ]
        rows.append(
            (
                operator.name,
                operator.kind,
                "x".join(map(str, operator.shape)),
                _style(line),
                f"{1e3 * line.seconds:.3f}",
                _mib(line.sent),
                _mib(line.share.memory),
            )
        )
    return "\n".join((*_aligned(rows, right=4), "", *totals(plan)))


def totals(plan: SplitPlan) -> list[str]:
    """Return the whole plan in a few lines, and the plans by other rules."""
    machine, seconds = plan.machine, plan.cost.seconds
    parts = ", ".join(f"{name} {1e3 * part:.2f}" for name, part in plan.parts.items())
    rows = list[tuple[str, ...]]()
    for name, cost in plan.rules.items():
        if cost is None:
            rows.append((name, "is not possible", ""))
            continue
        fits = "" if cost.bytes <= plan.limit else f", does not fit: {cost.bytes / 2**30:.2f} GiB"
        times = f"{cost.seconds / seconds:.2f} times the plan's{fits}"
        rows.append((name, f"{1e3 * cost.seconds:.2f} ms", times))
    return [
        f"{machine.ranks} x {machine.cluster.device.name}, {machine.precision}: "
        f"{1e3 * seconds:.2f} ms a step ({parts})",
        f"each rank sends {_mib(plan.sent) or 0} MiB and holds {plan.cost.bytes / 2**30:.2g} of "
        f"{plan.limit / 2**30:.2f} GiB",
        *_aligned(rows, right=9),
        *(f"note: {note}" for note in plan.notes),
    ]


def _aligned(rows: Sequence[Sequence[str]], right: int) -> list[str]:
    """Return rows as lines; columns from `right` on are aligned at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column >= right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
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
    """Draw the operators from top to bottom, coloured by split; above an operator the conversions of its
    inputs, with the bytes that a rank sends and their time; at the right, time and memory of each operator.
    """
    index = {line.operator.name: i for i, line in enumerate(plan.lines)}
    lanes = _lanes(plan, index)
    left = _LEFT + _LANE * (1 + max(lanes.values(), default=-1))
    conversions = [[change for change in plan.conversions if change.target == name] for name in index]
    tops, y = list[float](), _TOP
    for changes in conversions:
        y += _GAP + _CONVERSION * len(changes)
        tops.append(y)
        y += _HEIGHT
    slowest = max((line.seconds for line in plan.lines), default=0.0) or 1.0
    lines, texts = list[str](), list[str]()
    for i, line in enumerate(plan.lines):
        for source in (index[name] for name in dict.fromkeys(line.operator.inputs)):
            if source == i - 1:
                path = f"M{left + 20:g} {tops[source] + _HEIGHT:g}V{tops[i]:g}"
            else:  # in a lane at the left
                x = left - _LANE * (lanes[source] + 1)
                middle = tops[source] + _HEIGHT / 2
                path = f"M{left:g} {middle:g}H{x:g}V{tops[i] + _HEIGHT / 2:g}H{left:g}"
            lines.append(element("path", d=path, class_="line", fill="none"))
        for above, change in enumerate(reversed(conversions[i])):
            text = (
                f"{change.before} \N{RIGHTWARDS ARROW} {change.after}"
                if change.before != change.after
                else "sum of its gradient"
            )
            price = (
                f", {change.sent / MIB:.1f} MiB, {1e3 * change.seconds:.3f} ms" if change.exchanges else ""
            )
            y_text = tops[i] - 8 - _CONVERSION * above
            texts.append(text_line(f"{text}: {_kinds(change)}{price}", left + 34, y_text, 11))
        top = tops[i]
        operator = line.operator
        colour = SPLITS[colour_name(line)]
        shape = "\N{MULTIPLICATION SIGN}".join(map(str, operator.shape))
        room = int((_WIDTH - 24) / _LETTER) - len(shape)
        name = operator.name if operator.name == operator.kind else f"{operator.name}  {operator.kind}"
        name = name if len(name) <= room else name[: room - 1] + "\N{HORIZONTAL ELLIPSIS}"
        baseline, right = top + 17, left + _WIDTH
        ink = {"style": f"fill: {text_on(colour)}"}
        parts = [
            element("rect", x=left, y=top, width=_WIDTH, height=_HEIGHT, rx=4, fill=hexed(colour)),
            text_line(name, left + 10, baseline, 11, **ink),
            text_line(shape, right - 8, baseline, 11, text_anchor="end", **ink),
        ]
        if line.seconds >= 5e-7:
            long = max(1.0, _BAR * line.seconds / slowest)
            parts.append(element("rect", x=right + 12, y=top + 8, width=long, height=10, fill=hexed(colour)))
        notes = [_style(line), *[f"{1e3 * line.seconds:.3f} ms"] * (line.seconds >= 5e-7)]
        notes += [f"sends {_mib(line.sent)} MiB"] * bool(line.sent)
        notes += [f"holds {_mib(line.share.memory)} MiB"] * bool(line.share.memory)
        texts += [*parts, text_line(", ".join(notes), right + 20 + _BAR, baseline, 11, class_="quiet")]
    about = f"{len(plan.styles)} layers over {plan.machine.ranks} ranks, coloured by how each is split"
    title = f"Splits over {plan.machine.ranks} x {plan.machine.cluster.device.name}"
    head, wide = _head(plan, title)
    return page(max(left + _WIDTH + _NOTES, wide), y + 20, title, about, [*head, *lines, *texts])


def _lanes(plan: SplitPlan, index: Mapping[str, int]) -> dict[int, int]:
    """Return the first free lane of each operator whose output skips others, by its index."""
    last = dict[int, int]()
    for i, line in enumerate(plan.lines):
        for name in line.operator.inputs:
            if index[name] < i - 1:
                last[index[name]] = i
    free = list[int]()  # by lane, the index from which it is free
    lanes = dict[int, int]()
    for source, end in sorted(last.items()):
        lane = next((number for number, start in enumerate(free) if start <= source), len(free))
        free[lane : lane + 1] = [end]
        lanes[source] = lane
    return lanes


def _head(plan: SplitPlan, title: str) -> tuple[list[str], float]:
    """Draw the title, the totals and the key; return them with their width."""
    parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in plan.parts.items())
    step = f"step {1e3 * plan.cost.seconds:.2f} ms: {parts}"
    memory = f"{plan.cost.bytes / 2**30:.2g} GiB of {plan.limit / 2**30:.2f} GiB"
    rules = [
        f"{name} {1e3 * cost.seconds:.2f} ms{'' if cost.bytes <= plan.limit else ' (does not fit)'}"
        for name, cost in plan.rules.items()
        if cost is not None
    ]
    texts = (
        f"{step}; each rank sends {_mib(plan.sent) or 0} MiB and holds {memory}",
        f"instead: {', '.join(rules)}",
    )
    drawn = [text_line(title, _LEFT, 30, 16, font_weight="bold")]
    drawn += [text_line(text, _LEFT, 52 + 18 * i, 11, class_="quiet") for i, text in enumerate(texts)]
    x = _LEFT
    shown = {colour_name(line) for line in plan.lines}
    for name, colour in SPLITS.items():
        if name in shown:
            drawn.append(element("rect", x=x, y=86, width=14, height=14, rx=3, fill=hexed(colour)))
            drawn.append(text_line(_ABOUT[name], x + 20, 97, 11))
            x += 44 + 5.6 * len(_ABOUT[name])
    return drawn, max(x, *(_LEFT * 2 + 5.6 * len(text) for text in texts))
