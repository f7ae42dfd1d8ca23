"""Shortens a program without changing its peak memory, by removing steady periods.

Once a pipeline is full, most schedules are periodic: on every rank each action recurs `length` actions later,
for the microbatch `shift` later, and in between the rank begins as many microbatches of each stage as it
finishes. A few of these periods reach the peak memory of all. Periods are detected in the program itself, so
this works for any schedule and options and for programs from files; a program that is not periodic, or whose
memory grows with every period, is returned unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import lcm

from stretto.program.action import COMPUTE, Action, ActionKind
from stretto.program.lower import LOOKAHEAD
from stretto.program.program import Program


@dataclass(frozen=True)
class _Steady:
    """The periodic part of a rank's order.

    Attributes:
        start, end: positions in the order.
        length: number of actions of a period.
        settled: position from which on all active microbatches were begun in the periodic part.
    """

    start: int
    end: int
    length: int
    settled: int

    @property
    def spare(self) -> int:
        """Number of periods that can be removed.

        The remainder has the part in which microbatches from before the periodic part are still active, and
        then a full period. So every state of the long order also occurs in the short one: up to the end of
        that period the orders agree; from its start on they agree up to the indices of microbatches; and
        states in between repeat the period. Messages need a margin, since receives are posted ahead, on this
        rank and on its neighbours.
        """
        needed = self.settled - self.start + self.length + 2 * LOOKAHEAD
        return (self.end - self.start - needed) // self.length


def shorten(program: Program) -> Program:
    """Return the program with the fewest periods that preserve the peak memory of every rank, or the program
    itself if no period can be removed.

    Args:
        program: a program of a training step, without lowering and gathers of parameters. A program that
            updates weights within the step is returned unchanged.
    """
    if not program.trains or any({kind for _, kind, _ in order} - COMPUTE for order in program.orders):
        return program
    periods = [_period(order) for order in program.orders]
    repeated = [period for period in periods if period is not None]
    if len(repeated) < program.ranks:
        return program
    shift = lcm(*(span for _, span in repeated))
    steady = [
        _steady(order, length * (shift // span), shift)
        for order, (length, span) in zip(program.orders, repeated, strict=True)
    ]
    spare = min(rank.spare for rank in steady)
    if spare < 1:
        return program
    # remove `spare` periods from the program, and renumber the microbatches after them
    gone = spare * shift
    orders = list[tuple[Action, ...]]()
    pairs = set[tuple[Action, Action]]()
    for order, part in zip(program.orders, steady, strict=True):
        out = spare * part.length
        at = part.start + part.length  # within the periodic part, so that adjacent actions stay adjacent
        orders.append((*order[:at], *(_later(action, -gone) for action in order[at + out :])))
        if program.pairs:
            stood = chain(pairwise(order[:at]), pairwise(order[at + out - 1 :]))
            now = zip(pairwise(orders[-1]), stood, strict=True)
            pairs.update(pair for pair, before in now if before in program.pairs)
    short = replace(
        program,
        microbatches=program.microbatches - gone,
        orders=tuple(orders),
        pairs=frozenset(pairs),
    )
    # fails if microbatches do not pass the ranks in ascending order
    for order in short.orders:
        numbers = [action.microbatch for action in order]
        if len(set(order)) < len(order) or any(i is None or not 0 <= i < short.microbatches for i in numbers):
            return program
    return short


def _period(order: Sequence[Action]) -> tuple[int, int] | None:
    """Return the number of actions and of microbatches of the shortest period in the middle of an order, or
    None if no period begins as many microbatches of each stage as it ends.
    """
    middle = len(order) // 2
    stage, kind, first = order[middle]
    stages, counts = {action.stage for action in order}, Counter[tuple[int, ActionKind]]()
    for at in range(middle, (middle + len(order)) // 2 + 1):
        other, again, microbatch = order[at]
        if (other, again) == (stage, kind) and _balanced(counts, stages):
            assert first is not None
            assert microbatch is not None
            length, shift = at - middle, microbatch - first
            if shift > 0 and all(_recurs(order[t], order[t + length], shift) for t in range(middle, at)):
                return length, shift
        counts[other, again] += 1
    return None


def _balanced(counts: Counter[tuple[int, ActionKind]], stages: Iterable[int]) -> bool:
    """True if as many microbatches of every stage begin as end."""
    return all(
        counts[stage, ActionKind.F] == counts[stage, ActionKind.B] + counts[stage, ActionKind.I] > 0
        and counts[stage, ActionKind.I] == counts[stage, ActionKind.W]
        for stage in stages
    )


def _steady(order: Sequence[Action], length: int, shift: int) -> _Steady:
    """Extend a period from the middle of an order to both sides."""
    middle = len(order) // 2
    earlier = (t for t in range(middle, 0, -1) if not _recurs(order[t - 1], order[t + length - 1], shift))
    later = (t for t in range(middle + length, len(order)) if not _recurs(order[t - length], order[t], shift))
    start, end = next(earlier, 0), next(later, len(order))
    before = {action.microbatch for action in order[:start]}
    settled = max((t + 1 for t in range(start, len(order)) if order[t].microbatch in before), default=start)
    return _Steady(start, end, length, settled)


def _recurs(action: Action, later: Action, shift: int) -> bool:
    """True if the later action is the other one, of the microbatch `shift` later."""
    stage, kind, microbatch = action
    assert microbatch is not None
    return later == (stage, kind, microbatch + shift)


def _later(action: Action, shift: int) -> Action:
    stage, kind, microbatch = action
    assert microbatch is not None
    return Action(stage, kind, microbatch + shift)
