"""Zero-bubble schedules of one direction: weight gradients (W) are deferred to fill waiting times."""

from __future__ import annotations

from stretto.layout.placement import linear, loop
from stretto.program.action import Action
from stretto.program.program import Program
from stretto.program.schedules.list_scheduling import tighten
from stretto.program.schedules.one_f_one_b import group_size
from stretto.program.schedules.registry import register
from stretto.program.schedules.writer import OrderWriter


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
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        writer = OrderWriter(microbatches)
        writer.forward(*[rank] * min(ranks - 1 - rank, microbatches))
        for step in range(microbatches):
            writer.forward(rank)
            writer.input_gradient(rank)
            if step >= rank:
                writer.weight_gradient()
        writer.weight_gradients()
        orders.append(tuple(writer.order))
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
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        writer = OrderWriter(microbatches)
        forwards = min(2 * (ranks - 1 - rank) + 1, microbatches)
        writer.forward(*[rank] * forwards)
        for step in range(microbatches):
            writer.input_gradient(rank)
            if step >= 2 * rank:
                writer.weight_gradient()
            writer.forward(rank)
        writer.weight_gradients()
        orders.append(tuple(writer.order))
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
    groups = -(-microbatches // size)
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        writer = OrderWriter(microbatches)
        steps = [chunk for _ in range(groups) for chunk in range(chunks) for _ in range(size)]
        warmup = min((chunks - 1) * size + ranks - 1 - rank, len(steps))
        writer.forward(*(chunk * ranks + rank for chunk in steps[:warmup]))
        for step, chunk in enumerate(steps):
            if warmup + step < len(steps):
                writer.forward(steps[warmup + step] * ranks + rank)
            writer.input_gradient((chunks - 1 - chunk) * ranks + rank)
            if step >= rank:
                writer.weight_gradient()
        writer.weight_gradients()
        orders.append(tuple(writer.order))
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
