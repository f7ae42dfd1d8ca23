"""How a rank goes on for any number of training steps with a program that is bound once.

An asynchronous schedule fills the pipeline, does the same in every step from then on, and drains at the end
of a window of steps. So the steps that fill are bound, and after them as many as it takes until the memory
of their microbatches comes round; these are repeated. Where a window ends, all that belongs to later
microbatches is left out: what remains is the schedule's order for so many steps.
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
    """What is bound of a lowered program, and how it is repeated.

    Attributes:
        program: lowered for this rank, of all steps that are bound, and more after them, so that these do not
            see its end.
        microbatches: of one step.
        fill: steps that are run once, at the start of a window.
        cycle: steps after these that are repeated; 0: a window is one step.
        ahead: how far the newest step that a rank has touched is ahead of the one that comes to its end, over
            all ranks. A window that is under way cannot be made to end earlier.
        buffers: how many each stage and direction has for receives that are repeated.
    """

    program: Program
    microbatches: int
    fill: int = 1
    cycle: int = 0
    ahead: int = 0
    buffers: Mapping[_Pool, int] = field(default_factory=dict[_Pool, int])

    @property
    def ring(self) -> int:
        """Microbatches after which memory is used again."""
        return (self.cycle or 1) * self.microbatches

    def slots(self, rank: int) -> dict[Action, int]:
        """The buffer of each receive of a rank."""
        order = self.program.orders[rank]
        if not self.cycle:
            return assign_slots(order)
        return {
            a: microbatch_of(a) % self.buffers[a.stage, a.kind]
            for a in order
            if a.kind is ActionKind.RECV_F or a.kind is ActionKind.RECV_B
        }

    def ends(self, rank: int) -> list[int]:
        """For each bound step, the place in the rank's order after its last action of the step."""
        order = self.program.orders[rank]
        if not self.cycle:
            return [len(order)]
        return step_ends(order, self.microbatches)[: self.fill + self.cycle]

    def bound(self, step: int) -> int:
        """The bound step that a step of a window runs as."""
        return step if step < self.fill else self.fill + (step - self.fill) % self.cycle


def once(program: Program) -> SteadyState:
    """A lowered program whose window is one step."""
    return SteadyState(program=program, microbatches=program.microbatches)


_LONGEST = 1024  # microbatches that are bound so that no more receive buffers are made than needed


def repeated(
    build: Callable[[int], Program], rank: int, tied: Iterable[Iterable[int]] = (), lookahead: int = 1
) -> SteadyState:
    """An asynchronous schedule for windows of any length, as one rank runs it.

    Args:
        build: the schedule's program for so many steps.
        tied, lookahead: as `lower` takes them.

    Raises:
        ScheduleError: the program cannot complete, or does not come to do the same in every step.
    """
    tied = [tuple(one) for one in tied]
    first = build(1)
    m, near = first.microbatches, 2 * (first.ranks + lookahead + 1)
    margin = -(-near // m) + 1  # steps until nothing is left of the start; as many see the end coming
    some = lower(build(2 * margin + 1), tied=tied, lookahead=lookahead)
    check(some)
    needs, together = _needs(some, rank, m)
    buffers = needs if lcm(m, *needs.values()) <= _LONGEST else {p: _power(n) for p, n in needs.items()}
    ring = lcm(m, *buffers.values())
    cycle = ring // m * -(-together * m // ring)
    program = RankLowering(build(2 * margin + cycle), tied, lookahead).lowered([rank])
    _check_steady(program, rank, fill=margin, cycle=cycle, m=m)
    return SteadyState(
        program=program,
        microbatches=m,
        fill=margin,
        cycle=cycle,
        ahead=max(_ahead(order, margin + 1, m) for order in some.orders),
        buffers=buffers,
    )


def _power(number: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (number - 1).bit_length()


def _ahead(order: Sequence[Action], steps: int, m: int) -> int:
    """How far the newest step that is touched is ahead of that which comes to its end, in the first steps."""
    ends = step_ends(order, m)
    most = newest = 0
    for at, action in enumerate(order[: ends[steps - 1]]):
        newest = max(newest, (action.microbatch or 0) // m)
        most = max(most, newest - bisect_right(ends, at))
    return most


def step_ends(order: Iterable[Action], microbatches: int) -> list[int]:
    """For each step, the place in a rank's order after its last action of the step.

    Args:
        microbatches: of a step.
    """
    ends = dict[int, int]()
    for at, action in enumerate(order):
        if action.microbatch is not None:
            ends[action.microbatch // microbatches] = at + 1
    return [ends[step] for step in sorted(ends)]


def _needs(program: Program, rank: int, m: int) -> tuple[dict[_Pool, int], int]:
    """The receive buffers of each stage and direction of a rank, and how many steps are under way at once."""
    steps, pools = _Held(), defaultdict[_Pool, _Held](_Held)
    places = dict[Action, int]()
    order = program.orders[rank]
    received = {(a.stage, a.kind) for a in order if a.kind in (ActionKind.RECV_F, ActionKind.RECV_B)}
    for at, action in enumerate(order):
        if action.microbatch is None:
            continue
        places[action] = at
        steps.use(action.microbatch // m, at)
        for pool in received:
            arrived = action.kind.is_compute and action.microbatch in pools[pool]
            if action.stage == pool[0] and (action.kind is pool[1] or arrived):
                pools[pool].use(action.microbatch, at)
    for send, point in send_releases(program, rank).items():
        if point is not None:
            steps.use(microbatch_of(send) // m, places[point])
    return {pool: held.most() for pool, held in pools.items()}, steps.most()


class _Held:
    """Things numbered in the order of their first use, each held from then to its last."""

    def __init__(self) -> None:
        self._first, self._last = dict[int, int](), dict[int, int]()

    def use(self, number: int, at: int) -> None:
        self._first.setdefault(number, at)
        self._last[number] = max(at, self._last.get(number, at))

    def __contains__(self, number: int | None) -> bool:
        return number in self._first

    def most(self) -> int:
        """From the oldest that is held to the newest, at most."""
        most, oldest = 1, 0
        for number in sorted(self._first):
            while self._last[oldest] < self._first[number]:
                oldest += 1
            most = max(most, number - oldest + 1)
        return most


def _check_steady(program: Program, rank: int, fill: int, cycle: int, m: int) -> None:
    """The step after the repeated ones is the first of them again."""
    order = program.orders[rank]
    ends = step_ends(order, m)

    def actions(step: int) -> list[tuple[int, ActionKind, int | None, int]]:
        """What a step does, microbatches and versions counted from those of its first microbatch on."""
        done = list[tuple[int, ActionKind, int | None, int]]()
        for stage, kind, i in order[ends[step - 1] : ends[step]]:
            versions = program.versions[stage]
            version = 0 if i is None else versions[i] - versions[step * m]
            done.append((stage, kind, None if i is None else i - step * m, version))
        return done

    if actions(fill) != actions(fill + cycle):
        raise ScheduleError(
            f"schedule {program.name} does not do the same in every step: rank {rank} does other things in "
            f"step {fill + cycle} than in step {fill}"
        )
