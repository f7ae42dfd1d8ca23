"""Checks that recomputed and reloaded activations and gathered parameters are resident when they are used."""

from __future__ import annotations

from collections.abc import Iterable

from stretto.program.action import MEMORY_SAVING, Action, ActionKind
from stretto.program.program import Program, ScheduleError

_USES = (ActionKind.RECOMPUTE, ActionKind.B, ActionKind.I)
_BACKWARD = (ActionKind.B, ActionKind.I)


def check_memory_saving(program: Program) -> None:
    """Check the positions of `RECOMPUTE`, `OFFLOAD` and `RELOAD`.

    - `RECOMPUTE` comes after the F and right before the B or I of its (stage, microbatch): no F, B, I, W or
      other `RECOMPUTE` in between, except the F with which that B is paired.
    - `OFFLOAD` comes after the F; `RELOAD` after the `OFFLOAD` and before the first use, which is
      `RECOMPUTE`, B or I. Neither occurs without the other.

    The program must have every action with a microbatch once, on its rank.

    Raises:
        ScheduleError: naming the rank and the action.
    """
    partner = {second: first for first, second in program.pairs}
    for rank, order in enumerate(program.orders):
        if MEMORY_SAVING.isdisjoint({action.kind for action in order}):
            continue
        place = {action: at for at, action in enumerate(order) if action.kind.has_microbatch}
        for action in place:
            if action.kind is ActionKind.OFFLOAD:
                # F, OFFLOAD, RELOAD and the first use come in this order
                stage, _, i = action
                forward, reload = Action(stage, ActionKind.F, i), Action(stage, ActionKind.RELOAD, i)
                if place[action] < place[forward]:
                    raise ScheduleError(f"rank {rank} has {action} before {forward}")
                if reload not in place:
                    raise ScheduleError(f"rank {rank} has {action}, but no {reload}")
                if place[reload] < place[action]:
                    raise ScheduleError(f"rank {rank} has {reload} before {action}")
                uses = [use for kind in _USES if (use := Action(stage, kind, i)) in place]
                first = min(uses, key=place.__getitem__)
                if place[first] < place[reload]:
                    raise ScheduleError(f"rank {rank} has {first} before {reload}")
            elif action.kind is ActionKind.RELOAD and action._replace(kind=ActionKind.OFFLOAD) not in place:
                raise ScheduleError(
                    f"rank {rank} has {action}, but no {action._replace(kind=ActionKind.OFFLOAD)}"
                )
        _check_recomputed(rank, order, partner)


def _check_recomputed(rank: int, order: Iterable[Action], partner: dict[Action, Action]) -> None:
    """Check the actions between each RECOMPUTE and its backward."""
    pending: Action | None = None  # the last RECOMPUTE, until its backward
    begun: set[tuple[int, int | None]] = set()  # forwards done
    over: set[tuple[int, int | None]] = set()  # backwards done
    for action in order:
        stage, kind, i = action
        if not (kind.is_compute or kind is ActionKind.RECOMPUTE):
            continue
        if pending is not None:
            if kind in _BACKWARD and (stage, i) == (pending.stage, pending.microbatch):
                pending = None
            elif action not in [partner.get(pending._replace(kind=k)) for k in _BACKWARD]:
                raise ScheduleError(f"rank {rank} has {action} between {pending} and the backward it is for")
        if kind is ActionKind.F:
            begun.add((stage, i))
        elif kind in _BACKWARD:
            over.add((stage, i))
        elif kind is ActionKind.RECOMPUTE:
            if (stage, i) not in begun:
                raise ScheduleError(f"rank {rank} has {action} before {Action(stage, ActionKind.F, i)}")
            if (stage, i) in over:
                raise ScheduleError(f"rank {rank} has {action} after the backward that it is for")
            pending = action


USES = frozenset(
    {ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.RECOMPUTE}
)  # of a stage's parameters
_MOVES = frozenset({ActionKind.UNSHARD, ActionKind.RESHARD})


def check_gathered(program: Program) -> None:
    """Check that parameters are gathered whenever they are used.

    Either a stage has no `UNSHARD` and `RESHARD`, and its parameters are always resident; or the two
    alternate, `UNSHARD` first and `RESHARD` last, with every use (F, B, I, W, RECOMPUTE) between them.

    An update works on the shards and needs no gathering. All data-parallel ranks of a pipeline rank run the
    same order, so they gather in the same order.

    Raises:
        ScheduleError: naming the rank and the action; also for a program with weight versions, whose older
            weights no `UNSHARD` could gather.
    """
    for rank, order in enumerate(program.orders):
        resident = {action.stage: False for action in order if action.kind in _MOVES}
        if not resident:
            continue
        for at, action in enumerate(order):
            stage, kind, _ = action
            problem = None
            if kind in _MOVES:
                if program.versions:
                    problem = "but parameters with versions are not sharded"
                elif resident[stage] == (kind is ActionKind.UNSHARD):
                    problem = f"but the parameters of stage {stage} are {_STATE[resident[stage]]} already"
                resident[stage] = kind is ActionKind.UNSHARD
            elif kind in USES and not resident.get(stage, True):
                problem = f"but the parameters of stage {stage} are released"
            if problem is not None:
                raise ScheduleError(f"rank {rank} action {at} is {action}, {problem}")
        for stage, gathered in resident.items():
            if gathered:
                last = Action(stage, ActionKind.RESHARD)
                raise ScheduleError(
                    f"rank {rank} has no {last} after its last {Action(stage, ActionKind.UNSHARD)}"
                )


_STATE = {False: "released", True: "gathered"}
