"""Write timelines as Chrome trace files, for Perfetto and chrome://tracing, and read them.

Replayed and measured timelines have the same format: the JSON object format of the Trace Event Format
(Google, 2016), with a process per rank, a thread for compute and one for each of several overlapping
communications, complete events (`X`) in microseconds, flow arrows from sends to receives, and a counter of
the rank's live activations. `otherData` has format and version, the program's name, and its source, "replay"
or "measured".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from stretto.errors import StrettoError
from stretto.program.action import Action, ActionKind
from stretto.program.messages import receive_of
from stretto.program.text import parse_action
from stretto.versions import TRACE
from stretto.view.panel import Curve, activation_curves

if TYPE_CHECKING:
    from stretto.program.replay import Timeline


Point = tuple[int, int, float]  # rank, thread, seconds

# viewers attach an arrow to the event that contains its time, which excludes the event's end
_INSIDE = 1e-9


def flows(shown: Iterable[tuple[TraceEvent, int]]) -> Iterator[tuple[Point, Point]]:
    """Yield start and end of the arrow of every message between two ranks.

    It leads from send to receive if both are in the trace and the message takes time; otherwise from the
    forward or backward that produces the message to the one that consumes it.

    Args:
        shown: events, each with the index of its thread.
    """
    shown_as: dict[Action, tuple[TraceEvent, int]] = {}
    for event, thread in shown:
        try:
            shown_as.setdefault(parse_action(event.action), (event, thread))
        except StrettoError:
            continue
    for action, (event, thread) in shown_as.items():
        stage, kind, microbatch = action
        forward = kind is ActionKind.F
        if not forward and kind is not ActionKind.B and kind is not ActionKind.I:
            continue
        send = Action(stage, ActionKind.SEND_F if forward else ActionKind.SEND_B, microbatch)
        between = _transfer(shown_as.get(send), shown_as.get(receive_of(send)))
        if between is not None:
            yield between
            continue
        step, kinds = (1, (ActionKind.F,)) if forward else (-1, (ActionKind.B, ActionKind.I))
        consumer = next(
            (shown_as[a] for k in kinds if (a := Action(stage + step, k, microbatch)) in shown_as), None
        )
        if consumer is not None and consumer[0].rank != event.rank and event.end > event.start:
            end = max(consumer[0].start, event.end - _INSIDE)
            yield (event.rank, thread, event.end - _INSIDE), (consumer[0].rank, consumer[1], end)


def _transfer(
    send: tuple[TraceEvent, int] | None, receive: tuple[TraceEvent, int] | None
) -> tuple[Point, Point] | None:
    if send is None or receive is None:
        return None
    (sent, out), (received, to) = send, receive
    begin = max(sent.start, received.start)
    if received.end - begin <= _INSIDE or sent.end <= sent.start:
        return None
    return (sent.rank, out, sent.start), (received.rank, to, begin)


FORMAT, VERSION = TRACE.name, TRACE.version
SOURCES = ("replay", "measured")
COMPUTE, COMMUNICATION = "compute", "communication"

_US = 1e6  # the format's unit of time is the microsecond
_COUNTER = "activations held"
_ON_THE_RANK = (
    ActionKind.F,
    ActionKind.B,
    ActionKind.I,
    ActionKind.W,
    ActionKind.UPDATE,
    ActionKind.RECOMPUTE,
)


class TraceEvent(NamedTuple):
    """One event of a rank, in seconds from the start of the trace.

    `action` is the text of an action, such as "2F0", or another text ("optimizer", "data"). Events of the
    thread "compute" do not overlap; those of other threads may.
    """

    rank: int
    action: str
    start: float
    end: float
    thread: str = COMPUTE


@dataclass(frozen=True)
class Trace:
    """Events of all ranks.

    Attributes:
        name: name of the program.
        source: "replay" or "measured".
        activations: live activations over time, in seconds, by rank.
    """

    events: tuple[TraceEvent, ...]
    name: str
    source: str = "replay"
    activations: Mapping[int, Curve] = field(default_factory=dict[int, Curve])


def trace_of(timeline: Timeline, second: float = 1e-3) -> Trace:
    """Return the trace of a replayed program; a unit of its costs is `second` seconds."""
    events = tuple(
        TraceEvent(
            event.rank,
            str(event.action),
            event.start * second,
            event.end * second,
            COMPUTE if event.action.kind in _ON_THE_RANK else COMMUNICATION,
        )
        for event in (*timeline.events, *timeline.tail)
    )
    curves = {
        rank: tuple((time * second, value) for time, value in curve)
        for rank, curve in enumerate(activation_curves(timeline))
    }
    return Trace(events, timeline.program.name, "replay", curves)


def write_trace(trace: Trace) -> str:
    """Return the trace as the text of a Chrome trace file, with one event per line; `read_trace` reads it."""
    # place overlapping events on separate threads, since viewers show those of one thread as nested calls
    ends: dict[tuple[int, str], list[float]] = {}
    placed: list[tuple[TraceEvent, str]] = []
    for event in sorted(trace.events, key=lambda event: (event.start, event.end)):
        lanes = ends.setdefault((event.rank, event.thread), [])
        slack = 1e-12 + 1e-13 * abs(event.start)  # rounding
        lane = next((lane for lane, end in enumerate(lanes) if end <= event.start + slack), len(lanes))
        lanes[lane : lane + 1] = [event.end]
        placed.append((event, event.thread if lane == 0 else f"{event.thread} {lane + 1}"))
    threads: dict[tuple[int, str], int] = {}
    count: dict[int, int] = {}
    for rank, name in sorted(
        {(event.rank, name) for event, name in placed}, key=lambda key: (key[0], key[1] != COMPUTE, key[1])
    ):
        threads[rank, name] = count.get(rank, 0)
        count[rank] = threads[rank, name] + 1
    shown = [(event, threads[event.rank, name]) for event, name in placed]
    events: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in trace.events} | set(trace.activations)):
        events.append(_named("process_name", rank, 0, name=f"rank {rank}"))
        events.append(_named("process_sort_index", rank, 0, sort_index=rank))
    for (rank, name), thread in threads.items():
        events.append(_named("thread_name", rank, thread, name=name))
        events.append(_named("thread_sort_index", rank, thread, sort_index=thread))
    for event, thread in shown:
        place = {"ph": "X", "pid": event.rank, "tid": thread, "cat": event.thread}
        time = {"ts": event.start * _US, "dur": (event.end - event.start) * _US}
        events.append({"name": event.action, **place, **time, "args": _arguments(event.action)})
    for number, (start, end) in enumerate(flows(shown)):
        for phase, (rank, thread, time) in (("s", start), ("f", end)):
            flow = {
                "name": "message",
                "cat": "message",
                "ph": phase,
                "id": number,
                "pid": rank,
                "tid": thread,
            }
            events.append({**flow, "ts": time * _US, **({"bp": "e"} if phase == "f" else {})})
    for rank, curve in trace.activations.items():
        for time, value in curve:
            counter = {"name": _COUNTER, "ph": "C", "pid": rank, "tid": 0, "ts": time * _US}
            events.append({**counter, "args": {"microbatches": value}})
    about = {"format": FORMAT, "version": VERSION, "name": trace.name, "source": trace.source}
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"otherData":{json.dumps(about)},"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def read_trace(text: str) -> Trace:
    """Read the text of `write_trace`; events are in the file's order, with times in full precision.

    Raises:
        StrettoError: the text is not JSON (with line and column), has another format or version, or a field
            is missing or of the wrong type.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno} column {error.colno}"
        raise StrettoError(f"{position}: {error.msg}", hint="is it a trace file?") from None
    except (RecursionError, ValueError) as error:
        raise StrettoError(f"the text is not a trace: {error}") from None
    about = data.get("otherData") if isinstance(data, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise StrettoError(
            f"the text is not a trace of stretto: otherData has no format={FORMAT!r}",
            hint="give a file that stretto wrote with --trace",
        )
    TRACE.check(about.get("version"), "the text")
    if about.get("source") not in SOURCES:
        raise StrettoError(f"source is {about.get('source')!r}, must be one of {', '.join(SOURCES)}")
    rows = data.get("traceEvents")
    if not isinstance(rows, list):
        raise StrettoError("traceEvents is missing or not a list", hint="write the file again")
    events: list[TraceEvent] = []
    curves: dict[int, list[tuple[float, float]]] = {}
    for i, row in enumerate(cast(list[Any], rows)):
        path = f"traceEvents[{i}]"
        if not isinstance(row, dict):
            raise StrettoError(f"{path} is {row!r}, must be an object")
        if row.get("ph") == "X":
            start = _time(path, row, "ts")
            end = start + _time(path, row, "dur")
            name, thread = _text(path, row, "name"), _text(path, row, "cat")
            events.append(TraceEvent(_rank(path, row), name, start / _US, end / _US, thread))
        elif row.get("ph") == "C" and row.get("name") == _COUNTER:
            value = _time(f"{path}.args", row.get("args") or {}, "microbatches")
            curves.setdefault(_rank(path, row), []).append((_time(path, row, "ts") / _US, value))
    activations = {rank: tuple(curve) for rank, curve in curves.items()}
    return Trace(tuple(events), str(about.get("name", "")), str(about["source"]), activations)


def _named(kind: str, rank: int, thread: int, **arguments: str | int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": arguments}


def _arguments(text: str) -> dict[str, Any]:
    """Return stage, kind and microbatch if the text is an action; otherwise an empty dict."""
    try:
        stage, kind, microbatch = parse_action(text)
    except StrettoError:
        return {}
    return {"stage": stage, "kind": str(kind), "microbatch": microbatch}


def _time(path: str, row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise StrettoError(f"{path}.{key} is {value!r}, must be a number of at least 0")
    return float(value)


def _text(path: str, row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise StrettoError(f"{path}.{key} is {value!r}, must be text")
    return value


def _rank(path: str, row: Mapping[str, Any]) -> int:
    value = row.get("pid")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StrettoError(f"{path}.pid is {value!r}, must be a rank")
    return value
