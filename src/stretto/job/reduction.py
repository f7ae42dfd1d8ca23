"""When gradients are reduced, where a rank does not keep all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.job.data_parallel import Reduce
from stretto.layout.shards import Mode
from stretto.program.action import Action, ActionKind
from stretto.program.program import Program

_BACKWARDS = frozenset({ActionKind.B, ActionKind.I, ActionKind.W})


def choose(program: Program, mode: Mode) -> Reduce:
    """What `dp.reduce=auto` is.

    A stage's gradients are open from its first backward to its last. Reduced once a step, they are whole for
    so long; reduced with each microbatch they never are, but are reduced as often as there are microbatches.
    So once a step where gradients are whole anyway, and where every rank finishes one stage before it begins
    the backwards of the next, as in breadth-first schedules (Lamy-Poirier 2023), since there only a part of
    the gradients is whole at a time. Where weights change within the step, a reduction is one of an update.
    All ranks choose alike.
    """
    if mode not in ("zero2", "zero3") or program.versions:
        return "step"
    ranks = range(program.ranks)
    alone = all(len(program.stages_of(rank)) > 1 and most_open_stages(program, rank) == 1 for rank in ranks)
    return "step" if alone else "microbatch"


def reduction(program: Program, mode: Mode, choice: str = "auto") -> Reduce:
    """`dp.reduce` as it will be.

    Args:
        choice: "auto", "step" or "microbatch", as the config has it.
    """
    if choice == "auto":
        return choose(program, mode)
    return "step" if choice == "step" else "microbatch"


def most_open_stages(program: Program, rank: int) -> int:
    """The most stages of a rank whose gradients are open at once."""
    count = largest = 0
    for change in _changes(program.orders[rank]):
        count += change
        largest = max(largest, count)
    return largest


def _changes(order: Sequence[Action]) -> Iterator[int]:
    """1 where a stage's first backward of a step or an update is, -1 after its last."""
    last = {action.stage: at for at, action in enumerate(order) if action.kind in _BACKWARDS}
    open_ = set[int]()
    for at, (stage, kind, _) in enumerate(order):
        if kind in _BACKWARDS:
            if stage not in open_:
                open_.add(stage)
                yield 1
            if last[stage] == at:
                open_.remove(stage)
                yield -1
        elif kind is ActionKind.UPDATE and stage in open_:
            open_.remove(stage)
            yield -1
