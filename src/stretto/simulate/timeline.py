"""A program replayed: when every action starts and ends, and what that says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stretto.schedule.action import Action
from stretto.schedule.memory import peak_activations
from stretto.schedule.program import Program


class Event(NamedTuple):
    """One action in time. A send lasts until its message is there, a receive from its post until then."""

    rank: int
    action: Action
    start: float
    end: float


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
    work: tuple[float, ...]  # per rank, the sum of its compute actions' costs
    transfers: int  # messages between ranks

    @property
    def events(self) -> list[Event]:
        """All actions, rank after rank in their orders."""
        return [
            Event(rank, action, start, end)
            for rank, order in enumerate(self.program.orders)
            for action, start, end in zip(order, self.starts[rank], self.ends[rank], strict=True)
        ]

    @cached_property
    def makespan(self) -> float:
        """When the last rank is done."""
        return max((end for _, end in self._spans), default=0.0)

    @property
    def ideal(self) -> float:
        """The busiest rank's work."""
        return max(self.work, default=0.0)

    @cached_property
    def bubble(self) -> Bubble:
        barrier = self.makespan - self.ideal
        idle = [end - start - work for (start, end), work in zip(self._spans, self.work, strict=True)]
        return Bubble(barrier, max(idle, default=0.0), barrier / self.makespan if self.makespan else 0.0)

    @cached_property
    def peak_activations(self) -> list[float]:
        """Per rank, the most activations held, in rank units: a microbatch through all its stages is 1."""
        return peak_activations(self.program)

    @cached_property
    def _spans(self) -> list[tuple[float, float]]:
        """First start and last end of every rank's compute actions."""
        spans: list[tuple[float, float]] = []
        for order, starts, ends in zip(self.program.orders, self.starts, self.ends, strict=True):
            compute = [at for at, action in enumerate(order) if action.kind.is_compute]
            # a rank works in order, so its first and last action are its earliest and latest
            spans.append((starts[compute[0]], ends[compute[-1]]) if compute else (0.0, 0.0))
        return spans
