"""A replayed program: start and end of every action, idle time, memory, the critical path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import fsum, inf
from operator import itemgetter
from typing import Literal, NamedTuple

from stretto.display import render
from stretto.program.action import COMPUTE, Action, ActionKind
from stretto.program.checks.versions import weight_versions
from stretto.program.memory import peak_activations
from stretto.program.messages import needed_by, send_of, tied_waits
from stretto.program.pairing import steps_of
from stretto.program.program import Program
from stretto.program.replay.costs import OVERLAPPED, Costs, Prices
from stretto.program.replay.lower_bound import bound

Curve = list[tuple[float, float]]


def live_bytes(
    program: Program, costs: Costs, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> list[Curve]:
    """Return per rank (time, bytes held from then on); simultaneous changes are listed separately."""
    prices = Prices(program, costs)
    return [
        _curve(_Allocations(program, prices, program.orders[rank]), starts[rank], ends[rank])
        for rank in range(program.ranks)
    ]


def _curve(allocations: _Allocations, starts: Sequence[float], ends: Sequence[float]) -> Curve:
    changes: list[tuple[float, float]] = []
    for action, start, end in zip(allocations.order, starts, ends, strict=True):
        allocated, freed = allocations.change(action)
        if allocated:
            changes.append((start, allocated))
        if freed:
            changes.append((end, -freed))
    # stable: at equal times, changes of the earlier action come first
    changes.sort(key=itemgetter(0))
    live = 0.0
    curve: Curve = []
    for time, change in changes:
        live += change
        curve.append((time, live))
    return curve


class _Allocations:
    """The bytes that each action of a rank allocates and frees."""

    def __init__(self, program: Program, prices: Prices, order: Sequence[Action]) -> None:
        self.order = order
        self.trains = program.trains
        self.prices = prices
        self.repeated = {(s, i) for s, kind, i in order if kind is ActionKind.RECOMPUTE}
        self._change_of = cache(self._change)  # actions of one class change the same

    def change(self, action: Action) -> tuple[float, float]:
        """Return the bytes allocated at the action's start and those freed at its end."""
        stage, kind, i = action
        return self._change_of(stage, kind, (stage, i) in self.repeated)

    def _change(self, stage: int, kind: ActionKind, repeated: bool) -> tuple[float, float]:
        full = self.prices.activations[stage]
        early = full * (1 - self.prices.costs.kept_for_w)  # freed by I
        inputs = self.prices.inputs[stage] if repeated else 0.0
        if kind is ActionKind.F:
            if repeated:
                return inputs, 0.0  # only its input is saved for the backward
            return full, 0.0 if self.trains else full
        if kind is ActionKind.RECOMPUTE:
            return full, inputs
        if kind is ActionKind.B:
            return 0.0, full
        if kind is ActionKind.I:
            return 0.0, early
        if kind is ActionKind.W:
            return 0.0, full - early
        moved = inputs if repeated else full
        if kind is ActionKind.OFFLOAD:
            return 0.0, moved
        if kind is ActionKind.RELOAD:
            return moved, 0.0
        return 0.0, 0.0


class Event(NamedTuple):
    """One action in time. A send lasts until its message arrives, a receive from its post until then."""

    rank: int
    action: Action
    start: float
    end: float


Reason = Literal["start", "order", "message", "queue", "reduction", "barrier", "beside"]

_MOVING = COMPUTE | {
    ActionKind.RECOMPUTE,
    ActionKind.UPDATE,
    ActionKind.REDUCE_TIED,
}  # kinds that advance a rank's clock
_BACKWARD = frozenset({ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.RECOMPUTE})


class CriticalEvent(NamedTuple):
    """An event on the critical path, and the reason why it did not start before the previous event ended.

    `start`: nothing delayed it; `order`: its rank was busy; `message`: its input arrived, or both sides of a
    message were ready; `queue`: another message on the link; `reduction`: another reduction of gradients on
    its rank, or ranks that had to join one; `barrier`: all ranks had to finish; `beside`: a gather of
    parameters or a transfer of activations to or from host memory.
    """

    event: Event
    reason: Reason


class _Place(NamedTuple):
    """The index of an action in a rank's order, or in the tail, with rank -1."""

    rank: int
    at: int


class _Blocker(NamedTuple):
    """An event that delayed another, and until when."""

    until: float
    by: _Place
    reason: Reason


def critical_path(timeline: Timeline) -> list[CriticalEvent]:
    """Trace back from the latest end, each time to the event that delayed longest; return events in time
    order.
    """
    path = _Path(timeline)
    place: _Place | None = path.last()
    causes: list[CriticalEvent] = []
    visited: set[_Place] = set()
    while place is not None and place not in visited:
        visited.add(place)
        event = path.event(place)
        blocker = (
            max(path.blockers(place), key=lambda blocker: blocker.until, default=None)
            if event.start > 0
            else None
        )
        causes.append(CriticalEvent(event, "start" if blocker is None else blocker.reason))
        place = None if blocker is None else blocker.by
    return causes[::-1]


class _Path:
    """Finds the events that could have delayed an event."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.program = timeline, timeline.program
        self.prices = Prices(timeline.program, timeline.costs)
        self.place = {
            action: _Place(rank, at)
            for rank, order in enumerate(timeline.program.orders)
            for at, action in enumerate(order)
        }
        self.kinds = {action.kind for action in self.place}
        self.tied = tied_waits(timeline.program) if timeline.program.tied else {}

    def event(self, place: _Place) -> Event:
        rank, at = place
        if rank < 0:
            return self.timeline.tail[at]
        return Event(
            rank, self.program.orders[rank][at], self.timeline.starts[rank][at], self.timeline.ends[rank][at]
        )

    def last(self) -> _Place | None:
        """Return the event with the latest end; among several, one that takes time."""
        tail = [_Place(-1, at) for at in range(len(self.timeline.tail))]
        return max([*self.place.values(), *tail], key=self._by_end, default=None)

    def _by_end(self, place: _Place) -> tuple[float, float]:
        event = self.event(place)
        return event.end, event.end - event.start

    def blockers(self, place: _Place) -> Iterator[_Blocker]:
        """Yield all events that could have delayed the event, and until when."""
        rank, at = place
        if rank < 0:
            yield from self._tail(at)
            return
        for member in self.blocks.get(place, (place,)):
            action = self.program.orders[rank][member.at]
            if action.kind in COMPUTE:
                yield from self._input(action)
            # work that overlaps with compute, and the actions that wait for it
            stage, kind, i = action
            causes: list[tuple[Action, Reason]] = []
            if kind in COMPUTE or kind is ActionKind.RECOMPUTE:
                causes.append((Action(stage, ActionKind.UNSHARD), "beside"))
            if kind in _BACKWARD:
                causes.append((Action(stage, ActionKind.RELOAD, i), "beside"))
            if kind is ActionKind.RELOAD:
                causes.append((Action(stage, ActionKind.OFFLOAD, i), "beside"))
            if kind is ActionKind.UPDATE:
                causes.append((Action(stage, ActionKind.REDUCE_GRAD), "reduction"))
            for need, reason in causes:
                if need.kind in self.kinds:
                    yield from self._latest(rank, member.at, lambda other, need=need: other == need, reason)
            if kind in OVERLAPPED or kind is ActionKind.REDUCE_GRAD:
                reason: Reason = "reduction" if kind is ActionKind.REDUCE_GRAD else "beside"
                yield from self._latest(rank, member.at, lambda other, kind=kind: other.kind is kind, reason)
        first = self.blocks.get(place, (place,))[0]
        yield from self._order(rank, first.at, self.timeline.starts[rank][at])
        if self.program.orders[rank][at].kind is ActionKind.REDUCE_TIED:
            for wait in self.tied.get((rank, at), ()):
                for blocker in self._order(wait.rank, wait.completed):
                    yield blocker._replace(reason="reduction")

    @cached_property
    def blocks(self) -> dict[_Place, tuple[_Place, ...]]:
        """The members of every pair that ran as one block."""
        members_of: dict[_Place, tuple[_Place, ...]] = {}
        for rank in range(self.program.ranks):
            for step in steps_of(self.program, rank, self.timeline.costs.pair is not None):
                if len(step) > 1:
                    members = tuple(_Place(rank, at) for at in step)
                    members_of |= dict.fromkeys(members, members)
        return members_of

    def _order(self, rank: int, at: int, start: float = inf) -> Iterator[_Blocker]:
        """Yield the previous action on the rank that advances its clock. A receive between the actions of a
        block is posted before the block, so actions that end after its start are skipped.
        """
        order, blocking = self.program.orders[rank], self.timeline.costs.blocking
        for before in range(at - 1, -1, -1):
            action = order[before]
            if self.timeline.ends[rank][before] > start:
                continue
            sends = blocking and action.kind in (ActionKind.SEND_F, ActionKind.SEND_B)
            if action.kind in _MOVING or sends or self._exposed(action):
                until = self.timeline.ends[rank][before]
                if blocking and not self.program.lowered and (name := self._result(action)):
                    until = max(until, self.timeline.arrivals.get(name, 0.0))
                yield _Blocker(until, _Place(rank, before), "order")
                return

    def _exposed(self, action: Action) -> bool:
        """True if the action is a reduction inside the step that its rank waits for."""
        inside = action.kind is ActionKind.REDUCE_GRAD and bool(self.program.versions)
        return inside and not self.timeline.costs.reduce_overlaps

    def _result(self, action: Action) -> Action | None:
        """Return the receive on another rank that takes the action's result, or None."""
        stage, kind, i = action
        if kind is ActionKind.F and not self.program.is_last(stage):
            name = Action(stage + 1, ActionKind.RECV_F, i)
            return name if self.prices.forward[stage + 1] else None
        if kind in (ActionKind.B, ActionKind.I) and not self.program.is_first(stage):
            name = Action(stage - 1, ActionKind.RECV_B, i)
            return name if self.prices.backward[stage - 1] else None
        return None

    def _maker(self, name: Action) -> _Place:
        """Return the action that computes the message of a receive."""
        stage, kind, i = send_of(name)
        if kind is ActionKind.SEND_F:
            return self.place[Action(stage, ActionKind.F, i)]
        split = self.place.get(Action(stage, ActionKind.I, i))
        return split or self.place[Action(stage, ActionKind.B, i)]

    def _input(self, action: Action) -> Iterator[_Blocker]:
        """Yield the message that a compute action consumes."""
        name = needed_by(self.program, action)
        if name is None:
            return
        if name in self.timeline.queued:
            # it occupied the link until this message's turn: the longest wait of all
            before = self.timeline.queued[name]
            yield _Blocker(self._arrival(name), self._side(before), "queue")
        else:
            yield _Blocker(self._arrival(name), self._side(name), "message")

    def _side(self, name: Action) -> _Place:
        """Return the later of a message's two sides."""
        if not self.program.lowered:
            return self._maker(name)
        sent, posted = self.place[send_of(name)], self.place[name]
        return max(sent, posted, key=lambda place: self.timeline.starts[place.rank][place.at])

    def _arrival(self, name: Action) -> float:
        if name in self.timeline.arrivals:
            return self.timeline.arrivals[name]
        if self.program.lowered:
            return self.event(self.place[name]).end
        routes = self.prices.forward if name.kind is ActionKind.RECV_F else self.prices.backward
        route = routes[name.stage]
        assert route is not None
        return self.event(self._maker(name)).end + route.delay

    def _latest(
        self, rank: int, at: int, match: Callable[[Action], bool], reason: Reason
    ) -> Iterator[_Blocker]:
        """Yield the last action before index `at` that matches."""
        order = self.program.orders[rank]
        for before in range(at - 1, -1, -1):
            if match(order[before]):
                yield _Blocker(self.timeline.ends[rank][before], _Place(rank, before), reason)
                return

    def _tail(self, at: int) -> Iterator[_Blocker]:
        """Yield events that delay a reduction that is in no order, or an update after the step."""
        tail = self.timeline.tail
        rank, action, start, _ = tail[at]
        for before in range(at - 1, -1, -1):
            if tail[before].rank == rank and tail[before].action.kind is action.kind:
                reason: Reason = "order" if action.kind is ActionKind.UPDATE else "reduction"
                yield _Blocker(tail[before].end, _Place(-1, before), reason)
                break
        if action.kind is ActionKind.UPDATE:
            others = [_Place(-1, b) for b, e in enumerate(tail) if e.action.kind is not ActionKind.UPDATE]
            for place in (*self.place.values(), *others):
                if self.event(place).end <= start:
                    yield _Blocker(self.event(place).end, place, "barrier")
            return
        ends, order = self.timeline.ends[rank], self.program.orders[rank]
        for before, each in enumerate(order):
            if each.kind in _MOVING and ends[before] <= start:
                yield _Blocker(ends[before], _Place(rank, before), "order")


_BUSY = COMPUTE | {ActionKind.RECOMPUTE, ActionKind.UPDATE}


class Bubble(NamedTuple):
    """Idle time, in the unit of the costs, and as a rate by both definitions in use.

    For 1F1B of m microbatches on p ranks, `over_ideal` is (p - 1) / m, the bubble of Megatron-LM's papers
    (Narayanan et al. 2021, section 2.2), and `rate` is (p - 1) / (m + p - 1).
    """

    barrier: float  # makespan - ideal: idle time of the busiest rank until all ranks meet at the end
    span: float  # largest idle time of a rank between its first and last action
    rate: float  # barrier / makespan
    over_ideal: float  # barrier / ideal


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A program replayed against costs; times in the unit of the costs, counted from the step's start."""

    program: Program
    starts: tuple[list[float], ...]  # per rank, in its order
    ends: tuple[list[float], ...]
    work: tuple[float, ...]  # per rank, total busy time of the actions in its order
    transfers: int  # messages between ranks
    costs: Costs = field(default_factory=Costs)
    # after the orders: reductions, if the program is not lowered, and the optimiser
    tail: tuple[Event, ...] = ()
    # if messages queue or block: arrival of each, by its receive, and the message it queued behind
    arrivals: Mapping[Action, float] = field(default_factory=dict[Action, float])
    queued: Mapping[Action, Action] = field(default_factory=dict[Action, Action])

    def __repr__(self) -> str:
        bubble = f"bubble {self.bubble.rate:.1%}"
        return f"Timeline({self.program.name!r}: makespan {self.makespan:g}, {bubble})"

    def _repr_html_(self) -> str | None:
        return render("timeline_html", self)

    def _repr_svg_(self) -> str | None:
        return render("timeline_svg", self)

    @property
    def events(self) -> list[Event]:
        """All actions of the orders, rank after rank."""
        return [
            Event(rank, action, start, end)
            for rank, order in enumerate(self.program.orders)
            for action, start, end in zip(order, self.starts[rank], self.ends[rank], strict=True)
        ]

    @cached_property
    def makespan(self) -> float:
        """End of the last rank, of overlapped work and of the tail."""
        return max([0.0, *(max(ends) for ends in self.ends if ends), *(event.end for event in self.tail)])

    @cached_property
    def ideal(self) -> float:
        """The busiest rank's work, including its part of the optimiser."""
        work = list(self.work)
        for rank, action, start, end in self.tail:
            if action.kind is ActionKind.UPDATE:
                work[rank] += end - start
        return max(work, default=0.0)

    @cached_property
    def bubble(self) -> Bubble:
        barrier = self.makespan - self.ideal
        idle = [end - start - work for (start, end), work in zip(self.spans, self.work, strict=True)]
        return Bubble(
            barrier=barrier,
            span=max(idle, default=0.0),
            rate=barrier / self.makespan if self.makespan else 0.0,
            over_ideal=barrier / self.ideal if self.ideal else 0.0,
        )

    @property
    def idle(self) -> float:
        """Idle fraction of all ranks' time; larger than the bubble's rate if ranks have unequal work."""
        rank_time = self.makespan * self.program.ranks
        return 1.0 - fsum(self.work) / rank_time if rank_time else 0.0

    @cached_property
    def spans(self) -> list[tuple[float, float]]:
        """First start and last end of every rank's own work."""
        return [self._span(rank) for rank in range(self.program.ranks)]

    @property
    def span_rate(self) -> float:
        """The bubble rate without a barrier of all ranks: (cost - work) / cost, where cost is the longest
        time of a rank from its first start to its last end, and work that of the busiest rank.

        Qi et al. 2024, "Zero bubble pipeline parallelism", section 5.3.
        """
        cost = max((end - start for start, end in self.spans), default=0.0)
        return (cost - max(self.work)) / cost if cost else 0.0

    @property
    def steady_rate(self) -> float:
        """The largest idle fraction of a rank's steady state, from its first backward to its last forward,
        without start-up and drain. 0 if no rank has a steady state.

        The limit of an asynchronous schedule that runs forever (PipeDream: 0 without transfer time).
        """
        return max((self._steady(rank) for rank in range(self.program.ranks)), default=0.0)

    @cached_property
    def peak_activations(self) -> list[float]:
        """Per rank, peak activations, in rank units: a microbatch through all its stages is 1."""
        return peak_activations(self.program)

    @cached_property
    def live_bytes(self) -> list[list[tuple[float, float]]]:
        """Per rank, the activation bytes held: (time, bytes from then on), ascending in time.

        Memory is allocated at the start of F, RECOMPUTE and RELOAD, and freed at the end of B, I, W and
        OFFLOAD.
        """
        return live_bytes(self.program, self.costs, self.starts, self.ends)

    @cached_property
    def peak_bytes(self) -> list[float]:
        """Per rank, peak activation bytes: the largest value in `live_bytes`."""
        return [max((live for _, live in curve), default=0.0) for curve in self.live_bytes]

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Per stage, the peak number of versions of its weights; 1 in synchronous programs."""
        return weight_versions(self.program)

    @cached_property
    def critical_path(self) -> list[CriticalEvent]:
        """Events from the step's start to its end, each delayed by the previous one, with the reason."""
        return critical_path(self)

    @cached_property
    def bound(self) -> float:
        """Lower bound over all orders of this work on these ranks; see
        `stretto.program.replay.lower_bound`.
        """
        return bound(self.program, self.costs)

    def _span(self, rank: int) -> tuple[float, float]:
        order = self.program.orders[rank]
        # a rank works in order, so its first and last action are its earliest and latest
        places = range(len(order))
        first = next((at for at in places if order[at].kind in _BUSY), None)
        last = next((at for at in reversed(places) if order[at].kind in _BUSY), None)
        if first is None or last is None:
            return 0.0, 0.0
        return self.starts[rank][first], self.ends[rank][last]

    def _steady(self, rank: int) -> float:
        order = self.program.orders[rank]
        starts = self.starts[rank]
        ends = self.ends[rank]
        backwards = (at for at, action in enumerate(order) if action.kind in (ActionKind.B, ActionKind.I))
        first = next(backwards, len(order))
        last = max((at for at, action in enumerate(order) if action.kind is ActionKind.F), default=-1)
        if first > last or ends[last] <= starts[first]:
            return 0.0
        busy, reached = 0.0, starts[first]
        for at in range(first, last + 1):
            if order[at].kind in _BUSY:
                # both actions of a block have the same times
                busy += ends[at] - max(starts[at], reached)
                reached = ends[at]
        return 1.0 - busy / (ends[last] - starts[first])
