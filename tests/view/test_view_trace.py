"""Chrome traces have what viewers need, and are read as written."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import schedule, simulate
from stretto.errors import StrettoError
from stretto.program import lower, names
from stretto.program.replay import Costs
from stretto.view.trace import COMMUNICATION, COMPUTE, Trace, TraceEvent, read_trace, trace_of, write_trace

EVENT = st.builds(
    lambda rank, action, start, length, thread: TraceEvent(rank, action, start, start + length, thread),
    st.integers(0, 4),
    st.sampled_from(["0F0", "1B3", "2SEND_F1", "3RECV_F1", "optimizer", 'a "b"\n']),
    st.floats(0, 1e4),
    st.floats(0, 10),
    st.sampled_from([COMPUTE, COMMUNICATION, "data"]),
)


def of_phase(text: str, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == phase]


def key(event: TraceEvent) -> tuple[float, ...]:
    return event.rank, event.start, event.end


@given(st.lists(EVENT, max_size=30), st.sampled_from(["replay", "measured"]))
def test_what_is_written_is_read(events: list[TraceEvent], source: str) -> None:
    trace = Trace(tuple(events), "any name", source, {1: ((0.0, 0.5), (2.0, 1.5))})
    back = read_trace(write_trace(trace))
    assert (back.name, back.source) == ("any name", source)
    assert [e[:2] for e in sorted(back.events)] == [e[:2] for e in sorted(events)]
    for written, read in zip(sorted(events, key=key), sorted(back.events, key=key), strict=True):
        assert read[2:4] == pytest.approx(written[2:4], rel=1e-12, abs=1e-12)
    assert sorted(e.thread for e in back.events) == sorted(e.thread for e in events)
    assert back.activations == trace.activations


@given(st.lists(EVENT, max_size=30))
def test_no_two_events_of_a_thread_overlap(events: list[TraceEvent]) -> None:
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in of_phase(write_trace(Trace(tuple(events), "x")), "X"):
        rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        for (_, end), (start, _) in pairwise(sorted(row)):
            assert start >= end - 1e-2  # microseconds, of up to 1e10


def test_a_replay_as_viewers_read_it() -> None:
    timeline = simulate(lower(schedule("1f1b", 4, 8)), Costs(hop=0.5))
    text = write_trace(trace_of(timeline, second=1e-3))
    about = json.loads(text)
    assert about["displayTimeUnit"] == "ms"
    assert about["otherData"] == {
        "format": "stretto.trace",
        "version": 1,
        "name": "1f1b",
        "source": "replay",
    }
    named = {(e["pid"], e["tid"], e["name"]): e["args"] for e in of_phase(text, "M")}
    assert [named[rank, 0, "process_name"]["name"] for rank in range(4)] == [f"rank {r}" for r in range(4)]
    assert named[0, 0, "thread_name"] == {"name": "compute"}
    assert named[0, 1, "thread_name"] == {"name": "communication"}
    events = of_phase(text, "X")
    assert len(events) == len(timeline.events)
    first = next(event for event in events if event["name"] == "0F1")
    assert (first["ts"], first["dur"], first["tid"]) == (1000, 1000, 0)  # a cost of 1 is a millisecond
    assert first["args"] == {"stage": 0, "kind": "F", "microbatch": 1}
    peaks = [max(e["args"]["microbatches"] for e in of_phase(text, "C") if e["pid"] == r) for r in range(4)]
    assert peaks == timeline.peak_activations


@pytest.mark.parametrize("name", [name for name in names() if name != "auto"])
@pytest.mark.parametrize("sent", [True, False])
def test_an_arrow_for_every_message_from_event_to_event(name: str, sent: bool) -> None:
    program = schedule(name, 4, 5)
    timeline = simulate(lower(program) if sent else program, Costs(hop=0.5))
    text = write_trace(trace_of(timeline))
    starts = {event["id"]: event for event in of_phase(text, "s")}
    ends = {event["id"]: event for event in of_phase(text, "f")}
    assert starts.keys() == ends.keys()
    assert len(starts) == timeline.transfers
    events = of_phase(text, "X")
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert start["pid"] != end["pid"]
        assert start["ts"] <= end["ts"]
        for point, kinds in ((start, "SEND"), (end, "RECV")):
            around = [
                event
                for event in events
                if (event["pid"], event["tid"]) == (point["pid"], point["tid"])
                and event["ts"] - 1e-6 <= point["ts"] < event["ts"] + event["dur"] + 1e-6
            ]
            assert around
            if sent:
                assert any(event["args"]["kind"].startswith(kinds) for event in around)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"otherData": {}}, "format='stretto.trace'"),
        (
            {"otherData": {"format": "stretto.trace", "version": 9}},
            "version 9, written by a newer Stretto",
        ),
        ({"otherData": {"format": "stretto.trace", "version": 1, "source": "dream"}}, "'dream'"),
        ({"traceEvents": 3}, "traceEvents"),
        ({"traceEvents": [3]}, r"traceEvents\[0\] is 3"),
        ({"traceEvents": [{"ph": "X", "ts": -1}]}, r"traceEvents\[0\].ts is -1"),
        ({"traceEvents": [{"ph": "X", "ts": 0}]}, r"traceEvents\[0\].dur is None"),
        ({"traceEvents": [{"ph": "X", "ts": 0, "dur": True}]}, "dur is True"),
        ({"traceEvents": [{"ph": "X", "ts": 0, "dur": 1, "name": 4}]}, "name is 4"),
        (
            {"traceEvents": [{"ph": "X", "ts": 0, "dur": 1, "name": "a", "cat": "b", "pid": "x"}]},
            "pid is 'x'",
        ),
    ],
)
def test_bad_traces_are_refused_by_field(change: dict[str, Any], says: str) -> None:
    good = {
        "otherData": {"format": "stretto.trace", "version": 1, "name": "", "source": "replay"},
        "traceEvents": [],
    }
    assert read_trace(json.dumps(good)).events == ()
    with pytest.raises(StrettoError, match=says):
        read_trace(json.dumps({**good, **change}))


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000, '{"otherData": {"format": NaN}}'])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(StrettoError):
        read_trace(text)
