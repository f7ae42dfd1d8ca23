"""Transforms that reduce activation memory: recomputation, and offloading between forward and backward.

Both take a program that is not lowered and return one; lowering preserves the positions of their actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from stretto.errors import StrettoError
from stretto.program.action import Action, ActionKind
from stretto.program.checks.structure import check_structure
from stretto.program.program import Program

_BACKWARD = (ActionKind.B, ActionKind.I)


def recompute(program: Program, stages: Iterable[int] | None = None) -> Program:
    """Save only the inputs of `stages` between forward and backward, and repeat the forward: a `RECOMPUTE`
    right before each B or I, or before its pair (Chen et al. 2016, "Training deep nets with sublinear memory
    cost").

    A backward that directly follows its own forward among its rank's compute actions gets none, since it
    would save no memory.

    Args:
        program: a program that is not lowered, trains, and has no `RECOMPUTE`.
        stages: stages of the program, of any copy; all by default.

    Raises:
        StrettoError: the program is unsuitable, or a stage does not exist.
    """
    chosen = _chosen(program, stages, {ActionKind.RECOMPUTE})
    orders: list[tuple[Action, ...]] = []
    for order in program.orders:
        compute = [action for action in order if action.kind.is_compute]
        before: dict[Action, list[Action]] = defaultdict(list)
        for at, (stage, kind, i) in enumerate(compute):
            forward = Action(stage, ActionKind.F, i)
            if stage in chosen and kind in _BACKWARD and (at == 0 or compute[at - 1] != forward):
                # before the pair if it is the second of one
                paired = at > 0 and (compute[at - 1], compute[at]) in program.pairs
                before[compute[at - paired]].append(Action(stage, ActionKind.RECOMPUTE, i))
        orders.append(tuple(new for action in order for new in (*before.get(action, ()), action)))
    return _done(program, orders)


def offload(program: Program, stages: Iterable[int] | None = None, ahead: int = 1) -> Program:
    """Move the activations of `stages` to host memory between forward and backward: an `OFFLOAD` right after
    each F, a `RELOAD` `ahead` compute actions before the first use, which is `RECOMPUTE`, B or I. A pair
    counts as one action. Both are omitted if nothing would be computed between them.

    Args:
        program: a program that is not lowered, trains, and has no `OFFLOAD` or `RELOAD`.
        stages: stages of the program, of any copy; all by default.
        ahead: compute actions that the reload may overlap with; 0 reloads right before the use.

    Raises:
        StrettoError: the program is unsuitable, a stage does not exist, or `ahead` is below 0.
    """
    if ahead < 0:
        raise StrettoError(f"ahead is {ahead}, must be at least 0", hint="nearest is ahead=0")
    chosen = _chosen(program, stages, {ActionKind.OFFLOAD, ActionKind.RELOAD})
    orders: list[tuple[Action, ...]] = []
    for order in program.orders:
        # the order cut before each compute action or pair, with the recomputation that belongs to it
        opening = dict(program.pairs)
        blocks: list[list[Action]] = [[]]
        waiting: list[Action] = []  # actions that belong to the next compute action
        inside: Action | None = None  # the second action of the current pair
        for action in order:
            if action.kind is ActionKind.RECOMPUTE:
                waiting.append(action)
            elif not action.kind.is_compute:
                (waiting if waiting else blocks[-1]).append(action)
            elif action == inside:
                blocks[-1] += [*waiting, action]
                waiting, inside = [], None
            else:
                blocks.append([*waiting, action])
                waiting, inside = [], opening.get(action)
        blocks[-1] += waiting
        begun: dict[tuple[int, int | None], int] = {}  # block of each F
        reloads: dict[int, list[Action]] = defaultdict(list)  # by block
        for nth, block in enumerate(blocks):
            for stage, kind, i in block:
                if kind is ActionKind.F:
                    begun[stage, i] = nth
                elif stage in chosen and kind in _BACKWARD and nth - ahead > begun[stage, i] + 1:
                    reloads[nth - ahead].append(Action(stage, ActionKind.RELOAD, i))
        moved = {(action.stage, action.microbatch) for actions in reloads.values() for action in actions}
        out: list[Action] = []
        for nth, block in enumerate(blocks):
            out += reloads.get(nth, ())
            for action in block:
                out.append(action)
                if action.kind is ActionKind.F and (action.stage, action.microbatch) in moved:
                    out.append(action._replace(kind=ActionKind.OFFLOAD))
        orders.append(tuple(out))
    return _done(program, orders)


def _chosen(program: Program, stages: Iterable[int] | None, kinds: set[ActionKind]) -> set[int]:
    """Return the chosen stages; raise StrettoError if the program cannot have such actions."""
    names = " and ".join(sorted(kinds))
    if program.lowered:
        raise StrettoError(
            f"program {program.name!r} is lowered already", hint="give the schedule's own program"
        )
    if not program.trains:
        raise StrettoError(f"program {program.name!r} is forward-only: it keeps no activations")
    if any(action.kind in kinds for order in program.orders for action in order):
        raise StrettoError(f"program {program.name!r} has {names} already")
    chosen = set(range(program.stages)) if stages is None else set(stages)
    for stage in sorted(chosen):
        if not 0 <= stage < program.stages:
            raise StrettoError(
                f"stages has {stage}, must be of 0 to {program.stages - 1}",
                hint=f"nearest is {min(max(stage, 0), program.stages - 1)}",
            )
    check_structure(program)
    return chosen


def _done(program: Program, orders: list[tuple[Action, ...]]) -> Program:
    changed = replace(program, orders=tuple(orders))
    check_structure(changed)
    return changed
