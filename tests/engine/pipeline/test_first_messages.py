"""Communicators that are created in their first message, by both ends together, as NCCL's are."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.engine.pipeline import exchange
from stretto.engine.pipeline.exchange import BACKWARD, FORWARD, Channel, Transfer
from stretto.program.action import Action, ActionKind
from stretto.program.lower import LOOKAHEAD, lower
from stretto.program.program import Program
from stretto.program.schedules.registry import names, schedule


def first_messages(program: Program, rank: int, patch: pytest.MonkeyPatch) -> list[Channel]:
    """The channels of a rank in the order of its first messages, if its groups connect lazily."""
    used = list[Channel]()

    def noted(self: Transfer, tensor: torch.Tensor, channel: Channel) -> Any:
        used.append(channel)
        return SimpleNamespace(wait=lambda: None)

    def send(self: Transfer, tensor: torch.Tensor, channel: Channel) -> Any:
        assert channel[0] == rank
        return noted(self, tensor, channel)

    with patch.context() as context:
        context.setattr(Transfer, "send", send)
        context.setattr(Transfer, "receive", noted)
        context.setattr(exchange, "make_group", lambda ranks, timeout: ranks if rank in ranks else None)
        context.setattr(dist, "get_rank", lambda: rank)
        context.setattr(dist, "get_backend", lambda _: "nccl")
        context.setattr(exchange, "carrier", lambda _: torch.device("cpu"))
        transfer = Transfer([range(program.ranks)], program)
        for action in program.orders[rank]:
            channel = channel_of(program, rank, action)
            if channel is not None and channel not in used:
                used.append(channel)
        assert set(used) == set(transfer._ends)
    return used


def channel_of(program: Program, rank: int, action: Action) -> Channel | None:
    placement, stage = program.placement, action.stage
    match action.kind:
        case ActionKind.SEND_F:
            return rank, placement[stage + 1], FORWARD
        case ActionKind.SEND_B:
            return rank, placement[stage - 1], BACKWARD
        case ActionKind.RECV_F:
            return placement[stage - 1], rank, FORWARD
        case ActionKind.RECV_B:
            return placement[stage + 1], rank, BACKWARD
        case _:
            return None


def all_meet(orders: Sequence[list[Channel]]) -> bool:
    """True if no rank waits forever, where each channel's first message waits for its other end."""
    waiting = [list(order) for order in orders]
    while any(waiting):
        met = {order[0] for order in waiting if order}
        met = {c for c in met if all(waiting[end] and waiting[end][0] == c for end in c[:2])}
        if not met:
            return False
        waiting = [order[1:] if order and order[0] in met else order for order in waiting]
    return True


@pytest.mark.parametrize("name", sorted(set(names()) - {"auto"}))
def test_first_messages_do_not_wait_in_a_circle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = lower(schedule(name, 4, 8), lookahead=LOOKAHEAD)
    assert all_meet([first_messages(program, rank, monkeypatch) for rank in range(4)])


def test_first_messages_of_a_step_would_wait_in_a_circle() -> None:
    program = lower(schedule("1f1b", 2, 4), lookahead=LOOKAHEAD)
    orders = list[list[Channel]]()
    for rank in range(2):
        found = (channel_of(program, rank, action) for action in program.orders[rank])
        orders.append(list(dict.fromkeys(channel for channel in found if channel is not None)))
    assert not all_meet(orders)
