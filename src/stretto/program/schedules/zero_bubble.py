"""Schedules of one direction that put weight gradients where ranks would wait."""

from __future__ import annotations

from stretto.layout.placement import linear, loop
from stretto.program.action import Action
from stretto.program.program import Program
from stretto.program.schedules.listing import tighten
from stretto.program.schedules.one_f_one_b import group_size
from stretto.program.schedules.registry import register
from stretto.program.schedules.writer import Writer


@register(
    "zb-h1",
    "1f1b with weight gradients put off: a smaller bubble, every rank holds p microbatches",
    early=True,
)
def zb_h1(ranks: int, microbatches: int) -> Program:
    """Qi et al. 2024, "Zero bubble pipeline parallelism", section 2: warm-up as 1f1b, W lags I by rank."""
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        hand = Writer(microbatches)
        hand.forward(*[rank] * min(ranks - 1 - rank, microbatches))
        for step in range(microbatches):
            hand.forward(rank)
            hand.input_gradient(rank)
            if step >= rank:
                hand.weight_gradient()
        hand.weight_gradients()
        orders.append(tuple(hand.order))
    return Program(
        name="zb-h1",
        placement=linear(ranks),
        microbatches=microbatches,
        orders=tuple(orders),
        parameters={"chunks": 1},
    )


@register("zb-h2", "zero bubble without an optimiser barrier, for twice the activations: 2p - 1")
def zb_h2(ranks: int, microbatches: int) -> Program:
    """Qi et al. 2024, "Zero bubble pipeline parallelism", section 2: twice the warm-up, W lags I by 2 rank.

    A backward comes first in each round, so that the warm-up has 2 (p-1-rank) + 1 forwards. With fewer than
    2p - 1 microbatches there are gaps before W's turn; ranks then do it earlier.
    """
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        hand = Writer(microbatches)
        forwards = min(2 * (ranks - 1 - rank) + 1, microbatches)
        hand.forward(*[rank] * forwards)
        for step in range(microbatches):
            hand.input_gradient(rank)
            if step >= 2 * rank:
                hand.weight_gradient()
            hand.forward(rank)
        hand.weight_gradients()
        orders.append(tuple(hand.order))
    if microbatches < 2 * ranks - 1:
        orders[:] = tighten(linear(ranks), orders, [microbatches] * ranks).orders
    return Program(
        name="zb-h2",
        placement=linear(ranks),
        microbatches=microbatches,
        orders=tuple(orders),
        parameters={"chunks": 1},
    )


@register("interleaved-zb", "interleaved with half the warm-up, weight gradients put off")
def interleaved_zb(ranks: int, microbatches: int, chunks: int = 2, group: int | None = None) -> Program:
    """Interleaved ZB-H1, the order of torch.distributed.pipelining's ScheduleInterleavedZeroBubble.

    As `interleaved`, with a warm-up of (p-1-rank) + (chunks-1) group forwards; backwards are I, and W lags
    by `rank` of them. A last group shorter than the others is written as if it were whole, its missing
    microbatches left out; ranks then do later actions where they would wait, within the same bound.

    Raises:
        StrettoError: `group` is outside [p, m] ([m, p] when there are fewer microbatches than ranks).
    """
    size = group_size(ranks, microbatches, group)
    groups = -(-microbatches // size)
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        hand = Writer(microbatches)
        steps = [chunk for _ in range(groups) for chunk in range(chunks) for _ in range(size)]
        warmup = min((chunks - 1) * size + ranks - 1 - rank, len(steps))
        hand.forward(*(chunk * ranks + rank for chunk in steps[:warmup]))
        for step, chunk in enumerate(steps):
            if warmup + step < len(steps):
                hand.forward(steps[warmup + step] * ranks + rank)
            hand.input_gradient((chunks - 1 - chunk) * ranks + rank)
            if step >= rank:
                hand.weight_gradient()
        hand.weight_gradients()
        orders.append(tuple(hand.order))
    placement = loop(ranks, chunks)
    if microbatches % size:
        limit = min(chunks * microbatches, (chunks - 1) * size + ranks)
        orders[:] = tighten(placement, orders, [limit] * ranks).orders
    return Program(
        name="interleaved-zb",
        placement=placement,
        microbatches=microbatches,
        orders=tuple(orders),
        parameters={"chunks": chunks, "group": size},
    )
