"""Which messages pass between ranks.

A channel is (source rank, destination rank, direction): its messages arrive in the order in which they were
sent, and channels do not wait for one another. The direction is `F` for activations and `B` for gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.schedule.action import Action, Kind

Channel = tuple[int, int, Kind]


def sent_by(placement: Sequence[int], action: Action) -> Action | None:
    """The send that follows a compute action, None where its result stays on the rank or is not passed on."""
    stage, kind, microbatch = action
    if kind is Kind.F:
        if stage + 1 < len(placement) and placement[stage + 1] != placement[stage]:
            return Action(stage, Kind.SEND_F, microbatch)
    elif (kind is Kind.B or kind is Kind.I) and stage > 0 and placement[stage - 1] != placement[stage]:
        return Action(stage, Kind.SEND_B, microbatch)
    return None


def needed_by(placement: Sequence[int], action: Action) -> Action | None:
    """The receive that a compute action waits for, None where its input is on the rank already."""
    stage, kind, microbatch = action
    if kind is Kind.F:
        if stage > 0 and placement[stage - 1] != placement[stage]:
            return Action(stage, Kind.RECV_F, microbatch)
    elif kind is Kind.B or kind is Kind.I:
        last = stage + 1 == len(placement)
        if not last and placement[stage + 1] != placement[stage]:
            return Action(stage, Kind.RECV_B, microbatch)
    return None


def receive_of(send: Action) -> Action:
    """The receive that a send meets."""
    if send.kind is Kind.SEND_F:
        return Action(send.stage + 1, Kind.RECV_F, send.microbatch)
    return Action(send.stage - 1, Kind.RECV_B, send.microbatch)


def send_of(receive: Action) -> Action:
    """The send that a receive meets."""
    if receive.kind is Kind.RECV_F:
        return Action(receive.stage - 1, Kind.SEND_F, receive.microbatch)
    return Action(receive.stage + 1, Kind.SEND_B, receive.microbatch)


def channel_of(placement: Sequence[int], transfer: Action) -> Channel:
    """The channel that a send or a receive uses; its stages must exist."""
    stage, kind, _ = transfer
    if kind is Kind.SEND_F:
        return placement[stage], placement[stage + 1], Kind.F
    if kind is Kind.RECV_F:
        return placement[stage - 1], placement[stage], Kind.F
    if kind is Kind.SEND_B:
        return placement[stage], placement[stage - 1], Kind.B
    return placement[stage + 1], placement[stage], Kind.B
