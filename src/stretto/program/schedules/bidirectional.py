"""Bidirectional schedules: microbatches enter the pipeline from both ends (Chimera, DualPipe)."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.errors import StrettoError
from stretto.layout.placement import mirror, vee
from stretto.program.action import Action, ActionKind
from stretto.program.program import Program
from stretto.program.schedules.list_scheduling import greedy
from stretto.program.schedules.registry import register
from stretto.program.schedules.writer import OrderWriter


@register("dualpipe-v", "forwards and backwards as overlapped pairs on a V placement", early=True)
def dualpipe_v(ranks: int, microbatches: int) -> Program:
    """DualPipeV (github.com/deepseek-ai/DualPipe, 2025): DualPipe "cut in half", as Sea AI Lab proposed.

    DualPipe's overlap of forward and backward on one copy of the weights: the V placement turns the second
    direction into the way back up. Ranks hold p + 1/2 microbatches. With fewer than 2p microbatches the order
    is that for 2p without the missing ones; backwards without a pair are then split.
    """
    total = max(2 * ranks, microbatches)
    writers = [OrderWriter(microbatches, splits=microbatches < total) for _ in range(ranks)]
    for rank, writer in enumerate(writers):
        down, up = rank, 2 * ranks - 1 - rank
        _eight_steps(writer=writer, stage_0=down, stage_1=up, rank=rank, ranks=ranks, microbatches=total)
    return _program("dualpipe-v", vee(ranks), microbatches, writers)


@register("dualpipe", "two copies of the weights, microbatches from both ends, overlapped pairs; even ranks")
def dualpipe(ranks: int, microbatches: int) -> Program:
    """DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1 and figure 5.

    Pairs of a forward and a backward overlap compute with all-to-all, at the price of two copies of the
    weights and p + 1 microbatches held. Even microbatches enter at rank 0, odd ones at the last rank. With
    fewer than 2p microbatches, or an odd number, the order is that for more without the missing ones;
    backwards without a pair are then split.

    Raises:
        StrettoError: `ranks` is odd.
    """
    _check_even("dualpipe", ranks)
    half = ranks // 2
    each = max(ranks, -(-microbatches // 2))
    splits = microbatches < 2 * each
    writers = [OrderWriter(microbatches, depth=ranks, copies=2, splits=splits) for _ in range(ranks)]
    for rank, writer in enumerate(writers):
        # copy 0 enters at the near end for the first half of the ranks
        down, up = rank, 2 * ranks - 1 - rank
        if rank >= half:
            down, up = up, down
        _eight_steps(
            writer=writer,
            stage_0=down,
            stage_1=up,
            rank=min(rank, ranks - 1 - rank),
            ranks=half,
            microbatches=each,
        )
    return _program("dualpipe", mirror(ranks), microbatches, writers, copies=2)


def _eight_steps(
    writer: OrderWriter, stage_0: int, stage_1: int, rank: int, ranks: int, microbatches: int
) -> None:
    """One rank's order, in the eight steps of DeepSeek's code (github.com/deepseek-ai/DualPipe).

    The names are that code's: nF0 is forwards of direction 0, nB1 backwards of direction 1, W a deferred
    weight gradient, F0B1 an overlapped pair of a forward and a backward. Microbatches of direction 0 enter at
    the near end, those of direction 1 come from the far end.

    Args:
        stage_0: the rank's stage of direction 0.
        stage_1: the rank's stage of direction 1.
        rank: distance from the near end.
        ranks: ranks between the ends of a direction: half of them in DualPipe, all in DualPipeV.
        microbatches: microbatches of one direction.
    """
    before = ranks - rank - 1  # ranks between this one and where the directions turn
    before_end = rank + 1
    # step 1, nF0: fill the pipeline until the other direction's first microbatch arrives
    writer.forward(*[stage_0] * (2 * before))
    # step 2, nF0F1: both directions fill
    writer.forward(*[stage_0, stage_1] * before_end)
    # step 3, nB1W1F1: the first backwards of direction 1; split, so that the rank before gets its I at once
    for _ in range(before):
        writer.input_gradient(stage_1)
        writer.weight_gradient()
        writer.forward(stage_1)
    # step 4, the main step, nF0B1F1B0: every forward is paired with a backward of the other direction, whose
    # all-to-all and compute hide each other
    for step in range(microbatches - 2 * ranks + before_end):
        if step == 0 and before == 0:  # where the directions turn, a pair would only delay the backward
            writer.forward(stage_0)
            writer.backward(stage_1)
        else:
            writer.pair(stage_0, stage_1)
        writer.pair(stage_1, stage_0)
    # step 5, nB1F1B0: direction 0 has no forwards left
    for _ in range(before):
        writer.backward(stage_1)
        writer.pair(stage_1, stage_0)
    # step 6, nB1B0: backwards alone; the second half split, since W fills the drain that follows
    backwards = [stage_1, stage_0] * before_end
    unsplit = 2 * (before_end // 2) + (0 if rank % 2 else 1)
    for at, stage in enumerate(backwards):
        (writer.backward if at < unsplit else writer.input_gradient)(stage)
    # step 7, nWB0: deferred W fill the waits between the last backwards of direction 0
    for _ in range(before):
        writer.weight_gradient()
        (writer.backward if unsplit >= len(backwards) else writer.input_gradient)(stage_0)
    # step 8, nW: the remaining W
    writer.weight_gradients()


def _program(
    name: str, placement: tuple[int, ...], microbatches: int, writers: Sequence[OrderWriter], copies: int = 1
) -> Program:
    return Program(
        name=name,
        placement=placement,
        microbatches=microbatches,
        orders=tuple(tuple(writer.order) for writer in writers),
        parameters={"chunks": 2 // copies},
        copies=copies,
        pairs=frozenset(pair for writer in writers for pair in writer.pairs),
    )


@register("chimera", "two copies of the weights, 1f1b from both ends, merged; even ranks")
def chimera(ranks: int, microbatches: int) -> Program:
    """Li and Hoefler 2021, "Chimera", section 3; beyond p microbatches by direct concatenation.

    Half the bubble of 1F1B, with p/2 + 1 to p microbatches held and two copies of the weights. Even
    microbatches enter at rank 0, odd ones at the last rank, at most p/2 of each direction at a time. Ranks
    take the oldest backward that is ready, or else the oldest forward, assuming that a backward takes as long
    as a forward, as in the paper's figures.

    Raises:
        StrettoError: `ranks` is odd.
    """
    _check_even("chimera", ranks)
    placement = mirror(ranks)
    preferences = [
        [
            Action(rank if i % 2 == 0 else 2 * ranks - 1 - rank, kind, i)
            for kind in (ActionKind.B, ActionKind.F)
            for i in range(microbatches)
        ]
        for rank in range(ranks)
    ]
    orders = greedy(placement, preferences, ranks // 2, copies=2, backward=1).orders
    return Program(
        name="chimera",
        placement=placement,
        microbatches=microbatches,
        orders=orders,
        parameters={"chunks": 1},
        copies=2,
    )


def _check_even(name: str, ranks: int) -> None:
    if ranks % 2:
        raise StrettoError(
            f"ranks is {ranks}, must be even for schedule {name!r}",
            hint=f"nearest is ranks={ranks + 1}" + (f" or ranks={ranks - 1}" if ranks > 1 else ""),
        )
