"""Programs built by list scheduling: building blocks in real time, one microbatch each period.

Qi et al. 2024, "Pipeline parallelism with controllable memory": a schedule is a building block, the passes of
one microbatch, repeated every period; how fast F and I move from stage to stage sets how long activations
live. Here the block only says what is urgent, so unequal stages and the limits of memory are met by the play
itself. W fills gaps, or follows its I at once: the choice of Qi et al. 2024, "Zero bubble pipeline
parallelism", section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from stretto.search.evaluate import Times
from stretto.search.problem import Problem

_LAST = 1e6  # periods: after everything else


@dataclass(frozen=True)
class Block:
    """How urgent the passes of one microbatch are.

    `stretch` has the pace of F and I in each direction through the ranks, 1 as fast as the stages can:
    F of even chunks, F of odd chunks, I of odd chunks, I of even chunks.
    """

    stretch: tuple[float, float, float, float]
    backward_first: bool  # I before any F
    weights_last: bool  # W only where there is nothing else to do or no memory
    patience: float


def blocks(problem: Problem) -> Iterator[Block]:
    """The grid, most useful first."""
    if problem.stages > problem.ranks:
        one_or_two = (1.0, 2.0)
        paces = sorted(product(one_or_two, one_or_two, one_or_two, one_or_two), key=sum)
    else:
        paces = [(f, f, b, b) for b in (1.0, 2.0) for f in (1.0, 2.0)]
    for stretch in paces:
        for first, patience in product((True, False), (0.0, 1.0, 0.5)):
            for last in (True, False) if problem.split else (True,):
                if not (first and stretch[2:] != (1.0, 1.0)):
                    yield Block(stretch, first, last, patience)


def urgency(problem: Problem, block: Block) -> Times:
    """By operation and microbatch, for `dispatch`."""
    cost, delay, ranks = problem.cost, problem.delay, problem.ranks
    period = max(sum(cost[op] for op in ops) for ops in problem.operations) or 1.0
    offsets = [0.0] * len(cost)
    clock = 0.0
    for stage in range(problem.stages):
        odd = stage // ranks % 2
        offsets[3 * stage] = clock
        clock += delay[3 * stage] + cost[3 * stage] * block.stretch[odd]
    lead = _LAST * period / 2 if block.backward_first else 0.0
    for stage in range(problem.stages - 1, -1, -1):
        odd = stage // ranks % 2
        offsets[3 * stage + 1] = clock - lead
        clock += delay[3 * stage + 1] + cost[3 * stage + 1] * block.stretch[3 - odd]
        offsets[3 * stage + 2] = _LAST * period if block.weights_last else offsets[3 * stage + 1]
    return [[offset + period * i for i in range(problem.microbatches)] for offset in offsets]
