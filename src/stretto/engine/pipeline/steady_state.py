"""The repeated part of an asynchronous schedule: a program is bound once for any number of training steps.

An asynchronous schedule fills the pipeline, runs the same actions in every later step, and drains at the end
of a window of steps. So the filling steps are bound, and after them the steps until the memory of their
microbatches is reused; these are repeated. At the end of a window, the actions of later microbatches are left
out, which gives the schedule's order for that number of steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

from stretto.engine.pipeline.rank_buffers import assign_slots, microbatch_of
from stretto.program.action import Action, ActionKind
from stretto.program.checks.check import check
from stretto.program.lower import RankLowering, lower, send_releases
from stretto.program.program import Program, ScheduleError

_Pool = tuple[int, ActionKind]  # receives of one stage in one direction, which share buffers


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """The bound steps of a lowered program, and those of them that are repeated.

    Attributes:
        program: program lowered for this rank, with all bound steps and some more, so that its end does not
            affect the bound ones.
        microbatches: microbatches of one step.
        fill: number of steps that run once, at the start of a window.
        cycle: number of steps after these that are repeated; 0 if a window is one step.
        ahead: maximum over all ranks of the distance from the oldest unfinished step to the newest step that
            has begun. A window in progress cannot end earlier.
        buffers: number of receive buffers of each stage and direction in the repeated steps.
    """

    program: Program
    microbatches: int
    fill: int = 1
    cycle: int = 0
    ahead: int = 0
    buffers: Mapping[_Pool, int] = field(default_factory=dict[_Pool, int])

    @property
    def ring(self) -> int:
        """Number of microbatches after which memory is reused."""
        return (self.cycle or 1) * self.microbatches

    def slots(self, rank: int) -> dict[Action, int]:
        """Return the buffer index of each receive of a rank."""
        order = self.program.orders[rank]
        if not self.cycle:
            return assign_slots(order)
        return {
            a: microbatch_of(a) % self.buffers[a.stage, a.kind]
            for a in order
            if a.kind is ActionKind.RECV_F or a.kind is ActionKind.RECV_B
        }

    def ends(self, rank: int) -> list[int]:
        """Return for each bound step the index in the rank's order after its last action of the step."""
        order = self.program.orders[rank]
        if not self.cycle:
            return [len(order)]
        return step_ends(order, self.microbatches)[: self.fill + self.cycle]

    def bound(self, step: int) -> int:
        """Return the bound step that runs as step `step` of a window."""
        return step if step < self.fill else self.fill + (step - self.fill) % self.cycle


def once(program: Program) -> SteadyState:
    """Return a lowered program whose window is one step."""
    return SteadyState(program=program, microbatches=program.microbatches)


_LONGEST_RING = 1024  # largest number of microbatches to bind for the minimum number of receive buffers


def repeated(
    build: Callable[[int], Program], rank: int, tied: Iterable[Iterable[int]] = (), lookahead: int = 1
) -> SteadyState:
    """Return an asynchronous schedule for windows of any length, as one rank runs it.

    Args:
        build: returns the schedule's program for a number of steps.
        tied, lookahead: as in `lower`.

    Raises:
        ScheduleError: the program deadlocks, or is not periodic from some step on.
    """
    tied = [tuple(stages) for stages in tied]
    first = build(1)
    m, look_ahead = first.microbatches, 2 * (first.ranks + lookahead + 1)
    margin = -(-look_ahead // m) + 1  # steps that the start affects; the end affects as many
    sample = lower(build(2 * margin + 1), tied=tied, lookahead=lookahead)
    check(sample)
    needs, together = _needs(sample, rank, m)
    buffers = needs
    if lcm(m, *needs.values()) > _LONGEST_RING:  # round up to powers of two
        buffers = {pool: 1 << (n - 1).bit_length() for pool, n in needs.items()}
    ring = lcm(m, *buffers.values())
    cycle = ring // m * -(-together * m // ring)
    program = RankLowering(build(2 * margin + cycle), tied, lookahead).lowered([rank])
    _check_steady(program, rank, fill=margin, cycle=cycle, m=m)
    return SteadyState(
        program=program,
        microbatches=m,
        fill=margin,
        cycle=cycle,
        ahead=max(_ahead(order, margin + 1, m) for order in sample.orders),
        buffers=buffers,
    )


def _ahead(order: Sequence[Action], steps: int, m: int) -> int:
    """Return the maximum distance from the oldest unfinished step to the newest begun one, in the first
    steps.
    """
    ends = step_ends(order, m)
    furthest = newest = 0
    for at, action in enumerate(order[: ends[steps - 1]]):
        newest = max(newest, (action.microbatch or 0) // m)
        furthest = max(furthest, newest - bisect_right(ends, at))
    return furthest


def step_ends(order: Iterable[Action], microbatches: int) -> list[int]:
    """Return for each step the index in a rank's order after its last action of the step.

    Args:
        microbatches: microbatches of a step.
    """
    ends = dict[int, int]()
    for at, action in enumerate(order):
        if action.microbatch is not None:
            ends[action.microbatch // microbatches] = at + 1
    return [ends[step] for step in sorted(ends)]


def _needs(program: Program, rank: int, m: int) -> tuple[dict[_Pool, int], int]:
    """Return the number of receive buffers of each stage and direction of a rank, and of steps in flight."""
    steps, pools = _Lifetimes(), defaultdict[_Pool, _Lifetimes](_Lifetimes)
    places = dict[Action, int]()
    order = program.orders[rank]
    received = {(a.stage, a.kind) for a in order if a.kind in (ActionKind.RECV_F, ActionKind.RECV_B)}
    for at, action in enumerate(order):
        if action.microbatch is None:
            continue
        places[action] = at
        steps.extend(action.microbatch // m, at)
        for pool in received:
            arrived = action.kind.is_compute and action.microbatch in pools[pool]
            if action.stage == pool[0] and (action.kind is pool[1] or arrived):
                pools[pool].extend(action.microbatch, at)
    for send, point in send_releases(program, rank).items():
        if point is not None:
            steps.extend(microbatch_of(send) // m, places[point])
    return {pool: lifetimes.max_alive() for pool, lifetimes in pools.items()}, steps.max_alive()


class _Lifetimes:
    """Lifetimes of objects with indices in the order of their first use, each alive until its last use."""

    def __init__(self) -> None:
        self._first, self._last = dict[int, int](), dict[int, int]()

    def extend(self, number: int, at: int) -> None:
        self._first.setdefault(number, at)
        self._last[number] = max(at, self._last.get(number, at))

    def __contains__(self, number: int | None) -> bool:
        return number in self._first

    def max_alive(self) -> int:
        """Return the maximum width of the range from the oldest to the newest live object."""
        widest, oldest = 1, 0
        for number in sorted(self._first):
            while self._last[oldest] < self._first[number]:
                oldest += 1
            widest = max(widest, number - oldest + 1)
        return widest


def _check_steady(program: Program, rank: int, fill: int, cycle: int, m: int) -> None:
    """Check that the step after the repeated ones equals the first of them."""
    order = program.orders[rank]
    ends = step_ends(order, m)

    def actions(step: int) -> list[tuple[int, ActionKind, int | None, int]]:
        """Return the actions of a step, with microbatches and versions relative to its first microbatch's."""
        done = list[tuple[int, ActionKind, int | None, int]]()
        for stage, kind, i in order[ends[step - 1] : ends[step]]:
            versions = program.versions[stage]
            version = 0 if i is None else versions[i] - versions[step * m]
            done.append((stage, kind, None if i is None else i - step * m, version))
        return done

    if actions(fill) != actions(fill + cycle):
        raise ScheduleError(
            f"schedule {program.name} is not periodic: rank {rank} has other actions in step {fill + cycle} "
            f"than in step {fill}"
        )
