"""Parameters that are sharded are there whenever they are used."""

from __future__ import annotations

from stretto.schedule.action import Action, Kind
from stretto.schedule.fault import ScheduleError
from stretto.schedule.program import Program

USES = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE})  # of a stage's parameters
_MOVES = frozenset({Kind.UNSHARD, Kind.RESHARD})


def check_gathered(program: Program) -> None:
    """A stage has no `UNSHARD` and `RESHARD` at all, and its parameters are always there; or the two stand in
    turn, `UNSHARD` first and `RESHARD` last, with every use (F, B, I, W, RECOMPUTE) between.

    An update works on the shards and needs no gathering. All data parallel ranks of a pipeline rank run the
    same order, so they gather in one order.

    Raises:
        ScheduleError: naming the rank and the action; also for a program with weight versions, whose older
            weights no `UNSHARD` could gather.
    """
    for rank, order in enumerate(program.orders):
        there = {action.stage: False for action in order if action.kind in _MOVES}
        if not there:
            continue
        for at, action in enumerate(order):
            stage, kind, _ = action
            fault = None
            if kind in _MOVES:
                if program.versions:
                    fault = "but parameters with versions are not sharded"
                elif there[stage] == (kind is Kind.UNSHARD):
                    fault = f"but the parameters of stage {stage} are {_STATE[there[stage]]} already"
                there[stage] = kind is Kind.UNSHARD
            elif kind in USES and not there.get(stage, True):
                fault = f"but the parameters of stage {stage} are released"
            if fault is not None:
                raise ScheduleError(f"rank {rank} action {at} is {action}, {fault}")
        for stage, gathered in there.items():
            if gathered:
                last = Action(stage, Kind.RESHARD)
                raise ScheduleError(f"rank {rank} has no {last} after its last {Action(stage, Kind.UNSHARD)}")


_STATE = {False: "released", True: "gathered"}
