"""A program replayed where ranks share cores: those that compute at once share them evenly."""

from __future__ import annotations

from collections.abc import Callable

from stretto.schedule.action import Action, Kind
from stretto.schedule.program import Program

_BACK = {Kind.B, Kind.I}


def shared_makespan(
    program: Program, seconds: Callable[[Action], float], processes: int, cores: int
) -> float:
    """Seconds until all compute actions of a program are done.

    Whoever waits for an input uses no core, so that others have more; where fewer ranks can work than there
    are cores, some cores idle, as in a pipeline's first and last moments.

    Args:
        seconds: of an action on a core of its own.
        processes: that compute at once where one pipeline rank does.
        cores: that all of them share.
    """
    orders = [[a for a in order if a.kind.is_compute] for order in program.orders]
    at = [0] * len(orders)
    done = set[Action]()
    running: dict[int, float] = {}
    now = 0.0
    while True:
        for rank, order in enumerate(orders):
            if rank not in running and at[rank] < len(order) and _ready(program, order[at[rank]], done):
                running[rank] = seconds(order[at[rank]])
        if not running:
            assert all(n == len(order) for n, order in zip(at, orders, strict=True)), "a standstill"
            return now
        rate = min(1.0, cores / (processes * len(running)))
        step = min(running.values())
        now += step / rate
        for rank in list(running):
            running[rank] -= step
            if running[rank] <= 1e-12:
                del running[rank]
                done.add(orders[rank][at[rank]])
                at[rank] += 1


def _ready(program: Program, action: Action, done: set[Action]) -> bool:
    """Whether what an action takes from another stage is there."""
    stage, kind, mb = action
    if kind is Kind.F:
        return program.is_first(stage) or Action(stage - 1, Kind.F, mb) in done
    if kind in _BACK and not program.is_last(stage):
        return any(Action(stage + 1, back, mb) in done for back in _BACK)
    return True
