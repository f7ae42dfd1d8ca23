"""Bidirectional schedules: microbatches enter the pipeline from both ends (Chimera, DualPipe)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto.errors import StrettoError
from stretto.layout.placement import mirror, vee
from stretto.program.action import Action, ActionKind, actions, actions_and_none
from stretto.program.program import Program
from stretto.program.schedules.list_scheduling import greedy
from stretto.program.schedules.registry import register


@register("dualpipe-v", "forwards and backwards as overlapped pairs on a V placement", early=True)
def dualpipe_v(ranks: int, microbatches: int) -> Program:
    """DualPipeV (github.com/deepseek-ai/DualPipe, 2025): DualPipe "cut in half", as Sea AI Lab proposed.

    DualPipe's overlap of forward and backward on one copy of the weights: the V placement turns the second
    direction into the way back up. Ranks hold p + 1/2 microbatches. With fewer than 2p microbatches the order
    is that for 2p without the missing ones; backwards without a pair are then split.
    """
    total = max(2 * ranks, microbatches)
    splits = microbatches < total
    writers: list[_OrderWriter] = []
    for rank in range(ranks):
        stages = rank, 2 * ranks - 1 - rank
        writers.append(_OrderWriter({stage: range(microbatches) for stage in stages}, splits))
        _eight_steps(writers[-1], *stages, rank=rank, ranks=ranks, microbatches=total)
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
    writers: list[_OrderWriter] = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        of_copies = {down: range(0, microbatches, 2), up: range(1, microbatches, 2)}
        writers.append(_OrderWriter(of_copies, splits))
        # copy 0 enters at the near end for the first half of the ranks
        stages = (down, up) if rank < half else (up, down)
        distance = min(rank, ranks - 1 - rank)
        _eight_steps(writers[-1], *stages, rank=distance, ranks=half, microbatches=each)
    return _program("dualpipe", mirror(ranks), microbatches, writers, copies=2)


class _OrderWriter:
    """Builds one rank's order: the caller names stages, and each takes its microbatches in order.

    Backwards take one microbatch after another, whether split or not. Actions of microbatches beyond the last
    are counted but not written (`actions_and_none`).

    Args:
        microbatches: those of each of the rank's stages.
        splits: backwards outside pairs are I and then W, so that the gradient is sent before W.
    """

    def __init__(self, microbatches: Mapping[int, range], splits: bool) -> None:
        self._written: list[Action | None] = []
        self.pairs: set[tuple[Action, Action]] = set()
        self._splits = splits
        self._forwards = {
            stage: actions_and_none(stage, ActionKind.F, each) for stage, each in microbatches.items()
        }
        self._backwards = {
            stage: zip(*(actions_and_none(stage, kind, each) for kind in _BACKWARD), strict=True)
            for stage, each in microbatches.items()
        }
        self._due: list[Action | None] = []  # deferred weight gradients, oldest first

    @property
    def order(self) -> tuple[Action, ...]:
        return tuple(filter(None, self._written))

    def forward(self, *stages: int) -> None:
        """Write F of each stage."""
        self._written += [next(self._forwards[stage]) for stage in stages]

    def backward(self, stage: int) -> None:
        """Write B, or I and then W."""
        unsplit, *split = next(self._backwards[stage])
        self._written += split if self._splits else [unsplit]

    def input_gradient(self, stage: int) -> None:
        """Write I; its weight gradient is due from now on."""
        _, gradient, weight = next(self._backwards[stage])
        self._written.append(gradient)
        self._due.append(weight)

    def weight_gradients(self, count: int | None = None) -> None:
        """Write the oldest W that are due, at most this many."""
        self._written += self._due[:count]
        del self._due[:count]

    def pair(self, forward: int, backward: int) -> None:
        """Write F of one stage and B of another as a pair, or one alone if the other has no microbatch
        left.
        """
        f, b = next(self._forwards[forward]), next(self._backwards[backward])
        if f and b[0]:
            self.pairs.add((f, b[0]))
            self._written += f, b[0]
        else:
            self._written += (f, *b[1:]) if self._splits else (f, b[0])


_BACKWARD = ActionKind.B, ActionKind.I, ActionKind.W


def _eight_steps(
    writer: _OrderWriter, stage_0: int, stage_1: int, rank: int, ranks: int, microbatches: int
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
        writer.weight_gradients(1)
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
        writer.weight_gradients(1)
        (writer.backward if unsplit >= len(backwards) else writer.input_gradient)(stage_0)
    # step 8, nW: the remaining W
    writer.weight_gradients()


def _program(
    name: str, placement: tuple[int, ...], microbatches: int, writers: Sequence[_OrderWriter], copies: int = 1
) -> Program:
    return Program(
        name=name,
        placement=placement,
        microbatches=microbatches,
        orders=tuple(writer.order for writer in writers),
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
    preferences: list[list[Action]] = []
    for rank in range(ranks):
        preferences.append([])
        for kind in (ActionKind.B, ActionKind.F):
            of_kind = actions(rank, kind, microbatches)
            of_kind[1::2] = actions(2 * ranks - 1 - rank, kind, microbatches)[1::2]
            preferences[-1] += of_kind
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
