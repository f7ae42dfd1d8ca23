"""Schedules on the V: every rank holds a stage on the way down and one on the way up, backwards are split."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from stretto.layout.placement import vee
from stretto.program.action import Action, Kind
from stretto.program.memory import peak_held
from stretto.program.program import Program
from stretto.program.schedules.listing import tighten
from stretto.program.schedules.registry import register
from stretto.program.schedules.writer import Writer

_INTERVAL = 6  # slots in which a rank has one F, one I and one W of both stages


@register("zb-v", "zero bubble on a V placement: 1f1b's memory, even over the ranks", early=True)
def zb_v(ranks: int, microbatches: int) -> Program:
    """Qi et al. 2024, "Zero bubble pipeline parallelism", section 6; every rank holds p microbatches.

    With fewer than 2p - 1 microbatches it is the order for 2p - 1, with those missing left out.
    """
    orders = [_zb_v_order(ranks, microbatches, rank) for rank in range(ranks)]
    return Program(
        name="zb-v",
        placement=vee(ranks),
        microbatches=microbatches,
        orders=tuple(orders),
        parameters={"chunks": 2},
    )


def _zb_v_order(ranks: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    hand = Writer(microbatches)
    down, up = rank, 2 * ranks - 1 - rank
    total = max(2 * ranks - 1, microbatches)

    def backward(stage: int) -> None:
        hand.input_gradient(stage)
        hand.weight_gradient(stage)

    hand.forward(*[down] * (2 * (ranks - rank) - 1))
    hand.forward(*[up, down] * rank)
    for _ in range(ranks - rank):
        hand.forward(up)
        backward(up)
    for step in range(total - ranks):
        if step < total - (2 * ranks - 1 - rank):
            hand.forward(down)
        backward(down)
        hand.forward(up)
        backward(up)
    for _ in range(rank):
        hand.input_gradient(down)
        hand.input_gradient(up)
    for _ in range(ranks - rank):
        hand.input_gradient(down)
        hand.weight_gradient(down)
    hand.weight_gradients(up)
    hand.weight_gradients(down)
    return tuple(hand.order)


@register("v-half", "zero bubble on a V placement with about half of 1f1b's memory")
def v_half(ranks: int, microbatches: int) -> Program:
    """Qi et al. 2024, "Pipeline parallelism with controllable memory", section 3.

    At most (p+2) // 2 microbatches held, whatever their number.
    """
    p, wait = ranks, 0 if ranks % 2 else 3
    starts = [(2 * r, 3 * p - r - 2, 3 * p + wait + 2 * r - 1, 6 * p + wait - r - 2) for r in range(p)]
    return _from_block("v-half", starts, microbatches)


@register("v-min", "zero bubble on a V placement with about a third of 1f1b's memory")
def v_min(ranks: int, microbatches: int) -> Program:
    """Qi et al. 2024, "Pipeline parallelism with controllable memory", section 3.

    At most (p+4) // 3 microbatches held, whatever their number. The bubble grows with the microbatches
    where F, I and W take unequal times.
    """
    p, wait = ranks, 0 if ranks % 3 else 2
    starts = [(r, 2 * p - r - 1, 2 * p + wait + r, 4 * p + wait - r - 1) for r in range(p)]
    return _from_block("v-min", starts, microbatches)


def _from_block(name: str, starts: Sequence[tuple[int, int, int, int]], microbatches: int) -> Program:
    """Repeat a building block, one microbatch every six slots, then close the gaps.

    Args:
        starts: per rank, the slots of the first microbatch: F on the way down, F up, I up, I down.
    """
    ranks = len(starts)
    orders = [_repeat(rank, 2 * ranks - 1 - rank, starts[rank], microbatches) for rank in range(ranks)]
    block = Program(
        name=name,
        placement=vee(ranks),
        microbatches=microbatches,
        orders=tuple(orders),
        parameters={"chunks": 2},
    )
    limit = max(peak_held(block))
    return replace(block, orders=tighten(block.placement, orders, [limit] * ranks).orders)


def _repeat(down: int, up: int, starts: tuple[int, int, int, int], microbatches: int) -> tuple[Action, ...]:
    """One rank's order, gaps left out: its block for every microbatch, W in the slots that stay free."""
    kinds = ((down, Kind.F), (up, Kind.F), (up, Kind.I), (down, Kind.I))
    slots = {
        start + _INTERVAL * i: Action(stage, kind, i)
        for (stage, kind), start in zip(kinds, starts, strict=True)
        for i in range(microbatches)
    }
    assert len(slots) == 4 * microbatches, "two passes of the block want one slot"
    order: list[Action] = []
    due: deque[Action] = deque()
    for slot in range(starts[0], max(slots) + 1):
        action = slots.get(slot)
        if action is not None:
            order.append(action)
            if action.kind is Kind.I:
                due.append(Action(action.stage, Kind.W, action.microbatch))
        elif due:
            order.append(due.popleft())
    return (*order, *due)
