"""The critical path: what the step's end was waiting for, back to the step's start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from stretto.schedule.action import COMPUTE, Action, Kind
from stretto.schedule.messages import needed_by, send_of
from stretto.schedule.waits import tied_arrivals
from stretto.simulate.event import Event
from stretto.simulate.pairs import steps_of
from stretto.simulate.prices import BESIDE, Prices

if TYPE_CHECKING:
    from stretto.simulate.timeline import Timeline

Reason = Literal["start", "order", "message", "queue", "reduction", "barrier", "beside"]

_MOVING = COMPUTE | {Kind.RECOMPUTE, Kind.UPDATE, Kind.REDUCE_TIED}  # what a rank's clock passes through
_BACKWARD = frozenset({Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE})


class Cause(NamedTuple):
    """An event, and what held it up until the time at which it started: the event before it on the path.

    `start`: nothing; `order`: its rank was busy; `message`: its input came, or the two sides of a message
    were ready; `queue`: another message on the link; `reduction`: another reduction of gradients on its rank,
    or ranks that had to come to one; `barrier`: all ranks had to be done; `beside`: a gather or a move of
    activations.
    """

    event: Event
    reason: Reason


class _Place(NamedTuple):
    """An action of an order; of the tail, with rank -1."""

    rank: int
    at: int


class _Held(NamedTuple):
    """Until when `by` held an event up."""

    until: float
    by: _Place
    reason: Reason


def critical_path(line: Timeline) -> list[Cause]:
    """From the event with the latest end back, always to what held it up the longest; in order of time."""
    path = _Path(line)
    place: _Place | None = path.last()
    found: list[Cause] = []
    seen: set[_Place] = set()
    while place is not None and place not in seen:
        seen.add(place)
        event = path.event(place)
        held = (
            max(path.held_by(place), key=lambda held: held.until, default=None) if event.start > 0 else None
        )
        found.append(Cause(event, "start" if held is None else held.reason))
        place = None if held is None else held.by
    return found[::-1]


class _Path:
    """Looks up what could have held an event up."""

    def __init__(self, line: Timeline) -> None:
        self.line, self.program = line, line.program
        self.prices = Prices(line.program, line.costs)
        self.place = {
            action: _Place(rank, at)
            for rank, order in enumerate(line.program.orders)
            for at, action in enumerate(order)
        }
        self.kinds = {action.kind for action in self.place}
        self.tied = tied_arrivals(line.program) if line.program.tied else {}

    def event(self, place: _Place) -> Event:
        rank, at = place
        if rank < 0:
            return self.line.tail[at]
        return Event(
            rank, self.program.orders[rank][at], self.line.starts[rank][at], self.line.ends[rank][at]
        )

    def last(self) -> _Place | None:
        """The event with the latest end; of several, one that takes time."""
        tail = [_Place(-1, at) for at in range(len(self.line.tail))]
        return max([*self.place.values(), *tail], key=self._by_end, default=None)

    def _by_end(self, place: _Place) -> tuple[float, float]:
        event = self.event(place)
        return event.end, event.end - event.start

    def held_by(self, place: _Place) -> Iterator[_Held]:
        """All that could have held the event up, with the times until which they did."""
        rank, at = place
        if rank < 0:
            yield from self._tail(at)
            return
        for member in self.blocks.get(place, (place,)):
            action = self.program.orders[rank][member.at]
            if action.kind in COMPUTE:
                yield from self._input(action)
            yield from self._beside(rank, member.at, action)
        first = self.blocks.get(place, (place,))[0]
        yield from self._order(rank, first.at)
        if self.program.orders[rank][at].kind is Kind.REDUCE_TIED:
            for wait in self.tied.get((rank, at), ()):
                for held in self._order(wait.rank, wait.reach):
                    yield held._replace(reason="reduction")

    @cached_property
    def blocks(self) -> dict[_Place, tuple[_Place, ...]]:
        """The members of every pair that ran as one block."""
        found: dict[_Place, tuple[_Place, ...]] = {}
        for rank in range(self.program.ranks):
            for step in steps_of(self.program, rank, self.line.costs.pair is not None):
                if len(step) > 1:
                    members = tuple(_Place(rank, at) for at in step)
                    found |= dict.fromkeys(members, members)
        return found

    def _order(self, rank: int, at: int) -> Iterator[_Held]:
        """The action before on the rank that its clock passes through."""
        order, blocking = self.program.orders[rank], self.line.costs.blocking
        for before in range(at - 1, -1, -1):
            action = order[before]
            sends = blocking and action.kind in (Kind.SEND_F, Kind.SEND_B)
            if action.kind in _MOVING or sends or self._exposed(action):
                until = self.line.ends[rank][before]
                if blocking and not self.program.lowered and (name := self._result(action)):
                    until = max(until, self.line.arrivals.get(name, 0.0))
                yield _Held(until, _Place(rank, before), "order")
                return

    def _exposed(self, action: Action) -> bool:
        """Whether the action is a reduction inside the step that its rank waits for."""
        inside = action.kind is Kind.REDUCE_GRAD and bool(self.program.versions)
        return inside and not self.line.costs.reduce_overlaps

    def _result(self, action: Action) -> Action | None:
        """The receive on another rank that takes the action's result."""
        stage, kind, i = action
        if kind is Kind.F and not self.program.is_last(stage):
            name = Action(stage + 1, Kind.RECV_F, i)
            return name if self.prices.forward[stage + 1] else None
        if kind in (Kind.B, Kind.I) and not self.program.is_first(stage):
            name = Action(stage - 1, Kind.RECV_B, i)
            return name if self.prices.backward[stage - 1] else None
        return None

    def _maker(self, name: Action) -> _Place:
        """What makes the message that `name` receives."""
        stage, kind, i = send_of(name)
        if kind is Kind.SEND_F:
            return self.place[Action(stage, Kind.F, i)]
        split = self.place.get(Action(stage, Kind.I, i))
        return split or self.place[Action(stage, Kind.B, i)]

    def _input(self, action: Action) -> Iterator[_Held]:
        """The message that a compute action takes."""
        name = needed_by(self.program, action)
        if name is None:
            return
        if name in self.line.queued:
            # it held the link up until this message's turn: the longest wait of them all
            before = self.line.queued[name]
            yield _Held(self._arrival(name), self._side(before), "queue")
        else:
            yield _Held(self._arrival(name), self._side(name), "message")

    def _side(self, name: Action) -> _Place:
        """The later of a message's two sides."""
        if not self.program.lowered:
            return self._maker(name)
        sent, posted = self.place[send_of(name)], self.place[name]
        return max(sent, posted, key=lambda place: self.line.starts[place.rank][place.at])

    def _arrival(self, name: Action) -> float:
        if name in self.line.arrivals:
            return self.line.arrivals[name]
        if self.program.lowered:
            return self.event(self.place[name]).end
        routes = self.prices.forward if name.kind is Kind.RECV_F else self.prices.backward
        route = routes[name.stage]
        assert route is not None
        return self.event(self._maker(name)).end + route.delay

    def _beside(self, rank: int, at: int, action: Action) -> Iterator[_Held]:
        """What runs beside the work and what it holds up."""
        stage, kind, i = action
        wanted: list[tuple[Action, Reason]] = []
        if kind in COMPUTE or kind is Kind.RECOMPUTE:
            wanted.append((Action(stage, Kind.UNSHARD), "beside"))
        if kind in _BACKWARD:
            wanted.append((Action(stage, Kind.RELOAD, i), "beside"))
        if kind is Kind.RELOAD:
            wanted.append((Action(stage, Kind.OFFLOAD, i), "beside"))
        if kind is Kind.UPDATE:
            wanted.append((Action(stage, Kind.REDUCE_GRAD), "reduction"))
        for need, reason in wanted:
            if need.kind in self.kinds:
                yield from self._latest(rank, at, lambda other, need=need: other == need, reason)
        if kind in BESIDE or kind is Kind.REDUCE_GRAD:
            reason: Reason = "reduction" if kind is Kind.REDUCE_GRAD else "beside"
            yield from self._latest(rank, at, lambda other: other.kind is kind, reason)

    def _latest(self, rank: int, at: int, match: Callable[[Action], bool], reason: Reason) -> Iterator[_Held]:
        """The last action before place `at` that matches."""
        order = self.program.orders[rank]
        for before in range(at - 1, -1, -1):
            if match(order[before]):
                yield _Held(self.line.ends[rank][before], _Place(rank, before), reason)
                return

    def _tail(self, at: int) -> Iterator[_Held]:
        """What holds up a reduction that stands in no order, or an update after the step."""
        tail = self.line.tail
        rank, action, start, _ = tail[at]
        for before in range(at - 1, -1, -1):
            if tail[before].rank == rank and tail[before].action.kind is action.kind:
                reason: Reason = "order" if action.kind is Kind.UPDATE else "reduction"
                yield _Held(tail[before].end, _Place(-1, before), reason)
                break
        if action.kind is Kind.UPDATE:
            others = [_Place(-1, b) for b, e in enumerate(tail) if e.action.kind is not Kind.UPDATE]
            for place in (*self.place.values(), *others):
                if self.event(place).end <= start:
                    yield _Held(self.event(place).end, place, "barrier")
            return
        ends, order = self.line.ends[rank], self.program.orders[rank]
        for before, each in enumerate(order):
            if each.kind in _MOVING and ends[before] <= start:
                yield _Held(ends[before], _Place(rank, before), "order")
