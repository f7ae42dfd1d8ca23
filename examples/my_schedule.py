"""Pipeline schedules of your own, in a file that nothing imports: draw, plan and train with them by name.

    stretto schedule examples/my_schedule.py:lifo --ranks 4 --microbatches 8
    stretto schedule --compare 1f1b,gpipe,examples/my_schedule.py:lifo:depth=6 --ranks 4 --microbatches 8
    stretto train configs/quickstart.yaml schedule.name=examples/my_schedule.py:lifo

A function gets the numbers of pipeline ranks and of microbatches, and returns a `stretto.Program`, or the
actions of each rank in order: `2F0` is the forward (F) of microbatch 0 through stage 2, `2B0` its backward.
Its other parameters are options. What it returns is checked before anything runs.
"""

from __future__ import annotations


def lifo(ranks: int, microbatches: int, depth: int = 4) -> list[list[str]]:
    """GPipe in rounds of `depth` microbatches, each going backwards newest first: the activations that were
    written last, still in cache, are read first. Gradient accumulation over rounds is GPipe's (Huang et al.
    2019) with its memory bounded by `depth`; a round's bubble is not overlapped with the next.
    """
    if depth < 1:
        raise ValueError(f"depth is {depth}, must be at least 1")
    rounds = [range(i, min(i + depth, microbatches)) for i in range(0, microbatches, depth)]
    return [
        [
            action
            for each in rounds
            for action in (*(f"{rank}F{i}" for i in each), *(f"{rank}B{i}" for i in reversed(each)))
        ]
        for rank in range(ranks)
    ]


def one_ahead(ranks: int, microbatches: int) -> list[list[str]]:
    """1F1B that warms up by one microbatch more on every rank but the last, so that a late message does not
    stall the backwards; one more microbatch of activations is held.
    """
    orders = list[list[str]]()
    for rank in range(ranks):
        warm_up = min(microbatches, ranks - rank + (rank < ranks - 1))
        order = [f"{rank}F{i}" for i in range(warm_up)]
        for i in range(microbatches):
            order.append(f"{rank}B{i}")
            if warm_up + i < microbatches:
                order.append(f"{rank}F{warm_up + i}")
        orders.append(order)
    return orders
