"""What a program must hold whatever its order between ranks: every piece of work once, in its place."""

from __future__ import annotations

from stretto.errors import StrettoError
from stretto.schedule.action import Action, Kind
from stretto.schedule.program import Program


class ScheduleError(StrettoError):
    """The program cannot be run to its end, or does not do a step's work; names the rank and the action."""


def check_structure(program: Program) -> None:
    """Every (stage, microbatch) has one F and one B or one I and one W, in order, on the rank that holds the
    stage.

    Raises:
        ScheduleError: naming the first rank and action that break this.
    """
    if not program.placement or not all(0 <= rank < program.ranks for rank in program.placement):
        raise ScheduleError(
            f"placement is {program.placement}, must name ranks from 0 to {program.ranks - 1}"
        )
    seen: set[Action] = set()
    for rank, order in enumerate(program.orders):
        for at, action in enumerate(order):
            where = f"rank {rank} action {at} is {action}"
            _check_place(program, rank, action, where)
            if action.kind.is_compute or action.kind.is_transfer:
                if action in seen:
                    raise ScheduleError(f"{where}, which is in the program twice")
                _check_order(seen, action, where)
                seen.add(action)
    _check_complete(program, seen)


def _check_place(program: Program, rank: int, action: Action, where: str) -> None:
    """The action's stage is this rank's, and its microbatch is one of the step's."""
    if not 0 <= action.stage < program.stages:
        raise ScheduleError(f"{where}, but stages are 0 to {program.stages - 1}")
    if program.placement[action.stage] != rank:
        raise ScheduleError(f"{where}, but stage {action.stage} is on rank {program.placement[action.stage]}")
    if not program.trains and action.kind in (Kind.B, Kind.I, Kind.W):
        raise ScheduleError(f"{where}, but the program is forward-only")
    if not (action.kind.is_compute or action.kind.is_transfer):
        if action.microbatch is not None and action.kind is not Kind.UPDATE:
            raise ScheduleError(f"{where}, but {action.kind} has no microbatch")
        return
    if action.microbatch is None or not 0 <= action.microbatch < program.microbatches:
        raise ScheduleError(f"{where}, but microbatches are 0 to {program.microbatches - 1}")


def _check_order(seen: set[Action], action: Action, where: str) -> None:
    """F comes before B or I, and I before W; B excludes I and W."""
    stage, kind, microbatch = action
    before = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}.get(kind)
    if before is not None and (need := Action(stage, before, microbatch)) not in seen:
        raise ScheduleError(f"{where}, before {need} on the same rank")
    for other in {Kind.B: (Kind.I, Kind.W), Kind.I: (Kind.B,), Kind.W: (Kind.B,)}.get(kind, ()):
        if (clash := Action(stage, other, microbatch)) in seen:
            raise ScheduleError(f"{where}, but {clash} does that work already")


def _check_complete(program: Program, seen: set[Action]) -> None:
    """Nothing is left out."""
    for stage, rank in enumerate(program.placement):
        for i in range(program.microbatches):
            missing = None
            if Action(stage, Kind.F, i) not in seen:
                missing = f"{stage}F{i}"
            elif not program.trains:
                continue
            elif Action(stage, Kind.I, i) in seen:
                missing = None if Action(stage, Kind.W, i) in seen else f"{stage}W{i}"
            elif Action(stage, Kind.B, i) not in seen:
                missing = f"{stage}B{i}"
            if missing:
                raise ScheduleError(f"rank {rank} never does {missing}")
