"""Predicted and measured timelines of one program, on one time axis and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.program.action import Action, ActionKind
from stretto.program.text import parse_action
from stretto.view.html import panels_html, table_html
from stretto.view.panel import NAMES, Panel, PanelRow, TimelineBlock, aligned, stacked

if TYPE_CHECKING:
    from stretto.view.trace import TraceEvent

_HEAD = (
    "action",
    "count",
    "predicted mean",
    "measured mean",
    "difference",
    "predicted total",
    "measured total",
)
_PARTS_HEAD = ("part of the step", "predicted", "measured", "difference", "of the step")
SPAN = "first to last"  # action of the pipeline: without reductions, the optimiser and what follows them


@dataclass(frozen=True)
class Difference:
    """Actions of one kind, predicted and measured; means and totals in seconds."""

    kind: ActionKind
    count: int
    predicted: float  # total
    measured: float  # total

    @property
    def predicted_mean(self) -> float:
        return self.predicted / self.count

    @property
    def measured_mean(self) -> float:
        return self.measured / self.count

    @property
    def relative(self) -> float:
        """Measured over predicted, minus 1; 0 where both are 0, infinite where only the prediction is."""
        return _relative(self.predicted, self.measured)


@dataclass(frozen=True)
class Comparison:
    """The actions of a step predicted and measured, in seconds, and the differences by kind of action.

    Attributes:
        predicted_step, measured_step: from the start of the first action to the end of the last.
    """

    predicted_step: float
    measured_step: float
    kinds: tuple[Difference, ...]

    @property
    def relative(self) -> float:
        """The step measured over predicted, minus 1."""
        return _relative(self.predicted_step, self.measured_step)


def compare(predicted: Iterable[TraceEvent], measured: Iterable[TraceEvent]) -> Comparison:
    """The differences between two timelines of one program.

    Forwards and backwards must be the same in both. Other actions, such as sends and reductions, count where
    both timelines have them; events that are not actions of a program are ignored. A step lasts from the
    first start to the last end of any action.

    Raises:
        StrettoError: an F, B, I or W is missing in one of them, on another rank, or there twice.
    """
    ours, theirs = _by_action(predicted, "predicted"), _by_action(measured, "measured")
    for one, other, where in ((ours, theirs, "measured"), (theirs, ours, "predicted")):
        missing = next((key for key in one if key not in other and key[1].kind.is_compute), None)
        if missing is not None:
            raise StrettoError(
                f"rank {missing[0]} action {missing[1]} is not in the {where} timeline",
                hint="compare timelines of the same program",
            )
    totals: dict[ActionKind, list[float]] = {}
    for key, (start, end) in ours.items():
        if key in theirs:
            total = totals.setdefault(key[1].kind, [0, 0.0, 0.0])
            total[0] += 1
            total[1] += end - start
            total[2] += theirs[key][1] - theirs[key][0]
    kinds = tuple(
        Difference(k, int(totals[k][0]), totals[k][1], totals[k][2]) for k in ActionKind if k in totals
    )
    return Comparison(_length(ours.values()), _length(theirs.values()), kinds)


def measured_table(comparison: Comparison) -> list[tuple[str, ...]]:
    """A header, a row for every kind of action, and one from first to last; times with units."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for kind in comparison.kinds:
        name = f"{kind.kind} {NAMES[kind.kind]}" if kind.kind in NAMES else str(kind.kind)
        means = (seconds(kind.predicted_mean), seconds(kind.measured_mean), _percent(kind.relative))
        rows.append((name, str(kind.count), *means, seconds(kind.predicted), seconds(kind.measured)))
    steps = (seconds(comparison.predicted_step), seconds(comparison.measured_step))
    rows.append((SPAN, "1", *steps, _percent(comparison.relative), *steps))
    return rows


@dataclass(frozen=True)
class StepPart:
    """One part of a step, in seconds; None: not predicted, or not timed.

    Attributes:
        within: it is contained in the parts before it and does not count in the sum.
    """

    name: str
    predicted: float | None
    measured: float | None
    within: bool = False


def parts_table(parts: Sequence[StepPart]) -> list[tuple[str, ...]]:
    """A header, a row for each part, and their sum, which is the step; times with units."""
    rows: list[tuple[str, ...]] = [_PARTS_HEAD]
    counted = [part for part in parts if not part.within]
    measured = sum(part.measured or 0.0 for part in counted)
    known = [part.predicted for part in counted if part.predicted is not None]
    whole = StepPart("step", sum(known) if known else None, measured)
    for part in (*parts, whole):
        rows.append(
            (
                f"  {part.name}" if part.within else part.name,
                "" if part.predicted is None else seconds(part.predicted),
                "" if part.measured is None else seconds(part.measured),
                _percent(part.measured / part.predicted - 1)
                if part.predicted and part.measured is not None
                else "",
                "" if part.measured is None or not measured else f"{part.measured / measured:.1%}",
            )
        )
    return rows


def measured_text(comparison: Comparison) -> str:
    """The table as lines of text."""
    return aligned(measured_table(comparison))


def measured_panel(
    predicted: Sequence[TraceEvent],
    measured: Sequence[TraceEvent],
    name: str,
    comparison: Comparison | None = None,
) -> Panel:
    """Two rows per rank, predicted above measured, each starting at its first action."""
    comparison = comparison or compare(predicted, measured)
    longest = max(comparison.predicted_step, comparison.measured_step)
    scale, unit = _unit(longest)
    ranks = max(event.rank for event in predicted) + 1
    stages: list[list[int]] = [[] for _ in range(ranks)]
    drawn: list[TimelineBlock] = []
    for track, events in enumerate((predicted, measured)):
        shown = [(e, a) for e, a in _actions(events) if a.kind in NAMES]
        zero = min((event.start for event, _ in shown), default=0.0)
        for event, action in shown:
            if action.stage not in stages[event.rank]:
                stages[event.rank].append(action.stage)
            start, end = (event.start - zero) * scale, (event.end - zero) * scale
            drawn.append(TimelineBlock(row=2 * event.rank + track, start=start, end=end, action=action))
    chunk = {s: at for held in stages for at, s in enumerate(sorted(held))}
    drawn = [
        TimelineBlock(row=b.row, start=b.start, end=b.end, action=b.action, chunk=chunk[b.stage])
        for b in drawn
    ]
    labels = [PanelRow(f"rank {rank} {what}") for rank in range(ranks) for what in ("predicted", "measured")]
    line = (
        f"first to last action: predicted {seconds(comparison.predicted_step)}, measured "
        f"{seconds(comparison.measured_step)}"
    )
    line += f" ({_percent(comparison.relative)})"
    most = max(len(held) for held in stages)
    blocks = tuple(stacked(drawn))
    return Panel(
        title=name,
        line=line,
        rows=tuple(labels),
        blocks=blocks,
        end=longest * scale,
        chunks=most,
        unit=unit,
        tracks=2,
    )


def measured_html(
    predicted: Sequence[TraceEvent],
    measured: Sequence[TraceEvent],
    name: str,
    parts: Sequence[StepPart] = (),
) -> str:
    """A page with both timelines of the program `name` on one axis, the parts of the step, and the kinds of
    action.
    """
    comparison = compare(predicted, measured)
    panel = measured_panel(predicted, measured, name, comparison)
    title = f"{name}: predicted and measured"
    above = table_html(parts_table(parts), "Parts of the step") if parts else ""
    return panels_html([panel], title, measured_table(comparison), above)


def seconds(time: float) -> str:
    """A time with its unit: "1.5 ms"."""
    scale, unit = _unit(abs(time))
    return f"{time * scale:.4g} {unit}"


def _unit(longest: float) -> tuple[float, str]:
    """A unit in which such a time is readable, and how many of it make a second."""
    if longest >= 0.99995 or longest == 0:  # rounds to 1
        return 1.0, "s"
    return (1e3, "ms") if longest >= 0.99995e-3 else (1e6, "us")


def _percent(share: float) -> str:
    """A difference; from twice as much on, as a multiple."""
    return f"{share:+.1%}" if share < 1 else f"{1 + share:.3g}x"


def _relative(predicted: float, measured: float) -> float:
    if predicted == 0:
        return 0.0 if measured == 0 else float("inf")
    return measured / predicted - 1


def _actions(events: Iterable[TraceEvent]) -> list[tuple[TraceEvent, Action]]:
    """The events that are actions of a program."""
    actions: list[tuple[TraceEvent, Action]] = []
    for event in events:
        try:
            actions.append((event, parse_action(event.action)))
        except StrettoError:
            continue
    return actions


def _by_action(events: Iterable[TraceEvent], what: str) -> dict[tuple[int, Action], tuple[float, float]]:
    spans: dict[tuple[int, Action], tuple[float, float]] = {}
    for event, action in _actions(events):
        key = (event.rank, action)
        if key in spans and action.kind.is_compute:
            raise StrettoError(
                f"rank {event.rank} has action {action} twice in the {what} timeline",
                hint="give the events of one step",
            )
        spans[key] = (event.start, event.end)
    if not spans:
        raise StrettoError(f"the {what} timeline has no action", hint="give the events of one step")
    return spans


def _length(spans: Iterable[tuple[float, float]]) -> float:
    both = list(spans)
    return max(end for _, end in both) - min(start for start, _ in both)
