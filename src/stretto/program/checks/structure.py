"""Checks that do not depend on the order between ranks: every action occurs once, on the right rank."""

from __future__ import annotations

from stretto.program.action import WITH_MICROBATCH, Action, ActionKind
from stretto.program.checks.residency import check_gathered, check_memory_saving
from stretto.program.checks.versions import check_versions
from stretto.program.pairing import check_pairs
from stretto.program.program import Program, ScheduleError


def check_structure(program: Program) -> None:
    """Check that every (stage, microbatch) has one F, and one B or one I and one W, in order, on its stage's
    rank, and that pairs, weight versions, recomputed or offloaded activations and gathered parameters are
    consistent.

    A microbatch goes through the stages of one copy of the weights only.

    Raises:
        ScheduleError: naming the first rank and action that violate this.
    """
    if program.microbatches < 1:
        raise ScheduleError(f"microbatches is {program.microbatches}, must be at least 1")
    if program.steps < 1 or program.microbatches % program.steps:
        raise ScheduleError(
            f"steps is {program.steps}, must divide the {program.microbatches} microbatches of all steps"
        )
    if program.steps > 1 and not program.versions:
        raise ScheduleError(
            f"steps is {program.steps}, but the program has no weight versions",
            hint="a program whose weights are updated after its last action is of one step",
        )
    if not program.placement or not all(0 <= rank < program.ranks for rank in program.placement):
        raise ScheduleError(f"placement is {program.placement}, must name ranks 0 to {program.ranks - 1}")
    if program.copies < 1 or program.stages % program.copies:
        raise ScheduleError(f"copies is {program.copies}, must divide the {program.stages} stages")
    for tie in program.tied:
        if not all(0 <= stage < program.stages for stage in tie):
            raise ScheduleError(f"tied set is {tie}, must name stages 0 to {program.stages - 1}")
    # a number from a file may be huge: nothing is allocated in proportion to it before this check
    actions = sum(map(len, program.orders))
    if program.microbatches > max(1, actions):
        raise ScheduleError(f"microbatches is {program.microbatches}, but there are {actions} actions in all")
    done: set[Action] = set()
    for rank, order in enumerate(program.orders):
        placed = dict[tuple[int, ActionKind], str | None]()  # the problem of a stage and kind on this rank
        for at, action in enumerate(order):
            stage, kind, _ = action
            if (stage, kind) not in placed:
                placed[stage, kind] = _placement_problem(program, rank, stage, kind)
            if problem := placed[stage, kind] or _microbatch_problem(program, done, action):
                raise ScheduleError(f"rank {rank} action {at} is {action}, {problem}")
            done.add(action)
    # every stage does every microbatch of its copy
    for stage, rank in enumerate(program.placement):
        for i, copy in enumerate(program.copy_of):
            # a microbatch that no copy starts is reported for the first copy
            if max(copy, 0) != stage // program.depth:
                continue
            must = [ActionKind.F]
            if program.trains:
                must.append(ActionKind.W if (stage, ActionKind.I, i) in done else ActionKind.B)
            for kind in must:
                if (stage, kind, i) not in done:
                    raise ScheduleError(f"rank {rank} never does {Action(stage, kind, i)}")
    check_memory_saving(program)
    check_gathered(program)
    check_versions(program)
    check_pairs(program)


def _placement_problem(program: Program, rank: int, stage: int, kind: ActionKind) -> str | None:
    """Return the error in actions of this stage and kind on this rank, or None."""
    if not 0 <= stage < program.stages:
        return f"but stages are 0 to {program.stages - 1}"
    if program.placement[stage] != rank:
        return f"but stage {stage} is on rank {program.placement[stage]}"
    if not program.trains and kind not in _INFERENCE:
        return "but the program is forward-only"
    return None


def _microbatch_problem(program: Program, done: set[Action], action: Action) -> str | None:
    """Return an error in the action's microbatch, or in what precedes it: F comes before B or I, I before W,
    and B excludes I and W.
    """
    stage, kind, microbatch = action
    if kind not in WITH_MICROBATCH:
        return None if microbatch is None or kind is ActionKind.UPDATE else f"but {kind} has no microbatch"
    if microbatch is None or not 0 <= microbatch < program.microbatches:
        return f"but microbatches are 0 to {program.microbatches - 1}"
    if program.copies > 1 and -1 != (copy := program.copy_of[microbatch]) != stage // program.depth:
        return f"but microbatch {microbatch} goes through copy {copy} of the weights"
    if action in done:
        return "which is in the program twice"
    before = _BEFORE.get(kind)
    if before is not None and (stage, before, microbatch) not in done:
        return f"before {Action(stage, before, microbatch)} on the same rank"
    for other in _INSTEAD.get(kind, ()):
        if (stage, other, microbatch) in done:
            return f"but {Action(stage, other, microbatch)} does that work already"
    return None


_INFERENCE = frozenset(
    {ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.UNSHARD, ActionKind.RESHARD}
)
_BEFORE = {ActionKind.B: ActionKind.F, ActionKind.I: ActionKind.F, ActionKind.W: ActionKind.I}
_INSTEAD = {
    ActionKind.B: (ActionKind.I, ActionKind.W),
    ActionKind.I: (ActionKind.B,),
    ActionKind.W: (ActionKind.B,),
}
