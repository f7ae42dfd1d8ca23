"""When gradients are reduced if a rank does not store all of them (`zero2`, `zero3`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.job.data_parallel import Reduce
from stretto.layout.shards import Mode
from stretto.program.action import Action, ActionKind
from stretto.program.program import Program

_BACKWARDS = frozenset({ActionKind.B, ActionKind.I, ActionKind.W})


def choose(program: Program, mode: Mode) -> Reduce:
    """Return the meaning of `dp.reduce=auto` for a program; the same on all ranks.

    A stage's gradients are open from its first backward to its last. If they are reduced once a step, the
    rank stores them unsharded during that time; if they are reduced with each microbatch, it never does, but
    each microbatch costs a reduction. Hence "step" for modes that store unsharded gradients anyway, and if
    every rank finishes one stage before it begins the backwards of the next, as in breadth-first schedules
    (Lamy-Poirier 2023), since then only one stage's gradients are unsharded at a time. If weights change
    within the step, gradients are reduced for each update.
    """
    if mode not in ("zero2", "zero3") or program.versions:
        return "step"
    ranks = range(program.ranks)
    alone = all(len(program.stages_of(rank)) > 1 and most_open_stages(program, rank) == 1 for rank in ranks)
    return "step" if alone else "microbatch"


def reduction(program: Program, mode: Mode, choice: str = "auto") -> Reduce:
    """Return when gradients are reduced.

    Args:
        choice: "auto", "step" or "microbatch", as configured.
    """
    if choice == "auto":
        return choose(program, mode)
    return "step" if choice == "step" else "microbatch"


def most_open_stages(program: Program, rank: int) -> int:
    """Return the largest number of a rank's stages whose gradients are open at once."""
    count = largest = 0
    for change in _changes(program.orders[rank]):
        count += change
        largest = max(largest, count)
    return largest


def _changes(order: Sequence[Action]) -> Iterator[int]:
    """Yield 1 for a stage's first backward of a step or an update, and -1 after its last."""
    last = {action.stage: index for index, action in enumerate(order) if action.kind in _BACKWARDS}
    open_ = set[int]()
    for index, (stage, kind, _) in enumerate(order):
        if kind in _BACKWARDS:
            if stage not in open_:
                open_.add(stage)
                yield 1
            if last[stage] == index:
                open_.remove(stage)
                yield -1
        elif kind is ActionKind.UPDATE and stage in open_:
            open_.remove(stage)
            yield -1
