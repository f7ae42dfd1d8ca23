"""Checks that do not depend on the order between ranks: every action occurs once, on the right rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

from stretto.program.action import MEMORY_SAVING, WITH_MICROBATCH, Action, ActionKind
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
    rules = _RULES if program.trains else {ActionKind.F: _RULES[ActionKind.F]}
    copy_of = program.copy_of if program.copies > 1 else None
    # by stage and microbatch, the kinds of compute done; and all other actions
    states: dict[int, dict[int | None, str]] = {stage: {} for stage in range(program.stages)}
    others = set[Action]()
    for rank, order in enumerate(program.orders):
        local = {stage: states[stage] for stage in program.stages_of(rank)}
        for at, action in enumerate(order):
            stage, kind, i = action
            if (
                kind in rules
                and (done := local.get(stage)) is not None
                and done.get(i, "") == rules[kind][0]
                and i is not None
                and 0 <= i < program.microbatches
                and (copy_of is None or copy_of[i] in (-1, stage // program.depth))
            ):
                done[i] = rules[kind][1]
                continue
            problem = _placement_problem(program, rank, stage, kind)
            if problem := problem or _microbatch_problem(program, states[stage], others, action):
                raise ScheduleError(f"rank {rank} action {at} is {action}, {problem}")
            others.add(action)
    # every stage does every microbatch of its copy; one that no copy starts is reported for the first copy
    complete = {"FB", "FIW"} if program.trains else {"F"}
    of_copy = Counter([0] * program.microbatches if copy_of is None else (max(copy, 0) for copy in copy_of))
    for stage, done in states.items():
        if len(done) == of_copy[stage // program.depth] and complete.issuperset(done.values()):
            continue
        for i, copy in enumerate(program.copy_of):
            if max(copy, 0) == stage // program.depth and (state := done.get(i, "")) not in complete:
                missing = Action(stage, ActionKind({"": "F", "F": "B"}.get(state, "W")), i)
                raise ScheduleError(f"rank {program.placement[stage]} never does {missing}")
    kinds = {kind for _, kind, _ in others}
    if kinds & MEMORY_SAVING:
        check_memory_saving(program)
    if ActionKind.UNSHARD in kinds or ActionKind.RESHARD in kinds:
        check_gathered(program)
    if program.versions or ActionKind.UPDATE in kinds:
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


def _microbatch_problem(
    program: Program, done: Mapping[int | None, str], others: Set[Action], action: Action
) -> str | None:
    """Return an error in the action's microbatch, or in what precedes it: F comes before B or I, I before W,
    and B excludes I and W.

    Args:
        done: the kinds of compute that the action's stage has done, by microbatch.
        others: all other actions before it.
    """
    stage, kind, microbatch = action
    if kind not in WITH_MICROBATCH:
        return None if microbatch is None or kind is ActionKind.UPDATE else f"but {kind} has no microbatch"
    if microbatch is None or not 0 <= microbatch < program.microbatches:
        return f"but microbatches are 0 to {program.microbatches - 1}"
    if program.copies > 1 and -1 != (copy := program.copy_of[microbatch]) != stage // program.depth:
        return f"but microbatch {microbatch} goes through copy {copy} of the weights"
    state = done.get(microbatch, "")
    if action in others or (kind in _RULES and kind in state):
        return "which is in the program twice"
    if kind not in _RULES:
        return None
    before = ActionKind(_RULES[kind][0][-1])
    if before not in state:
        return f"before {Action(stage, before, microbatch)} on the same rank"
    return f"but {Action(stage, ActionKind(state[1]), microbatch)} does that work already"


_INFERENCE = frozenset(
    {ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.UNSHARD, ActionKind.RESHARD}
)
# the kinds that a stage must have done with a microbatch before each kind, and those it has done then
_RULES = {
    ActionKind.F: ("", "F"),
    ActionKind.B: ("F", "FB"),
    ActionKind.I: ("F", "FI"),
    ActionKind.W: ("FI", "FIW"),
}
