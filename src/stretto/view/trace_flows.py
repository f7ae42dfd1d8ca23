"""The arrows of a trace: from what sends a message to what receives it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.schedule.action import Action, Kind
from stretto.schedule.messages import receive_of
from stretto.schedule.text import parse_action

if TYPE_CHECKING:
    from stretto.view.trace import TraceEvent

Point = tuple[int, int, float]  # rank, thread, seconds

# viewers tie an arrow to the event around its time, whose end is no longer in it
_INSIDE = 1e-9


def flows(shown: Iterable[tuple[TraceEvent, int]]) -> Iterator[tuple[Point, Point]]:
    """Start and end of the arrow of every message between two ranks.

    From send to receive where both are in the trace and the message takes time; else from the forward or
    backward that makes the message to the one that waits for it.

    Args:
        shown: events and the number of the thread on which each is shown.
    """
    found: dict[Action, tuple[TraceEvent, int]] = {}
    for event, thread in shown:
        try:
            found.setdefault(parse_action(event.action), (event, thread))
        except StrettoError:
            continue
    for action, (event, thread) in found.items():
        stage, kind, microbatch = action
        forward = kind is Kind.F
        if not forward and kind is not Kind.B and kind is not Kind.I:
            continue
        send = Action(stage, Kind.SEND_F if forward else Kind.SEND_B, microbatch)
        between = _transfer(found.get(send), found.get(receive_of(send)))
        if between is not None:
            yield between
            continue
        step, kinds = (1, (Kind.F,)) if forward else (-1, (Kind.B, Kind.I))
        taker = next((found[a] for k in kinds if (a := Action(stage + step, k, microbatch)) in found), None)
        if taker is not None and taker[0].rank != event.rank and event.end > event.start:
            end = max(taker[0].start, event.end - _INSIDE)
            yield (event.rank, thread, event.end - _INSIDE), (taker[0].rank, taker[1], end)


def _transfer(
    send: tuple[TraceEvent, int] | None, receive: tuple[TraceEvent, int] | None
) -> tuple[Point, Point] | None:
    if send is None or receive is None:
        return None
    (sent, out), (came, to) = send, receive
    begin = max(sent.start, came.start)
    if came.end - begin <= _INSIDE or sent.end <= sent.start:
        return None
    return (sent.rank, out, sent.start), (came.rank, to, begin)
