"""Zero-bubble schedules of one direction: weight gradients (W) are deferred to fill waiting times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

from stretto.layout.placement import linear, loop
from stretto.program.action import Action, ActionKind, actions
from stretto.program.program import Program
from stretto.program.schedules.list_scheduling import tighten
from stretto.program.schedules.one_f_one_b import group_size, in_groups
from stretto.program.schedules.registry import register

_PASSES = ActionKind.F, ActionKind.I, ActionKind.W


@register(
    "zb-h1",
    "1f1b with deferred weight gradients: a smaller bubble, every rank holds p microbatches",
    early=True,
)
def zb_h1(ranks: int, microbatches: int) -> Program:
    """Qi et al. 2024, "Zero bubble pipeline parallelism", section 2 (ZB-H1).

    With equal times of F, I and W the bubble is a third of that of 1F1B, and no rank holds more than the p
    microbatches of 1F1B's first. The warm-up is that of 1F1B: p-1-rank forwards until the first gradient
    arrives. Only I is on the path to the rank before, so W waits: rank r defers r of them, which fill its
    drain, where 1F1B has its bubble. Deferred W keep activations alive, r microbatches on rank r on top of
    the p - r of 1F1B: p on every rank.
    """
    orders = [
        _deferring(
            *(actions(rank, kind, microbatches) for kind in _PASSES), warmup=ranks - 1 - rank, lag=rank
        )
        for rank in range(ranks)
    ]
    return Program(
        name="zb-h1",
        placement=linear(ranks),
        microbatches=microbatches,
        orders=tuple(orders),
        parameters={"chunks": 1},
    )


@register("zb-h2", "zero bubble without an optimiser barrier, for twice the activations: 2p - 1")
def zb_h2(ranks: int, microbatches: int) -> Program:
    """Qi et al. 2024, "Zero bubble pipeline parallelism", section 2 (ZB-H2).

    With equal times of F, I and W no rank waits between its first and last action: 2 (p-1-rank) + 1 forwards
    fill the whole round trip to the loss and back, and W lags I by 2 rank, which fills the drain. It takes
    the activations of 2p - 1 microbatches, and an optimiser without a barrier at the end of the step. Each
    round starts with an I, hence the one forward more than twice the warm-up of 1F1B. With fewer than 2p - 1
    microbatches there are gaps before a W is due; ranks then do it earlier.
    """
    orders = [
        _deferring(
            *(actions(rank, kind, microbatches) for kind in _PASSES),
            warmup=2 * (ranks - 1 - rank),
            lag=2 * rank,
        )
        for rank in range(ranks)
    ]
    if microbatches < 2 * ranks - 1:
        orders[:] = tighten(linear(ranks), orders, [microbatches] * ranks).orders
    return Program(
        name="zb-h2",
        placement=linear(ranks),
        microbatches=microbatches,
        orders=tuple(orders),
        parameters={"chunks": 1},
    )


@register("interleaved-zb", "interleaved with half the warm-up, weight gradients deferred")
def interleaved_zb(ranks: int, microbatches: int, chunks: int = 2, group: int | None = None) -> Program:
    """Interleaved ZB-H1, the order of torch.distributed.pipelining's ScheduleInterleavedZeroBubble.

    As `interleaved`, with a warm-up of (p-1-rank) + (chunks-1) group forwards, half the rank-dependent part:
    as in ZB-H1 deferred W fill the waits that the longer warm-up would hide, and hold the same activations. W
    lags I by `rank`. A last group shorter than the others is written as if it were full, without its missing
    microbatches; ranks then run later actions instead of waiting, within the same bound of activations.

    Args:
        chunks: stages per rank, placed in a loop.
        group: microbatches that go through a chunk before the next chunk; default p.

    Raises:
        StrettoError: `group` is outside [p, m] ([m, p] when there are fewer microbatches than ranks).
    """
    size = group_size(ranks, microbatches, group)
    padded = -(-microbatches // size) * size
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        stages = range(rank, chunks * ranks, ranks)
        passes = (
            in_groups(stages if kind is ActionKind.F else stages[::-1], kind, microbatches, size, padded)
            for kind in _PASSES
        )
        orders.append(_deferring(*passes, warmup=(chunks - 1) * size + ranks - 1 - rank, lag=rank))
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


def _deferring(
    forwards: Sequence[Action | None],
    inputs: Sequence[Action | None],
    weights: Sequence[Action | None],
    warmup: int,
    lag: int,
) -> tuple[Action, ...]:
    """Return `warmup` forwards, then forwards and input gradients alternately, each with the weight gradient
    of `lag` steps before; without Nones.
    """
    f = chain(forwards, repeat(None))
    i, w = iter(inputs), iter(weights)
    steps, lag = len(inputs), min(lag, len(inputs))
    turns = [f] * min(warmup, steps) + [f, i] * lag + [f, i, w] * (steps - lag) + [w] * lag
    return tuple(filter(None, map(next, turns)))
