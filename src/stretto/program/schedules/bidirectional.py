"""Schedules in which microbatches enter the ranks from both ends."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.errors import StrettoError
from stretto.layout.placement import mirror, vee
from stretto.program.action import Action, Kind
from stretto.program.program import Program
from stretto.program.schedules.listing import greedy
from stretto.program.schedules.registry import register
from stretto.program.schedules.writer import Writer


@register("dualpipe-v", "forwards and backwards as overlapped pairs on a V placement", early=True)
def dualpipe_v(ranks: int, microbatches: int) -> Program:
    """DeepSeek-AI 2025, DualPipe's "cut in half" on one copy of the weights; holds p + 1/2 microbatches.

    With fewer than 2p microbatches it is the order for 2p with those missing left out; backwards that have
    lost their pair are then split.
    """
    total = max(2 * ranks, microbatches)
    hands = [Writer(microbatches, splits=microbatches < total) for _ in range(ranks)]
    for rank, hand in enumerate(hands):
        down, up = rank, 2 * ranks - 1 - rank
        _eight_steps(hand=hand, zero=down, one=up, rank=rank, ranks=ranks, microbatches=total)
    return _program("dualpipe-v", vee(ranks), microbatches, hands)


@register("dualpipe", "two copies of the weights, microbatches from both ends, overlapped pairs; even ranks")
def dualpipe(ranks: int, microbatches: int) -> Program:
    """DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1; holds p + 1 microbatches.

    Even microbatches enter at rank 0, odd ones at the last rank. With fewer than 2p microbatches, or an odd
    number, it is the order for more with those missing left out; backwards that have lost their pair are then
    split.

    Raises:
        StrettoError: `ranks` is odd.
    """
    _check_even("dualpipe", ranks)
    half = ranks // 2
    each = max(ranks, -(-microbatches // 2))
    splits = microbatches < 2 * each
    hands = [Writer(microbatches, depth=ranks, copies=2, splits=splits) for _ in range(ranks)]
    for rank, hand in enumerate(hands):
        # copy 0 is the near one for the first half of the ranks
        near, far = rank, 2 * ranks - 1 - rank
        if rank >= half:
            near, far = far, near
        _eight_steps(
            hand=hand, zero=near, one=far, rank=min(rank, ranks - 1 - rank), ranks=half, microbatches=each
        )
    return _program("dualpipe", mirror(ranks), microbatches, hands, copies=2)


def _eight_steps(hand: Writer, zero: int, one: int, rank: int, ranks: int, microbatches: int) -> None:
    """The eight steps of DualPipe's code for a rank of `ranks` and this many microbatches a direction.

    Args:
        zero, one: the rank's stages of direction 0, which enters near, and of direction 1.
    """
    before, here = ranks - rank - 1, rank + 1
    hand.forward(*[zero] * (2 * before))
    hand.forward(*[zero, one] * here)
    for _ in range(before):
        hand.input_gradient(one)
        hand.weight_gradient()
        hand.forward(one)
    for step in range(microbatches - 2 * ranks + here):
        if step == 0 and before == 0:  # where the directions turn, a pair would only delay the backward
            hand.forward(zero)
            hand.backward(one)
        else:
            hand.pair(zero, one)
        hand.pair(one, zero)
    for _ in range(before):
        hand.backward(one)
        hand.pair(one, zero)
    backwards = [one, zero] * here
    # from the middle on backwards are split
    whole = 2 * (here // 2) + (0 if rank % 2 else 1)
    for at, stage in enumerate(backwards):
        (hand.backward if at < whole else hand.input_gradient)(stage)
    for _ in range(before):
        hand.weight_gradient()
        (hand.backward if whole >= len(backwards) else hand.input_gradient)(zero)
    hand.weight_gradients()


def _program(
    name: str, placement: tuple[int, ...], microbatches: int, hands: Sequence[Writer], copies: int = 1
) -> Program:
    return Program(
        name=name,
        placement=placement,
        microbatches=microbatches,
        orders=tuple(tuple(hand.order) for hand in hands),
        parameters={"chunks": 2 // copies},
        copies=copies,
        pairs=frozenset(pair for hand in hands for pair in hand.pairs),
    )


@register("chimera", "two copies of the weights, 1f1b from both ends, merged; even ranks")
def chimera(ranks: int, microbatches: int) -> Program:
    """Li and Hoefler 2021, "Chimera", section 3 (direct concatenation); holds p/2 + 1 to p.

    Even microbatches enter at rank 0, odd ones at the last rank, at most p/2 each way at a time. Ranks take
    the oldest backward that is ready, or else the oldest forward; in this a backward lasts as long as a
    forward, as in the paper's figures.

    Raises:
        StrettoError: `ranks` is odd.
    """
    _check_even("chimera", ranks)
    placement = mirror(ranks)
    wishes = [
        [
            Action(rank if i % 2 == 0 else 2 * ranks - 1 - rank, kind, i)
            for kind in (Kind.B, Kind.F)
            for i in range(microbatches)
        ]
        for rank in range(ranks)
    ]
    orders = greedy(placement, wishes, ranks // 2, copies=2, backward=1).orders
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
