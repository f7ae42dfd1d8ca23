"""Weights that change within the step: the version that each microbatch uses, the delay of its gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from stretto.program.action import Action, ActionKind
from stretto.program.program import Program, ScheduleError

_GRADIENT = frozenset({ActionKind.B, ActionKind.W})  # what completes a microbatch's weight gradient


def check_versions(program: Program) -> None:
    """Check that the weights in `program.versions` exist when they are used, and that every gradient is
    applied.

    A synchronous program has no versions and no `U`. In an asynchronous one, for every stage:

    - each B or W is followed by a `U`, which applies it with all others since the previous `U`; a `U` applies
      at least one, all of one training step, and if it names a microbatch, that is the last one;
    - the version of a forward is the index of a `U` done before it, or 0; later forwards never use an older
      version.

    Raises:
        ScheduleError: naming the rank and the action.
    """
    if not program.versions:
        for rank, order in enumerate(program.orders):
            for at, action in enumerate(order):
                if action.kind is ActionKind.UPDATE:
                    raise ScheduleError(
                        f"rank {rank} action {at} is {action}, but the program has no weight versions",
                        hint="a program whose weights are updated after its last action has no U",
                    )
        return
    shape = [len(row) for row in program.versions]
    if shape != [program.microbatches] * program.stages:
        raise ScheduleError(
            f"versions has rows of lengths {shape}, must have {program.stages} rows, one a stage, "
            f"of {program.microbatches}, one a microbatch"
        )
    for stage, rank in enumerate(program.placement):
        _check_stage(program, rank, stage)


def _check_stage(program: Program, rank: int, stage: int) -> None:
    """Check one stage's forwards, gradients and updates, in order."""
    updates = newest = 0  # U's done; version of the last forward
    waiting: list[int] = []  # microbatches whose gradients no U has applied yet
    for action in _of_stage(program, stage):
        _, kind, i = action
        problem = None
        if kind is ActionKind.F:
            assert i is not None
            version = program.versions[stage][i]
            if not 0 <= version <= updates:
                problem = f"uses version {version} of the weights, but there are 0 to {updates}"
            elif version < newest:
                problem = f"uses version {version} of the weights after a forward that used {newest}"
            newest = version
        elif kind in _GRADIENT:
            assert i is not None
            waiting.append(i)
        elif kind is ActionKind.UPDATE:
            if not waiting:
                problem = "has no gradient to apply"
            elif i is not None and i != waiting[-1]:
                problem = f"names microbatch {i}, but the last gradient that it applies is of {waiting[-1]}"
            elif len(steps := {mb // program.step_microbatches for mb in waiting}) > 1:
                which = " and ".join(map(str, sorted(steps)))
                problem = f"applies gradients of steps {which} at once"
            waiting.clear()
            updates += 1
        if problem is not None:
            raise ScheduleError(f"rank {rank}: {action} {problem}")
    if waiting:
        raise ScheduleError(f"rank {rank} has no U of stage {stage} after the gradient of {waiting[-1]}")


def weight_delays(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return for each stage and microbatch the number of updates between its forward and the update that
    applies its gradient: w(t+1) = w(t) - rate * gradient(w(t - delay)).

    All are 0 for synchronous programs; an entry is 0 if the microbatch goes through another copy of the
    stage.

    Args:
        program: a program that `check` accepts.
    """
    if not program.versions:
        return ((0,) * program.microbatches,) * program.stages
    rows: list[tuple[int, ...]] = []
    for stage in range(program.stages):
        row, updates = [0] * program.microbatches, 0
        for _, kind, i in _of_stage(program, stage):
            if kind is ActionKind.UPDATE:
                updates += 1
            elif kind in _GRADIENT:
                assert i is not None
                row[i] = updates - program.versions[stage][i]
        rows.append(tuple(row))
    return tuple(rows)


def weight_versions(program: Program) -> tuple[int, ...]:
    """Return for each stage the peak number of versions of its weights: the newest, those used by
    microbatches between their forward and their B or W, and those that later forwards will use.

    1 for synchronous programs. PipeDream has p - rank (Narayanan et al. 2019, section 3.3), PipeDream-2BW 2.

    Args:
        program: a program that `check` accepts.
    """
    if not program.versions:
        return (1,) * program.stages
    return tuple(
        max([1, *(count for _, count in live_versions(program, stage))]) for stage in range(program.stages)
    )


def live_versions(program: Program, stage: int) -> Iterator[tuple[Action, int]]:
    """Yield the actions of a stage, each with the number of versions of its weights after it.

    Args:
        program: an asynchronous program that `check` accepts.
    """
    versions = program.versions[stage]
    actions = list(_of_stage(program, stage))
    # a version is needed from its creation until the last microbatch that uses it is done
    users = Counter(versions[i] for _, kind, i in actions if kind is ActionKind.F and i is not None)
    live = {0}
    newest = 0
    for action in actions:
        _, kind, i = action
        if kind is ActionKind.UPDATE:
            if not users[newest]:
                live.discard(newest)
            newest += 1
            live.add(newest)
        elif kind in _GRADIENT:
            assert i is not None
            version = versions[i]
            users[version] -= 1
            if not users[version] and version != newest:
                live.discard(version)
        yield action, len(live)


def _of_stage(program: Program, stage: int) -> Iterable[Action]:
    return (action for action in program.orders[program.placement[stage]] if action.stage == stage)
