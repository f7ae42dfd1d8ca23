"""Pairs of a forward and a backward that may run as one overlapped block."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from stretto.program.action import COMPUTE, Action, ActionKind
from stretto.program.program import Program, ScheduleError

# kinds that may come between the two, and move before or after them when they run as one block
_BEFORE = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})
_BETWEEN = _BEFORE | {ActionKind.SEND_F, ActionKind.SEND_B, ActionKind.OFFLOAD}


def check_pairs(program: Program) -> None:
    """Check that each of `program.pairs` is an F and a B or I, adjacent in this order on one rank.

    Only transfers and offloads may come between the two. No action is in two pairs, and no backward is paired
    with its own forward.

    Raises:
        ScheduleError: naming the pair.
    """
    if not program.pairs:
        return
    used: set[Action] = set()
    for first, second in sorted(program.pairs, key=_in_order):
        name = f"the pair of {first} and {second}"
        if first.kind is not ActionKind.F or second.kind not in (ActionKind.B, ActionKind.I):
            raise ScheduleError(f"{name} is not a forward and a backward, in this order")
        if (first.stage, first.microbatch) == (second.stage, second.microbatch):
            raise ScheduleError(f"{name} cannot be: the backward needs the forward")
        if first in used or second in used:
            raise ScheduleError(f"{name} has an action of another pair")
        used |= {first, second}
    adjacent: set[tuple[Action, Action]] = set()
    for rank, order in enumerate(program.orders):
        last: Action | None = None
        other: Action | None = None  # an action after `last` that may not be within a pair
        for action in order:
            if action.kind not in COMPUTE:
                if action.kind not in _BETWEEN:
                    other = action
                continue
            if last is not None and (last, action) in program.pairs:
                if other is not None:
                    raise ScheduleError(f"rank {rank} has {other} within the pair of {last} and {action}")
                adjacent.add((last, action))
            last, other = action, None
    for first, second in sorted(program.pairs - adjacent, key=_in_order):
        raise ScheduleError(
            f"the pair of {first} and {second} is not in the program: on no rank does one follow the other"
        )


def _in_order(pair: tuple[Action, Action]) -> tuple[tuple[int, str, int], ...]:
    """Return a sort key, so that errors name the same pair in every run."""
    return tuple((stage, kind, -1 if i is None else i) for stage, kind, i in pair)


def as_blocks(program: Program) -> Program:
    """Return the program with nothing between the two actions of a pair: receives come before the block,
    sends and offloads after it, as around torch's `OVERLAP_F_B`.

    The program must satisfy `check_pairs`.
    """
    if not program.pairs:
        return program
    opens = {first for first, _ in program.pairs}
    orders: list[tuple[Action, ...]] = []
    for order in program.orders:
        out: list[Action] = []
        first: Action | None = None  # of the current block
        after: list[Action] = []
        for action in order:
            if first is None:
                if action in opens:
                    first = action
                else:
                    out.append(action)
            elif action.kind.is_compute:
                out += [first, action, *after]
                first, after = None, []
            elif action.kind in _BEFORE:
                out.append(action)
            else:
                after.append(action)
        orders.append(tuple(out))
    return replace(program, orders=tuple(orders))


Step = tuple[int, ...]  # indices in a rank's order of actions that run as one


def steps_of(program: Program, rank: int, blocks: bool) -> list[Step]:
    """Return the indices of a rank's actions in the order in which they run.

    With `blocks` the two actions of a pair are one step. Actions between them that depend on the first come
    after the block: sending or moving its results, releasing parameters. All others, such as the receive of
    the second's input, come before it.
    """
    order = program.orders[rank]
    if not (blocks and program.pairs):
        return [(at,) for at in range(len(order))]
    steps: list[Step] = []
    compute = [at for at, action in enumerate(order) if action.kind.is_compute]
    second = {
        first: then for first, then in pairwise(compute) if (order[first], order[then]) in program.pairs
    }
    at = 0
    while at < len(order):
        then = second.get(at)
        if then is None:
            steps.append((at,))
            at += 1
            continue
        between = [(place, _follows(order[at], order[place])) for place in range(at + 1, then)]
        steps += [(place,) for place, after in between if not after]
        steps.append((at, then))
        steps += [(place,) for place, after in between if after]
        at = then + 1
    return steps


def _follows(first: Action, between: Action) -> bool:
    """True if an action between the two of a pair depends on the first."""
    same_input = (between.stage, between.microbatch) == (first.stage, first.microbatch)
    return same_input or between.kind is ActionKind.RESHARD
