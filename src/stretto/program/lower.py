"""Lowering: adds the communications that a schedule's compute actions need."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from stretto.errors import StrettoError
from stretto.program.action import TRANSFER, Action, ActionKind
from stretto.program.checks.structure import check_structure
from stretto.program.messages import Channel, channel_of, needed_by, receive_of, sent_by
from stretto.program.program import Program

LOOKAHEAD = 4  # compute actions before its use at which the executor has a receive posted


def lower(program: Program, tied: Iterable[Iterable[int]] = (), lookahead: int = 1) -> Program:
    """Add sends, receives and gradient reductions.

    - `SEND_F` follows its F, `SEND_B` its B or I, when the neighbouring stage is on another rank. It starts a
      send and does not block.
    - `RECV_F`, `RECV_B` post a receive; the compute action that consumes the message waits for it. Receives
      are posted `lookahead` compute actions before their consumer, or earlier if the channel's order requires
      it: on every channel (source, destination, direction) receives are posted in the order of the sends.
    - `REDUCE_GRAD` follows the last B or W of each stage; if weights change within the step, it comes before
      each `U` instead.
    - `REDUCE_TIED`, at the end, one for each stage of each tied set, set after set in the order of `tied` on
      every rank. A stage in two sets has it twice, in that order. With several copies of the weights, tied
      sets extend over all copies, and the copies of every stage form another set: their gradients are summed.

    Neighbouring stages on one rank pass tensors locally. Reductions in the given program are replaced.

    Args:
        program: a program that is not lowered.
        tied: sets of stages that share a parameter, such as ((0, 7),), numbered in the first copy.
        lookahead: number of the rank's compute actions between a receive and its consumer.

    Raises:
        StrettoError: a tied set or `lookahead` is out of range, or the program is already lowered.
        ScheduleError: the program does not do a step's work.
    """
    lowering = RankLowering(program, tied, lookahead)
    return lowering.lowered(range(program.ranks))


def unlower(program: Program) -> Program:
    """Return the program without the communications that `lower` adds, and without `UNSHARD` and `RESHARD`.

    For a lowered program from a file, such as torch's compute + comms.
    """
    orders = (tuple(a for a in order if a.kind not in _COMMUNICATION) for order in program.orders)
    return replace(program, orders=tuple(orders), tied=(), lowered=False)


class RankLowering:
    """Lowers a program rank by rank, so that a few of many ranks can be lowered.

    Args:
        program, tied, lookahead: as `lower` takes them.

    Raises:
        StrettoError, ScheduleError: as `lower`.
    """

    def __init__(self, program: Program, tied: Iterable[Iterable[int]] = (), lookahead: int = 1) -> None:
        if program.lowered:
            raise StrettoError(
                f"program {program.name!r} is lowered already", hint="give the schedule's own program"
            )
        if lookahead < 0:
            raise StrettoError(f"lookahead is {lookahead}, must be at least 0", hint="nearest is lookahead=0")
        self.program, self._lookahead = program, lookahead
        # tied sets with ascending stages, then one set for each stage that has copies
        sets = tuple(tuple(sorted(set(tie))) for tie in tied)
        for tie in sets:
            if len(tie) < 2 or tie[0] < 0 or tie[-1] >= program.depth:
                raise StrettoError(
                    f"tied set of stages is {tie}, "
                    f"must be two or more of the stages 0 to {program.depth - 1}",
                    hint="a parameter used by one stage only is not tied",
                )
        copies = range(program.copies)
        every = tuple(tuple(c * program.depth + s for c in copies for s in tie) for tie in sets)
        copies_of_stages = tuple(tuple(c * program.depth + s for c in copies) for s in range(program.depth))
        self._sets = every + (copies_of_stages if program.copies > 1 else ())
        check_structure(program)
        self._reduced = [with_reductions(program, rank) for rank in range(program.ranks)]
        self._sent: dict[int, dict[Channel, list[Action]]] = {}

    def lowered(self, ranks: Iterable[int]) -> Program:
        """Return the program with the lowered orders of these ranks and of the ranks they exchange messages
        with; the orders of all others are empty.
        """
        wanted = {peer for rank in ranks for peer in (rank, *self._peers(rank))}
        orders = [self._order(rank) if rank in wanted else () for rank in range(self.program.ranks)]
        return replace(self.program, orders=tuple(orders), tied=self._sets, lowered=True)

    def _peers(self, rank: int) -> list[int]:
        """Return the ranks that hold neighbours of the rank's stages, in order."""
        placement = self.program.placement
        stages = [stage + step for stage in self.program.stages_of(rank) for step in (-1, 1)]
        return sorted({placement[s] for s in stages if 0 <= s < len(placement)} - {rank})

    def _order(self, rank: int) -> tuple[Action, ...]:
        program, order = self.program, self._reduced[rank]
        sending = [self._sends(peer) for peer in self._peers(rank)]
        arriving = [m for of_peer in sending for channel, m in of_peer.items() if channel[1] == rank]
        posts = _posts(program, order, arriving, self._lookahead)
        shared_stages = [
            s for tie in self._sets for s in tie if program.trains and program.placement[s] == rank
        ]
        merged: list[Action] = []
        at = 0
        for action in order:
            if not action.kind.is_compute:
                merged.append(action)
                continue
            merged.extend(posts.get(at, ()))
            merged.append(action)
            at += 1
            if send := sent_by(program, action):
                merged.append(send)
        return (*merged, *(Action(stage, ActionKind.REDUCE_TIED) for stage in shared_stages))

    def _sends(self, rank: int) -> dict[Channel, list[Action]]:
        """Return the receives that match a rank's sends, by channel, in the order of the sends."""
        if rank not in self._sent:
            sending: dict[Channel, list[Action]] = defaultdict(list)
            for action in self._reduced[rank]:
                if send := sent_by(self.program, action):
                    sending[channel_of(self.program, send)].append(receive_of(send))
            self._sent[rank] = sending
        return self._sent[rank]


_SENDS = frozenset({ActionKind.SEND_F, ActionKind.SEND_B})
_PLACED_HERE = frozenset({ActionKind.REDUCE_GRAD, ActionKind.REDUCE_TIED})
_COMMUNICATION = TRANSFER | _PLACED_HERE | {ActionKind.UNSHARD, ActionKind.RESHARD}


def with_reductions(program: Program, rank: int) -> tuple[Action, ...]:
    """Return the order of a rank with a `REDUCE_GRAD` before each update or, if weights do not change within
    the step, after the last B or W of each stage.
    """
    actions = [action for action in program.orders[rank] if action.kind not in _PLACED_HERE]
    if program.versions:
        at = {n: action.stage for n, action in enumerate(actions) if action.kind is ActionKind.UPDATE}
    else:
        ends = ActionKind.B, ActionKind.W
        last = {action.stage: n + 1 for n, action in enumerate(actions) if action.kind in ends}
        at = {n: stage for stage, n in last.items()}
    for n in sorted(at, reverse=True):
        actions.insert(n, Action(at[n], ActionKind.REDUCE_GRAD))
    return tuple(actions)


def _posts(
    program: Program, order: Sequence[Action], arriving: Iterable[Sequence[Action]], lookahead: int
) -> dict[int, list[Action]]:
    """Return the receives to post before each of a rank's compute actions, by the action's index.

    Args:
        arriving: this rank's receives, by channel, in the order of the sends.
    """
    consumed: dict[Action, int] = {}
    compute = (action for action in order if action.kind.is_compute)
    for at, action in enumerate(compute):
        if receive := needed_by(program, action):
            consumed[receive] = at
    receives: list[tuple[int, Action]] = []
    for messages in arriving:
        # a message is needed no later than any that follows it on its channel
        wants: list[tuple[int, Action]] = []
        earliest = len(order)
        for receive in reversed(messages):
            earliest = min(earliest, consumed[receive])
            wants.append((earliest, receive))
        receives.extend(reversed(wants))
    posts: dict[int, list[Action]] = defaultdict(list)
    for at, receive in sorted(receives, key=lambda want: want[0]):  # stable: keeps each channel's order
        posts[max(0, at - lookahead)].append(receive)
    return posts


def send_releases(program: Program, rank: int) -> dict[Action, Action | None]:
    """Return for each send of `rank` in a lowered program the rank's first action before which the send is
    certainly complete.

    A send is complete once the receiver has consumed the message. After this rank has waited for any message
    that the receiver sent later, it can wait for the send at no cost and free the buffer. None if no such
    message follows; the executor then waits for the send at the end of the step.
    """
    assert program.lowered, "send_releases takes a lowered program"
    order, placement = program.orders[rank], program.placement
    sends = [action for action in order if action.kind in _SENDS]
    # of each peer's sends to this rank: its indices, and of the first action here for this or a later one
    replies = dict[int, tuple[list[int], list[int]]]()
    for peer in {placement[_receiver(send)] for send in sends}:
        places = enumerate(program.orders[peer])
        to_rank = [(at, a) for at, a in places if a.kind in _SENDS and placement[_receiver(a)] == rank]
        first = accumulate((_consumed(program, send, rank) for _, send in reversed(to_rank)), min)
        replies[peer] = [at for at, _ in to_rank], [*first][::-1]
    releases: dict[Action, Action | None] = {}
    for send in sends:
        peer = placement[_receiver(send)]
        sent, first = replies[peer]
        after = bisect_right(sent, _consumed(program, send, peer))
        releases[send] = order[first[after]] if after < len(first) else None
    return releases


def _receiver(send: Action) -> int:
    return send.stage + (1 if send.kind is ActionKind.SEND_F else -1)


def _consumed(program: Program, send: Action, rank: int) -> int:
    """Return the index in the receiving rank's order of the action that consumes a message."""
    positions = program.positions[rank]
    stage, microbatch = _receiver(send), send.microbatch
    if send.kind is ActionKind.SEND_F:
        return positions[stage, ActionKind.F, microbatch]
    at = positions.get((stage, ActionKind.B, microbatch))
    return positions[stage, ActionKind.I, microbatch] if at is None else at
