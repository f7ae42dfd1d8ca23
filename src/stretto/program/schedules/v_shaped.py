"""V-shaped schedules with split backwards: a rank has one stage on the way down and one on the way up."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from stretto.layout.placement import vee
from stretto.program.action import Action, ActionKind, actions, actions_and_none
from stretto.program.memory import peak_held
from stretto.program.program import Program
from stretto.program.schedules.list_scheduling import tighten
from stretto.program.schedules.registry import register

_PASSES = ActionKind.F, ActionKind.I, ActionKind.W
_INTERVAL = 6  # slots in which a rank has one F, one I and one W of both stages


@register("zb-v", "zero bubble on a V placement: 1f1b's memory, even over the ranks", early=True)
def zb_v(ranks: int, microbatches: int) -> Program:
    """Qi et al. 2024, "Zero bubble pipeline parallelism", section 6 (ZB-V).

    No bubble with equal times of F, I and W, in the memory of 1F1B: the last stage is on rank 0, so a
    microbatch's backward starts where its forward did, and every rank holds p microbatches. Ranks send twice
    as many messages. With fewer than 2p - 1 microbatches the order is that for 2p - 1, without the missing
    ones.
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
    # turns of F, I and W of the stages on the way down and up
    (fd, id_, wd), (fu, iu, wu) = (
        [actions_and_none(stage, kind, range(microbatches)) for kind in _PASSES]
        for stage in (rank, 2 * ranks - 1 - rank)
    )
    # with fewer, the rounds below would be negative
    total = max(2 * ranks - 1, microbatches)
    turns = [
        # until the first microbatch is back on this rank's way up: 2 (p - rank) - 1 forwards' time
        *[fd] * (2 * (ranks - rank) - 1),
        *[fu, fd] * rank,
        *[fu, iu, wu] * (ranks - rank),
        *[fd, id_, wd, fu, iu, wu] * (total - (2 * ranks - 1 - rank)),
        *[id_, wd, fu, iu, wu] * (ranks - 1 - rank),
        # drain: ranks before this one wait for its I, so W comes when there is no I left to do
        *[id_, iu] * rank,
        *[id_, wd] * (ranks - rank),
        *[wu] * rank,
        *[wd] * rank,
    ]
    return tuple(filter(None, map(next, turns)))


@register("v-half", "zero bubble on a V placement with about half of 1f1b's memory")
def v_half(ranks: int, microbatches: int) -> Program:
    """Qi et al. 2024, "Pipeline parallelism with controllable memory", section 3 (V-Half).

    At most (p+2) // 2 microbatches are held, whatever their number. The forward goes down the ranks with an
    offset of two slots between ranks and up with one, the backward likewise: on every rank the activations of
    a microbatch's two stages together live for about 6p slots, which at one microbatch every six slots is p/2
    microbatches. For even p, `wait` delays both passes of I by half a period: they would claim slots of F.
    """
    p, wait = ranks, 0 if ranks % 2 else 3
    starts = [(2 * r, 3 * p - r - 2, 3 * p + wait + 2 * r - 1, 6 * p + wait - r - 2) for r in range(p)]
    return _from_block("v-half", starts, microbatches)


@register("v-min", "zero bubble on a V placement with about a third of 1f1b's memory")
def v_min(ranks: int, microbatches: int) -> Program:
    """Qi et al. 2024, "Pipeline parallelism with controllable memory", section 3 (V-Min).

    At most (p+4) // 3 microbatches are held, whatever their number. All passes have an offset of one slot
    between ranks, the least that dependencies allow: activations live for about 4p slots, which is p/3
    microbatches. The bubble grows with the number of microbatches where F, I and W take unequal times. For p
    divisible by 3, `wait` delays both passes of I by two slots: they would claim slots of F.
    """
    p, wait = ranks, 0 if ranks % 3 else 2
    starts = [(r, 2 * p - r - 1, 2 * p + wait + r, 4 * p + wait - r - 1) for r in range(p)]
    return _from_block("v-min", starts, microbatches)


def _from_block(name: str, starts: Sequence[tuple[int, int, int, int]], microbatches: int) -> Program:
    """Repeat a building block, one microbatch every six slots, then close the gaps.

    Six slots are a rank's work on one microbatch with equal times: F, I and W of two stages. A block that
    claims no slot twice modulo six can be repeated forever without holding more activations (section 2).

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
    """Return one rank's order without gaps: its block for every microbatch, with W in the free slots."""
    kinds = ((down, ActionKind.F), (up, ActionKind.F), (up, ActionKind.I), (down, ActionKind.I))
    slots = dict[int, Action]()
    for (stage, kind), start in zip(kinds, starts, strict=True):
        of_kind = range(start, start + _INTERVAL * microbatches, _INTERVAL)
        slots |= zip(of_kind, actions(stage, kind, microbatches), strict=True)
    weights = {stage: iter(actions(stage, ActionKind.W, microbatches)) for stage in (down, up)}
    assert len(slots) == 4 * microbatches, "two passes of the block claim one slot"
    order: list[Action] = []
    due: deque[Action] = deque()
    for action in map(slots.get, range(starts[0], max(slots) + 1)):
        if action is not None:
            order.append(action)
            if action[1] is ActionKind.I:
                due.append(next(weights[action.stage]))
        elif due:
            order.append(due.popleft())
    return (*order, *due)
