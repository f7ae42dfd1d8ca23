"""Messages between ranks, and dependencies of a rank on the progress of another."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from stretto.program.action import Action, ActionKind
from stretto.program.program import Program

Channel = tuple[int, int, ActionKind]


def sent_by(program: Program, action: Action) -> Action | None:
    """Return the send that follows a compute action, or None if its result is not sent to another rank."""
    stage, kind, microbatch = action
    if kind is ActionKind.F:
        return Action(stage, ActionKind.SEND_F, microbatch) if program.sends[stage] else None
    if kind is ActionKind.B or kind is ActionKind.I:  # no stage -1, the last, sends its output
        return Action(stage, ActionKind.SEND_B, microbatch) if program.sends[stage - 1] else None
    return None


def needed_by(program: Program, action: Action) -> Action | None:
    """Return the receive that a compute action waits for, or None if its input is already on the rank."""
    stage, kind, microbatch = action
    if kind is ActionKind.F:
        return Action(stage, ActionKind.RECV_F, microbatch) if program.sends[stage - 1] else None
    if kind is ActionKind.B or kind is ActionKind.I:
        return Action(stage, ActionKind.RECV_B, microbatch) if program.sends[stage] else None
    return None


def receive_of(send: Action) -> Action:
    """Return the receive that matches a send."""
    if send.kind is ActionKind.SEND_F:
        return Action(send.stage + 1, ActionKind.RECV_F, send.microbatch)
    return Action(send.stage - 1, ActionKind.RECV_B, send.microbatch)


def send_of(receive: Action) -> Action:
    """Return the send that matches a receive."""
    if receive.kind is ActionKind.RECV_F:
        return Action(receive.stage - 1, ActionKind.SEND_F, receive.microbatch)
    return Action(receive.stage + 1, ActionKind.SEND_B, receive.microbatch)


def channel_of(program: Program, transfer: Action) -> Channel:
    """Return the channel of a send or a receive, whose stages must exist."""
    stage, kind, _ = transfer
    placement = program.placement
    if kind is ActionKind.SEND_F:
        return placement[stage], placement[stage + 1], ActionKind.F
    if kind is ActionKind.RECV_F:
        return placement[stage - 1], placement[stage], ActionKind.F
    if kind is ActionKind.SEND_B:
        return placement[stage], placement[stage - 1], ActionKind.B
    return placement[stage + 1], placement[stage], ActionKind.B


class RankDependency(NamedTuple):
    """`rank` must have completed its first `completed` actions; errors name `action`."""

    rank: int
    completed: int
    action: Action


def tied_waits(program: Program) -> dict[tuple[int, int], list[RankDependency]]:
    """Return for each (rank, index in its order) that joins a reduction of tied parameters the dependencies
    on other ranks. A rank with several stages of one set joins with the last of them.
    """
    joins: list[dict[int, int]] = [{} for _ in program.tied]
    for rank, order in enumerate(program.orders):
        nth: dict[int, int] = defaultdict(int)
        for at, action in enumerate(order):
            if action.kind is ActionKind.REDUCE_TIED:
                sets = [k for k, tie in enumerate(program.tied) if action.stage in tie]
                joins[sets[nth[action.stage]]][rank] = at
                nth[action.stage] += 1
    return {
        (rank, at): [
            RankDependency(other, to, program.orders[other][to])
            for other, to in join.items()
            if other != rank
        ]
        for join in joins
        for rank, at in join.items()
    }
