"""Predicted and measured timelines of one program, on one time axis and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.program.action import Action, ActionKind
from stretto.program.text import parse_action
from stretto.view.page import timeline_page
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
SPAN = "first to last"  # from the pipeline's first to its last action, before reductions and the optimiser


@dataclass(frozen=True)
class Difference:
    """The actions of one kind.

    Attributes:
        predicted, measured: total time in seconds.
    """

    kind: ActionKind
    count: int
    predicted: float
    measured: float

    @property
    def predicted_mean(self) -> float:
        return self.predicted / self.count

    @property
    def measured_mean(self) -> float:
        return self.measured / self.count

    @property
    def relative(self) -> float:
        """Measured / predicted - 1; 0 if both are 0, infinite if only the prediction is 0."""
        return _relative(self.predicted, self.measured)


@dataclass(frozen=True)
class TimelineComparison:
    """Predicted and measured time of a step, and of its actions by kind.

    Attributes:
        predicted_step, measured_step: seconds from the start of the first action to the end of the last.
    """

    predicted_step: float
    measured_step: float
    kinds: tuple[Difference, ...]

    @property
    def relative(self) -> float:
        """Measured / predicted - 1 for the step."""
        return _relative(self.predicted_step, self.measured_step)


def compare(predicted: Iterable[TraceEvent], measured: Iterable[TraceEvent]) -> TimelineComparison:
    """Return the differences between two timelines of one program.

    Forwards and backwards must be the same in both. Other actions, such as sends and reductions, count if
    both timelines have them; events that are not actions of a program are ignored. A step lasts from the
    first start to the last end of any action.

    Raises:
        StrettoError: an F, B, I or W is missing from a timeline, is on another rank, or occurs twice.
    """
    expected, actual = _by_action(predicted, "predicted"), _by_action(measured, "measured")
    for spans, others, name in ((expected, actual, "measured"), (actual, expected, "predicted")):
        missing = next((key for key in spans if key not in others and key[1].kind.is_compute), None)
        if missing is not None:
            raise StrettoError(
                f"rank {missing[0]} action {missing[1]} is not in the {name} timeline",
                hint="compare timelines of the same program",
            )
    totals: dict[ActionKind, Difference] = {}
    for key, (start, end) in expected.items():
        if key in actual:
            kind, duration = key[1].kind, actual[key][1] - actual[key][0]
            total = totals.get(kind, Difference(kind, 0, 0.0, 0.0))
            totals[kind] = Difference(
                kind, total.count + 1, total.predicted + (end - start), total.measured + duration
            )
    kinds = tuple(totals[kind] for kind in ActionKind if kind in totals)
    predicted_step, measured_step = (
        max(end for _, end in spans.values()) - min(start for start, _ in spans.values())
        for spans in (expected, actual)
    )
    return TimelineComparison(predicted_step, measured_step, kinds)


def measured_table(comparison: TimelineComparison) -> list[tuple[str, ...]]:
    """Return a header, a row per kind of action, and a row from first to last action; times have units."""
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
    """One part of a step.

    Attributes:
        predicted, measured: seconds, or None if not predicted or not timed.
        within: True if it is included in the parts before it, and does not count in the sum.
    """

    name: str
    predicted: float | None
    measured: float | None
    within: bool = False


def parts_table(parts: Sequence[StepPart]) -> list[tuple[str, ...]]:
    """Return a header, a row per part, and a row with their sum, the step; times have units."""
    rows: list[tuple[str, ...]] = [_PARTS_HEAD]
    counted = [part for part in parts if not part.within]
    measured = sum(part.measured or 0.0 for part in counted)
    predicted = [part.predicted for part in counted if part.predicted is not None]
    step = StepPart("step", sum(predicted) if predicted else None, measured)
    for part in (*parts, step):
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


def measured_text(comparison: TimelineComparison) -> str:
    """Return the table as lines of text."""
    return aligned(measured_table(comparison))


def measured_panel(
    predicted: Sequence[TraceEvent],
    measured: Sequence[TraceEvent],
    name: str,
    comparison: TimelineComparison | None = None,
) -> Panel:
    """Return two rows per rank, predicted above measured, each starting at its first action."""
    comparison = comparison or compare(predicted, measured)
    longest = max(comparison.predicted_step, comparison.measured_step)
    scale, unit = _unit(longest)
    ranks = max(event.rank for event in predicted) + 1
    stages: list[list[int]] = [[] for _ in range(ranks)]
    drawn: list[TimelineBlock] = []
    for track, events in enumerate((predicted, measured)):
        shown = [pair for pair in _actions(events) if pair[1].kind in NAMES]
        zero = min((event.start for event, _ in shown), default=0.0)
        for event, action in shown:
            if action.stage not in stages[event.rank]:
                stages[event.rank].append(action.stage)
            start, end = (event.start - zero) * scale, (event.end - zero) * scale
            drawn.append(TimelineBlock(row=2 * event.rank + track, start=start, end=end, action=action))
    chunk = {stage: i for of_rank in stages for i, stage in enumerate(sorted(of_rank))}
    drawn = [replace(block, chunk=chunk[block.stage]) for block in drawn]
    labels = [PanelRow(f"rank {rank} {name}") for rank in range(ranks) for name in ("predicted", "measured")]
    line = (
        f"first to last action: predicted {seconds(comparison.predicted_step)}, measured "
        f"{seconds(comparison.measured_step)} ({_percent(comparison.relative)})"
    )
    return Panel(
        title=name,
        line=line,
        rows=tuple(labels),
        blocks=tuple(stacked(drawn)),
        end=longest * scale,
        chunks=max(map(len, stages)),
        unit=unit,
        tracks=2,
    )


def measured_html(
    predicted: Sequence[TraceEvent],
    measured: Sequence[TraceEvent],
    name: str,
    parts: Sequence[StepPart] = (),
) -> str:
    """Return a page with both timelines of the program `name` on one axis, the parts of the step, and the
    kinds of action.
    """
    comparison = compare(predicted, measured)
    return timeline_page(
        f"{name}: predicted and measured",
        [measured_panel(predicted, measured, name, comparison)],
        above=[("Parts of the step", parts_table(parts))] if parts else [],
        below=[("Figures", measured_table(comparison))],
    )


def seconds(time: float) -> str:
    """Return a time with its unit: "1.5 ms"."""
    scale, unit = _unit(abs(time))
    return f"{time * scale:.4g} {unit}"


def _unit(longest: float) -> tuple[float, str]:
    """Return the number of units per second, and the unit, for a readable time."""
    if longest >= 0.99995 or longest == 0:  # rounds to 1
        return 1.0, "s"
    return (1e3, "ms") if longest >= 0.99995e-3 else (1e6, "us")


def _percent(share: float) -> str:
    """Return a difference as text: in percent below 100%, otherwise as a multiple."""
    return f"{share:+.1%}" if share < 1 else f"{1 + share:.3g}x"


def _relative(predicted: float, measured: float) -> float:
    if predicted == 0:
        return 0.0 if measured == 0 else float("inf")
    return measured / predicted - 1


def _actions(events: Iterable[TraceEvent]) -> list[tuple[TraceEvent, Action]]:
    """Return the events that are actions of a program."""
    actions: list[tuple[TraceEvent, Action]] = []
    for event in events:
        try:
            actions.append((event, parse_action(event.action)))
        except StrettoError:
            continue
    return actions


def _by_action(events: Iterable[TraceEvent], name: str) -> dict[tuple[int, Action], tuple[float, float]]:
    spans: dict[tuple[int, Action], tuple[float, float]] = {}
    for event, action in _actions(events):
        key = (event.rank, action)
        if key in spans and action.kind.is_compute:
            raise StrettoError(
                f"rank {event.rank} has action {action} twice in the {name} timeline",
                hint="give the events of one step",
            )
        spans[key] = (event.start, event.end)
    if not spans:
        raise StrettoError(f"the {name} timeline has no action", hint="give the events of one step")
    return spans
