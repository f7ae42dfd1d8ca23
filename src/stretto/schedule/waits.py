"""What a rank may have to wait for: another rank getting to a place in its order."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from stretto.schedule.action import Action, Kind
from stretto.schedule.program import Program


class Wait(NamedTuple):
    """`rank` must have done the first `reach` actions of its order; `action` is the one that matters."""

    rank: int
    reach: int
    action: Action


def tied_arrivals(program: Program) -> dict[tuple[int, int], list[Wait]]:
    """For each (rank, place) that joins a reduction of tied parameters, the other ranks that have to come to
    it.

    A rank with several stages of one set joins with the last of them.
    """
    joins: list[dict[int, int]] = [{} for _ in program.tied]
    for rank, order in enumerate(program.orders):
        nth: dict[int, int] = defaultdict(int)
        for at, action in enumerate(order):
            if action.kind is Kind.REDUCE_TIED:
                mine = [k for k, tie in enumerate(program.tied) if action.stage in tie]
                joins[mine[nth[action.stage]]][rank] = at
                nth[action.stage] += 1
    return {
        (rank, at): [
            Wait(other, to, program.orders[other][to]) for other, to in join.items() if other != rank
        ]
        for join in joins
        for rank, at in join.items()
    }
