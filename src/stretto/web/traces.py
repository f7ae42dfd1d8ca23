"""A traced step of a run as an answer: measured beside predicted, lanes of what is no computation, and gaps.

A lane has the calls of one sort that were timed on a rank: messages, reductions, the optimiser, and others. A
gap is time between the rank's first and last call in which it computes nothing. Its cause is the call that
was timed then; what no call was timed in is Python's and the system's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from stretto.errors import StrettoError, counted
from stretto.program.action import Action, ActionKind
from stretto.program.text import parse_action
from stretto.view import colours
from stretto.view.measured import compare, measured_table, seconds
from stretto.view.panel import NAMES
from stretto.view.trace import COMPUTE, TraceEvent, read_trace
from stretto.web.answers import Answer, Question
from stretto.web.folder import StudioFolder

_LARGEST = 64 << 20  # bytes of a trace
_TRANSFERS = (ActionKind.SEND_F, ActionKind.SEND_B, ActionKind.RECV_F, ActionKind.RECV_B)
# of calls outside the program, by their labels in a trace (`run.train.trace`, `engine.pipeline.recorder`)
_CALLS = {"the batch": "batch", "the agreement": "agreement", "the update": "optimiser"}
_WAIT, _SENT = "wait ", "the wait for "
# cause of a gap, as the page says it, and the lane that shows its calls
_CAUSES = {
    "wait": ("wait for a message", "messages"),
    "message": ("sending and posting messages", "messages"),
    "reduction": ("reductions and gathers", "reductions"),
    "optimiser": ("optimiser", "optimiser"),
    "batch": ("reading the batch", "other calls"),
    "agreement": ("agreeing on the loss", "other calls"),
    "untimed": ("not timed: Python and the system", ""),
}
_LANES = ("messages", "reductions", "optimiser", "other calls")
_FILLS = dict(zip(_CAUSES, colours.GROUPS, strict=False))

Gap = tuple[str, float, float]  # cause, start, end


def trace_answer(folder: StudioFolder, question: Question) -> Answer:
    """Return the timelines of a traced step of a run, and tables of its gaps and actions."""
    place = folder.run(question["name"]) / "trace" / f"step-{int(question['step'])}"
    measured = read_trace(folder.read(place.with_suffix(".json"), _LARGEST)).events
    predicted = read_trace(folder.read(place.with_suffix(".predicted.json"), _LARGEST)).events
    work = [[event for event in events if event.thread == COMPUTE] for events in (predicted, measured)]
    comparison = compare(*work)
    ranks = range(1 + max(event.rank for event in measured))
    gaps = [_gaps([event for event in measured if event.rank == rank]) for rank in ranks]
    return {
        "timelines": _timelines(predicted, measured, gaps),
        "gaps": _gap_table(measured, gaps),
        "actions": measured_table(comparison),
    }


def _action(event: TraceEvent) -> Action | None:
    try:
        return parse_action(event.action)
    except StrettoError:
        return None


def _cause(event: TraceEvent) -> str:
    """Return the cause that a timed call is of a gap; "" for a computation."""
    if event.thread == COMPUTE:
        return ""
    if event.action in _CALLS:
        return _CALLS[event.action]
    if event.action.startswith(_WAIT):
        return "wait"
    action = _action(event)
    if event.action.startswith(_SENT) or (action is not None and action.kind in _TRANSFERS):
        return "message"
    return "reduction"  # other calls reduce and gather gradients and weights


def _gaps(events: Sequence[TraceEvent]) -> list[Gap]:
    """Return cause, start and end of each part of a rank's gaps, in order; calls of a rank do not overlap."""
    parts, end = list[Gap](), 0.0
    for event in sorted(events, key=lambda event: event.start):
        if event.start > end:
            parts.append(("untimed", end, event.start))
        if event.end > max(end, event.start) and (cause := _cause(event)):
            parts.append((cause, max(end, event.start), event.end))
        end = max(end, event.end)
    return parts


def _gap_table(measured: Sequence[TraceEvent], gaps: Sequence[Sequence[Gap]]) -> list[tuple[str, ...]]:
    """Return a header, and for each rank and cause the number of parts, their time, and that of the step."""
    step = max(event.end for event in measured)
    rows: list[tuple[str, ...]] = [("rank", "cause", "count", "time", "longest", "of the step")]
    for rank, parts in enumerate(gaps):
        times = defaultdict[str, list[float]](list)
        for cause, start, end in parts:
            times[cause].append(end - start)
        for cause, (text, _) in _CAUSES.items():
            if cause in times:
                total = sum(times[cause])
                numbers = (str(len(times[cause])), seconds(total), seconds(max(times[cause])))
                rows.append((str(rank), text, *numbers, f"{total / step:.1%}"))
    return rows


def _timelines(
    predicted: Sequence[TraceEvent], measured: Sequence[TraceEvent], gaps: Sequence[Sequence[Gap]]
) -> Answer:
    """Return a panel: for each rank what was predicted, what was measured, and the lanes that have calls.

    The prediction, which begins with the first action, is drawn from the first measured action on.
    """
    causes = [(event, cause) for event in measured if (cause := _cause(event))]
    lanes = [lane for lane in _LANES if lane in {_CAUSES[cause][1] for _, cause in causes}]
    rows = 2 + len(lanes)
    work = [
        [(event, action) for event in events if (action := _action(event)) and action.kind in NAMES]
        for events in (predicted, measured)
    ]
    shift = min(event.start for event, _ in work[1]) - min(event.start for event, _ in work[0])
    blocks = [
        _Block(rows * e.rank + track, e.start + late, e.end + late, action.kind, action)
        for track, late in ((0, shift), (1, 0.0))
        for e, action in work[track]
    ]
    for event, cause in causes:
        row = rows * event.rank + 2 + lanes.index(_CAUSES[cause][1])
        blocks.append(_Block(row, event.start, event.end, cause, event.action))
    for rank, parts in enumerate(gaps):
        for cause, start, end in parts:
            if cause == "untimed":
                blocks.append(_Block(rows * rank + 1, start, end, cause, _CAUSES[cause][0]))
    blocks.sort(key=lambda block: (block.row, block.start))
    used = {block.kind for block in blocks}
    kinds = [kind for kind in (*NAMES, *_CAUSES) if kind in used]
    end = max(block.end for block in blocks)
    scale, unit = (1e3, "ms") if end >= 1e-3 else (1e6, "us")
    actions = [block.call if isinstance(block.call, Action) else None for block in blocks]
    labels = ("predicted", "measured", *lanes)
    panel = {
        "title": "Measured step",
        "line": f"{counted(len(gaps), 'rank')}, {seconds(end)}; predicted from the first measured action on",
        "rows": [f"rank {rank} {label}" for rank in range(len(gaps)) for label in labels],
        "last": end * scale,
        "unit": unit,
        "chunks": 1,
        "tracks": rows,
        "held": [[] for _ in range(len(gaps) * rows)],
        "row": [block.row for block in blocks],
        "start": [float(f"{block.start * scale:.10g}") for block in blocks],
        "end": [float(f"{block.end * scale:.10g}") for block in blocks],
        "kind": [kinds.index(block.kind) for block in blocks],
        "stage": [action and action.stage for action in actions],
        "microbatch": [action and action.microbatch for action in actions],
        "name": [None if isinstance(block.call, Action) else block.call for block in blocks],
        "shade": [0 for _ in blocks],
    }
    looks = [*map(_look, kinds)]
    return {"end": end * scale, "left": 150, "held": 0, "kinds": looks, "note": "", "panels": [panel]}


class _Block(NamedTuple):
    """A block of the picture, in seconds; `call` is an action of the program, or the name of another call."""

    row: int
    start: float
    end: float
    kind: str
    call: Action | str


def _look(kind: str) -> Answer:
    """Return the name and colour of a kind of block, for the legend."""
    is_cause = kind in _CAUSES
    colour = _FILLS[kind] if is_cause else colours.of_kind(kind)
    shade = {"fill": colours.hexed(colour), "ink": colours.text_on(colour)}
    name = _CAUSES[kind][0] if is_cause else NAMES[ActionKind(kind)]
    return {"kind": kind, "name": name, "action": not is_cause, "shades": [shade]}
