"""The orders of pipeline ranks as numbers, with how long each rank keeps what it sends and receives.

Where `lower` makes a rank post its receives, and before which action a send is certainly complete
(`send_releases`), follows from the schedule's own program. So memory is counted without transfers, which are
most of the actions of a lowered program.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from stretto.program.action import COMPUTE, Action, ActionKind
from stretto.program.lower import LOOKAHEAD, with_reductions
from stretto.program.program import Program

# An event's number is `EVENTS` times the place of its stage on the rank plus that of its kind. Outputs and
# gradients are freed when their sends are complete.
EVENTS = 8
OTHER = 5
OUTPUT_FREED = 6
GRADIENT_FREED = 7
_NUMBERED = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.REDUCE_GRAD)
NUMBERS = dict.fromkeys(ActionKind, OTHER) | {kind: number for number, kind in enumerate(_NUMBERED)}
_FORWARD = NUMBERS[ActionKind.F]
_WEIGHT = NUMBERS[ActionKind.W]
_REDUCE = NUMBERS[ActionKind.REDUCE_GRAD]


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """The order of a rank: its program's, with a `REDUCE_GRAD` where `lower` adds one.

    Attributes:
        stages: the rank's stages, in model order.
        actions: the actions.
        events: their numbers; before each those of the messages that are freed at its start.
        receives: for each stage the buffers for activations and for gradients that arrive. A message has one
            from its receive to the last action of its microbatch on the stage.
        flights: for each stage the most microbatches between forward and backward.
    """

    stages: tuple[int, ...]
    actions: tuple[Action, ...]
    events: tuple[int, ...]
    receives: tuple[tuple[int, int], ...]
    flights: tuple[int, ...]


# A message: the position of the action before its send among the compute actions of the sender, that of the
# action that consumes it on the receiver, and the stage that sends it.
_Message = tuple[int, int, int]


class ProgramOrders:
    """The orders of the ranks of a program that is not lowered; each is computed once.

    Args:
        lookahead: compute actions before its consumer at which a receive is posted.
    """

    def __init__(self, program: Program, lookahead: int = LOOKAHEAD) -> None:
        assert not program.lowered, "a lowered program has transfers already"
        self._program, self._lookahead = program, lookahead
        # of each stage and microbatch the positions of the forward, of the backward that sends the gradient
        # on, and of the last action; -1: there is none
        self._forwards, self._backwards, self._lasts = (
            [[-1] * program.microbatches for _ in range(program.stages)] for _ in range(3)
        )
        self._compute = list[list[tuple[int, int, int]]]()  # stage, kind and microbatch of each action
        for order in program.orders:
            compute = [(s, NUMBERS[kind], n) for s, kind, n in order if n is not None and kind in COMPUTE]
            for at, (stage, kind, microbatch) in enumerate(compute):
                if kind == _FORWARD:
                    self._forwards[stage][microbatch] = at
                elif kind != _WEIGHT:
                    self._backwards[stage][microbatch] = at
                self._lasts[stage][microbatch] = at
            self._compute.append(compute)
        self._messages = dict[int, dict[tuple[int, bool], list[_Message]]]()
        self._orders = dict[int, RankOrder]()

    def of(self, rank: int) -> RankOrder:
        """The order of one rank."""
        if rank not in self._orders:
            self._orders[rank] = self._order(rank)
        return self._orders[rank]

    def _order(self, rank: int) -> RankOrder:
        stages = self._program.stages_of(rank)
        places = {stage: EVENTS * place for place, stage in enumerate(stages)}
        flying, flights = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
        actions, freed = with_reductions(self._program, rank), self._freed(rank, places)
        events, at = list[int](), 0
        for stage, kind, _ in actions:
            number = NUMBERS[kind]
            if number < _REDUCE:
                if at in freed:
                    events += sorted(freed[at])
                at += 1
                if number == _FORWARD:
                    flying[stage] += 1
                    flights[stage] = max(flights[stage], flying[stage])
                elif number != _WEIGHT:
                    flying[stage] -= 1
            events.append(places[stage] + number)
        return RankOrder(
            stages=tuple(stages),
            actions=actions,
            events=tuple(events),
            receives=self._receives(rank, stages),
            flights=tuple(flights.values()),
        )

    def _sends(self, rank: int) -> dict[tuple[int, bool], list[_Message]]:
        """The messages of a rank by their receiver and direction, True for gradients, in the order of the
        sends.
        """
        if rank not in self._messages:
            sends, placement = self._program.sends, self._program.placement
            messages = defaultdict[tuple[int, bool], list[_Message]](list)
            for at, (stage, kind, microbatch) in enumerate(self._compute[rank]):
                if kind == _FORWARD:
                    if sends[stage]:
                        consumed = self._forwards[stage + 1][microbatch]
                        messages[placement[stage + 1], False].append((at, consumed, stage))
                elif kind != _WEIGHT and sends[stage - 1]:  # no stage -1, the last, sends its output
                    consumed = self._backwards[stage - 1][microbatch]
                    messages[placement[stage - 1], True].append((at, consumed, stage))
            self._messages[rank] = messages
        return self._messages[rank]

    def _receives(self, rank: int, stages: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The buffers of each stage for activations and for gradients."""
        posted = defaultdict[tuple[int, bool], list[int]](list)  # by sending stage and direction
        placement = self._program.placement
        neighbours = {stage + step for stage in stages for step in (-1, 1)} & {*range(len(placement))}
        for peer in {placement[stage] for stage in neighbours} - {rank}:
            for of_gradients in (False, True):
                messages = self._sends(peer)[rank, of_gradients]
                # a message is needed no later than any that follows it in its direction
                needed = accumulate((consumed for _, consumed, _ in reversed(messages)), min)
                for (_, _, sender), at in zip(messages, [*needed][::-1], strict=True):
                    posted[sender, of_gradients].append(at - self._lookahead)
        buffers = list[tuple[int, int]]()
        for stage in stages:
            freed = sorted(at for at in self._lasts[stage] if at >= 0)
            pools = posted[stage - 1, False], posted[stage + 1, True]
            counts = [[n - bisect_left(freed, at) for n, at in enumerate(pool, 1)] for pool in pools]
            buffers.append((max(counts[0], default=0), max(counts[1], default=0)))
        return tuple(buffers)

    def _freed(self, rank: int, places: Mapping[int, int]) -> dict[int, list[int]]:
        """The events of sends that are freed at the start of compute actions, by the actions' positions. See
        `send_releases`, which names the action for each send.

        Args:
            places: the number of the first event of each stage.
        """
        freed = dict[int, list[int]]()
        for (peer, of_gradients), messages in self._sends(rank).items():
            replies = sorted(self._sends(peer)[rank, False] + self._sends(peer)[rank, True])
            sent = [at for at, _, _ in replies]
            # the first action here that consumes a reply or a later one
            first = [*accumulate((consumed for _, consumed, _ in reversed(replies)), min)][::-1]
            kind = GRADIENT_FREED if of_gradients else OUTPUT_FREED
            for _, consumed, stage in messages:
                if (after := bisect_left(sent, consumed)) < len(first):
                    freed.setdefault(first[after], []).append(places[stage] + kind)
        return freed


@lru_cache(maxsize=64)
def program_orders(program: Program) -> ProgramOrders:
    """The orders of a program's ranks."""
    return ProgramOrders(program)
