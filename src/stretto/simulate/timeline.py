"""A program replayed: when every action starts and ends, and what that says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from stretto.schedule.action import COMPUTE, Action, Kind
from stretto.schedule.check_versions import weight_versions
from stretto.schedule.memory import peak_activations
from stretto.schedule.program import Program
from stretto.simulate.bound import bound
from stretto.simulate.costs import Costs
from stretto.simulate.event import Event
from stretto.simulate.live import live_bytes
from stretto.simulate.path import Cause, critical_path

_BUSY = COMPUTE | {Kind.RECOMPUTE, Kind.UPDATE}


class Bubble(NamedTuple):
    """Idle time, in the unit of the costs; `rate` is a part of the makespan."""

    barrier: float  # makespan - ideal: idle time of the busiest rank until all ranks meet at the end
    span: float  # most idle time of a rank between its own first and last action
    rate: float  # barrier / makespan


@dataclass(frozen=True)
class Timeline:
    """A program replayed against costs; times in the unit of the costs, counted from the step's start."""

    program: Program
    starts: tuple[list[float], ...]  # per rank, in its order
    ends: tuple[list[float], ...]
    work: tuple[float, ...]  # per rank, the sum of the times for which its order's actions keep it busy
    transfers: int  # messages between ranks
    costs: Costs = field(default_factory=Costs)
    # after the orders: reductions, where the program is not lowered, and the optimiser
    tail: tuple[Event, ...] = ()
    # where messages compete or block: when each is there, by its receive, and the one it queued behind
    arrivals: Mapping[Action, float] = field(default_factory=dict[Action, float])
    queued: Mapping[Action, Action] = field(default_factory=dict[Action, Action])

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
        """When everything is done: the last rank, and what it started beside its work."""
        return max([0.0, *(max(ends) for ends in self.ends if ends), *(event.end for event in self.tail)])

    @cached_property
    def ideal(self) -> float:
        """The busiest rank's work, its part of the optimiser included."""
        work = list(self.work)
        for rank, action, start, end in self.tail:
            if action.kind is Kind.UPDATE:
                work[rank] += end - start
        return max(work, default=0.0)

    @cached_property
    def bubble(self) -> Bubble:
        barrier = self.makespan - self.ideal
        idle = [end - start - work for (start, end), work in zip(self.spans, self.work, strict=True)]
        return Bubble(barrier, max(idle, default=0.0), barrier / self.makespan if self.makespan else 0.0)

    @cached_property
    def spans(self) -> list[tuple[float, float]]:
        """First start and last end of every rank's own work."""
        return [self._span(rank) for rank in range(self.program.ranks)]

    @property
    def span_rate(self) -> float:
        """The bubble rate where nothing makes all ranks meet: (cost - work) / cost, cost being the longest
        time of a rank from its first start to its last end, work that of the busiest rank.

        Qi et al. 2024, "Zero bubble pipeline parallelism", section 5.3.
        """
        cost = max((end - start for start, end in self.spans), default=0.0)
        return (cost - max(self.work)) / cost if cost else 0.0

    @property
    def steady_rate(self) -> float:
        """The idle part of the steady state, on the rank where it is largest: from a rank's first backward to
        its last forward, without start-up and drain. 0 where no rank has a steady state.

        What an asynchronous schedule comes to when it goes on for ever (PipeDream: 0 without transfer time).
        """
        return max((self._steady(rank) for rank in range(self.program.ranks)), default=0.0)

    @cached_property
    def peak_activations(self) -> list[float]:
        """Per rank, the most activations held, in rank units: a microbatch through all its stages is 1."""
        return peak_activations(self.program)

    @cached_property
    def live_bytes(self) -> list[list[tuple[float, float]]]:
        """Per rank, the activation bytes held: (time, bytes from then on), ascending in time.

        Memory is taken at the start of F, RECOMPUTE and RELOAD, and given back at the end of B, I, W and
        OFFLOAD.
        """
        return live_bytes(self.program, self.costs, self.starts, self.ends)

    @cached_property
    def peak_bytes(self) -> list[float]:
        """Per rank, the most activation bytes held at once, at the ends of steps in `live_bytes` included."""
        return [max((held for _, held in curve), default=0.0) for curve in self.live_bytes]

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Per stage, the most versions of its weights that exist at once; 1 in synchronous programs."""
        return weight_versions(self.program)

    @cached_property
    def critical_path(self) -> list[Cause]:
        """Events from the step's start to its end, each held up by the one before it, and by what."""
        return critical_path(self)

    @cached_property
    def bound(self) -> float:
        """What no order of this work on these ranks can beat; see `stretto.simulate.bound`."""
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
        order, starts, ends = self.program.orders[rank], self.starts[rank], self.ends[rank]
        backwards = (at for at, action in enumerate(order) if action.kind in (Kind.B, Kind.I))
        first = next(backwards, len(order))
        last = max((at for at, action in enumerate(order) if action.kind is Kind.F), default=-1)
        if first > last or ends[last] <= starts[first]:
            return 0.0
        busy, reached = 0.0, starts[first]
        for at in range(first, last + 1):
            if order[at].kind in _BUSY:
                # the two of a block have one time
                busy += ends[at] - max(starts[at], reached)
                reached = ends[at]
        return 1.0 - busy / (ends[last] - starts[first])
