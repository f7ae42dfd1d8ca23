"""Gradients are reduced once they are complete, and applied as one over tied stages and copies."""

from __future__ import annotations

from stretto.program.action import Action, Kind
from stretto.program.program import Program, ScheduleError


def check_reductions(program: Program) -> None:
    """In a lowered program that trains:

    - synchronous: `REDUCE_GRAD` once for each stage that has a backward, after its last B or W; then
      `REDUCE_TIED` once for each tied set of the stage, before which the stage's own reduction stands. With
      several copies of the weights, the copies of every stage are a tied set.
    - asynchronous: `REDUCE_GRAD` right before each `U` of its stage and nowhere else; no tied sets and no
      copies, since stages would apply their shares of one parameter's gradient at different times.

    Raises:
        ScheduleError: naming the rank and the action.
    """
    _check_sets(program)
    for rank in range(program.ranks):
        for stage in program.stages_of(rank):
            if program.versions:
                _check_updates(program, rank, stage)
            else:
                _check_stage(program, rank, stage)


def _check_sets(program: Program) -> None:
    if program.versions and (program.tied or program.copies > 1):
        what = f"tied set {program.tied[0]}" if program.tied else f"{program.copies} copies"
        raise ScheduleError(f"the program has {what} and weights that change within the step")
    if program.copies > 1:
        sets = {frozenset(tie) for tie in program.tied}
        for stage in range(program.depth):
            mine = tuple(range(stage, program.stages, program.depth))
            if frozenset(mine) not in sets:
                raise ScheduleError(f"copies {mine} of stage {stage} are no tied set: their gradients differ")


def _check_updates(program: Program, rank: int, stage: int) -> None:
    """REDUCE_GRAD and U of an asynchronous program."""
    order = program.orders[rank]
    for at, action in enumerate(order):
        if action.stage != stage:
            continue
        reduce = Action(stage, Kind.REDUCE_GRAD)
        if action.kind is Kind.UPDATE and (at == 0 or order[at - 1] != reduce):
            raise ScheduleError(f"rank {rank} has no {reduce} right before {action}")
        if action == reduce:
            after = order[at + 1] if at + 1 < len(order) else None
            if after is None or (after.stage, after.kind) != (stage, Kind.UPDATE):
                raise ScheduleError(f"rank {rank} has {reduce}, but no U of stage {stage} right after it")
        if action.kind is Kind.REDUCE_TIED:
            raise ScheduleError(f"rank {rank} has {action} 1 times, must be 0: once a tied set")


def _check_stage(program: Program, rank: int, stage: int) -> None:
    """The reductions of one stage at the end of a synchronous step."""
    order = program.orders[rank]
    mine = [(at, a.kind) for at, a in enumerate(order) if a.stage == stage]
    # a copy that no microbatch goes through has nothing to reduce, but joins the sum over the copies
    last = max((at for at, kind in mine if kind in (Kind.B, Kind.W)), default=-1)
    reduced = [at for at, kind in mine if kind is Kind.REDUCE_GRAD]
    times = int(last >= 0)
    if len(reduced) != times:
        must = "must have it once" if times else "but has no gradient of that stage"
        raise ScheduleError(f"rank {rank} has {stage}REDUCE_GRAD {len(reduced)} times, {must}")
    if reduced and reduced[0] < last:
        raise ScheduleError(f"rank {rank} has {stage}REDUCE_GRAD before {order[last]}")
    tied = [at for at, kind in mine if kind is Kind.REDUCE_TIED]
    sets = sum(stage in tie for tie in program.tied)
    if len(tied) != sets:
        raise ScheduleError(
            f"rank {rank} has {stage}REDUCE_TIED {len(tied)} times, must be {sets}: once a tied set"
        )
    if tied and reduced and tied[0] < reduced[0]:
        raise ScheduleError(f"rank {rank} has {stage}REDUCE_TIED before {stage}REDUCE_GRAD")
