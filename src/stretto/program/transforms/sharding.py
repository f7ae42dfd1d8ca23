"""Gathers of a stage's sharded parameters before use, and releases after it (ZeRO-3, FSDP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.errors import StrettoError
from stretto.program.action import Action, ActionKind
from stretto.program.checks.residency import USES
from stretto.program.checks.structure import check_structure
from stretto.program.program import Program


def gather(program: Program, limit: int = 3) -> Program:
    """Add `UNSHARD` and `RESHARD`: a rank has the unsharded parameters of at most `limit` stages at once.

    An order is cut into runs that use one stage, or the two stages of an overlapped pair. If the limit
    allows, the stage of the next run is prefetched before the current run, so that gathering overlaps with
    compute. Among the stages that neither run needs, the one with the furthest next use is evicted (Belady
    1966), and a stage is released after its last use. All data-parallel ranks gather in this order.

    Args:
        program: a program that is not lowered and has no weight versions; apply `recompute` before, not
            after.
        limit: number of stages, at least 1, or 2 if pairs have two stages.

    Raises:
        StrettoError: the program is unsuitable, or the limit is too low.
    """
    if program.lowered:
        raise StrettoError(
            f"program {program.name!r} is lowered already", hint="give the schedule's own program"
        )
    if program.versions:
        raise StrettoError(
            f"program {program.name!r} has weight versions, which cannot be gathered from shards",
            hint="use a synchronous schedule, or do not shard the parameters",
        )
    if any(
        action.kind in (ActionKind.UNSHARD, ActionKind.RESHARD)
        for order in program.orders
        for action in order
    ):
        raise StrettoError(f"program {program.name!r} gathers its parameters already")
    check_structure(program)
    minimum = max((len({a.stage, b.stage}) for a, b in program.pairs), default=1)
    if limit < minimum:
        reason = " with overlapped pairs of two stages" if minimum > 1 else ""
        raise StrettoError(
            f"limit is {limit}, must be at least {minimum}{reason}", hint=f"nearest is {minimum}"
        )
    orders = tuple(_gathered(program, order, limit) for order in program.orders)
    gathered = replace(program, orders=orders)
    check_structure(gathered)
    return gathered


def _gathered(program: Program, order: Sequence[Action], limit: int) -> tuple[Action, ...]:
    """Return one rank's order with its gathers and releases."""
    runs = _runs(program, order)
    uses: dict[int, list[int]] = {}  # runs that use each stage, the next one last
    for nth in range(len(runs) - 1, -1, -1):
        for stage in runs[nth][0]:
            uses.setdefault(stage, []).append(nth)
    resident: list[int] = []
    out: list[Action] = []

    def fetch(stages: Sequence[int], keep: set[int], room: int) -> None:
        """Gather the stages that are not resident, as far as they fit in addition to those to keep."""
        for stage in stages:
            if stage in resident:
                continue
            idle = [other for other in resident if other not in keep]
            if len(resident) >= room and idle:
                furthest = max(idle, key=lambda other: uses[other][-1])
                resident.remove(furthest)
                out.append(Action(furthest, ActionKind.RESHARD))
            if len(resident) < room:
                resident.append(stage)
                out.append(Action(stage, ActionKind.UNSHARD))

    for nth, (stages, actions) in enumerate(runs):
        coming = runs[nth + 1][0] if nth + 1 < len(runs) else ()
        fetch(stages, {*stages}, limit)
        fetch(coming, {*stages, *coming}, limit)
        out += actions
        for stage in stages:
            uses[stage].pop()
            if not uses[stage]:
                resident.remove(stage)
                out.append(Action(stage, ActionKind.RESHARD))
    return tuple(out)


def _runs(program: Program, order: Sequence[Action]) -> list[tuple[tuple[int, ...], list[Action]]]:
    """Cut the order into runs; return the stages that each uses, and its actions."""
    partner = dict(program.pairs)
    runs: list[tuple[tuple[int, ...], list[Action]]] = []
    inside: Action | None = None  # the second action of the current pair
    for action in order:
        if action.kind in USES and action != inside:
            inside = partner.get(action)
            needed = {action.stage} if inside is None else {action.stage, inside.stage}
            stages = tuple(sorted(needed))
            if not runs or runs[-1][0] != stages:
                runs.append((stages, []))
        elif action == inside:
            inside = None
        if not runs:  # nothing is used before the first run
            runs.append(((), []))
        runs[-1][1].append(action)
    return runs
