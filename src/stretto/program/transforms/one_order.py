"""One global order of transfers: every receive moves to the time at which its message is sent."""

from __future__ import annotations

from dataclasses import replace

from stretto.errors import StrettoError
from stretto.program.action import Action, ActionKind
from stretto.program.checks.transport import check_transport
from stretto.program.messages import needed_by, receive_of, send_of, tied_waits
from stretto.program.pairing import as_blocks
from stretto.program.program import Program

_COST = {ActionKind.F: 1, ActionKind.B: 2, ActionKind.I: 1, ActionKind.W: 1, ActionKind.RECOMPUTE: 1}
_RECEIVES = (ActionKind.RECV_F, ActionKind.RECV_B)


def one_order(program: Program) -> Program:
    """Return the program with every receive moved to the time at which its message is sent.

    All ranks then have their transfers in one common order, so the program completes under every transport of
    `check_transport`, including blocking ones and those that share a communicator between the two directions
    of a pair of ranks. torch's runtime requires this of a compute + comms CSV: on NCCL the transfers of a
    pair of ranks are one stream, and gloo matches messages of both directions by their order alone. `lower`
    instead posts receives ahead of their use, which overlaps more if each direction has its own channel.

    Times: F, I, W and a repeated forward take one unit, B two, and pairs run as one block.

    Raises:
        StrettoError: the program is not lowered.
        ScheduleError: the program deadlocks.
    """
    if not program.lowered:
        raise StrettoError(f"program {program.name!r} is not lowered", hint="give the lowered program")
    closed = as_blocks(program)
    execution = _Execution(closed)
    while execution.step():
        pass
    if any(execution.at[rank] < len(order) for rank, order in enumerate(closed.orders)):
        check_transport(program, blocks=True)  # raises with the reason
    return replace(program, orders=tuple(tuple(order) for order in execution.out))


class _Execution:
    """The position and time of each rank, and the orders built so far."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.partner = dict(program.pairs)
        self.at = [0] * program.ranks
        self.clock = [0] * program.ranks
        self.out: list[list[Action]] = [[] for _ in range(program.ranks)]
        self.sent: dict[Action, int] = {}  # when each send was done
        self.tied = tied_waits(program)
        for rank in range(program.ranks):
            self._skip_receives(rank)

    def step(self) -> bool:
        """Run the action that can start first, on the lowest rank in a tie; return False if none can
        start.
        """
        options = [
            (max(self.clock[rank], ready), rank)
            for rank in range(self.program.ranks)
            if (ready := self._ready(rank)) is not None
        ]
        if not options:
            return False
        start, rank = min(options)
        action = self.program.orders[rank][self.at[rank]]
        second = self.partner.get(action)
        actions = [action] if second is None else [action, second]
        self.out[rank] += actions
        self.clock[rank] = start + sum(_COST.get(a.kind, 0) for a in actions)
        self.at[rank] += len(actions)
        self._skip_receives(rank)
        if action.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
            self.sent[action] = start
            receive = receive_of(action)
            self.out[self.program.placement[receive.stage]].append(receive)
        return True

    def _skip_receives(self, rank: int) -> None:
        order = self.program.orders[rank]
        while self.at[rank] < len(order) and order[self.at[rank]].kind in _RECEIVES:
            self.at[rank] += 1

    def _ready(self, rank: int) -> int | None:
        """Return when the inputs of the rank's next action arrived, or None if they have not or the order
        ended.
        """
        at, order = self.at[rank], self.program.orders[rank]
        if at == len(order):
            return None
        if any(self.at[wait.rank] < wait.completed for wait in self.tied.get((rank, at), ())):
            return None
        ready = 0
        for action in (order[at], self.partner.get(order[at])):
            if action is not None and (receive := needed_by(self.program, action)):
                sent = self.sent.get(send_of(receive))
                if sent is None:
                    return None
                ready = max(ready, sent)
        return ready
